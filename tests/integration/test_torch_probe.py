"""The link probe over loopback: complete, equal on all ranks, and within its deadline."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch_world import run_world

from autotune.cluster import Cluster, Where
from autotune.recordings.probe import LinkCost, PeerCost, ProbedLinks, ProbeSeries
from runtime_rewriter.probe import collectives
from runtime_rewriter.probe import peers as peer_probe
from runtime_rewriter.probe.collectives import (
    BATCH_REPEATS,
    LOADED_BYTES,
    SIZES_BYTES,
    ProbeResult,
    probe_cluster,
    probe_links,
    sizes_up_to,
)
from runtime_rewriter.probe.groups import members_of
from runtime_rewriter.probe.peers import PeerProbe
from runtime_rewriter.pytorch.exchange.device import Device
from runtime_rewriter.pytorch.exchange.ranks import SynchronizerGroups

EVERYWHERE = {
    "all_reduce",
    "direct_exchange",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "reduce_scatter_all_gather",
    "push_pull",
}


def short(
    rank: int,
    deadline_s: float,
    devices: tuple[int, ...] = (),
    byte_scale: float = 1.0,
    largest_bytes: int = SIZES_BYTES[-1],
) -> tuple[tuple[ProbeSeries, ...], float]:
    started_s = time.monotonic()
    series = probe_links(None, deadline_s, devices, byte_scale, largest_bytes)
    return series, time.monotonic() - started_s


def test_every_primitive_is_timed_for_pairs_and_the_world_with_equal_results_on_all_ranks() -> None:
    from autotune.profiling.fits.probe_fits import collective_fits  # brings scipy

    # Few sizes, so that a busy machine measures them all before the deadline.
    answers = run_world(short, 3, 60.0, (), 1.0, 2**18)
    series = answers[0][0]
    assert all(answer[0] == series for answer in answers)
    fits = collective_fits(series)
    assert {(fit.primitive, fit.group_size) for fit in fits} == {
        (name, size) for name in EVERYWHERE for size in (2, 3)
    }
    for fit in fits:
        assert fit.alpha_s >= 0 and fit.beta_s_per_byte >= 0 and fit.seconds(2.0**20) > 0
        assert fit.smallest_bytes == SIZES_BYTES[0] < fit.largest_bytes
        assert fit.sizes >= 2 and fit.spread >= 0 and not fit.loaded
    assert Cluster.local(3).with_fits(fits).fit("push_pull", 3) is not None


def test_a_short_deadline_gives_fewer_sizes_not_a_late_answer() -> None:
    answers = run_world(short, 2, 0.5)
    assert all(seconds < 60 for _, seconds in answers)
    assert {one.points[-1].size_bytes for one in answers[0][0]} != {SIZES_BYTES[-1]}


def test_a_world_of_one_has_no_links() -> None:
    assert run_world(short, 1, 1.0)[0][0] == ()
    assert run_world(long, 1, 1.0, (1,))[0][0] == ProbeResult((), ProbedLinks())


def test_scaled_messages_count_as_whole_ones_up_to_the_largest_of_a_plan() -> None:
    series = run_world(short, 2, 60.0, (), 64.0, 100_000)[0][0]
    assert {tuple(point.size_bytes for point in one.points) for one in series} == {
        (4096, 16384, 100_000)
    }


@pytest.mark.parametrize("largest_bytes", [1, 65_536, 131_072, 10_700_000, 2**24, 2**30])
def test_sizes_end_at_the_largest_message_with_three_at_least(largest_bytes: int) -> None:
    sizes = sizes_up_to(largest_bytes)
    assert list(sizes) == sorted(set(sizes)) and len(sizes) >= 3
    assert sizes[-1] == min(max(largest_bytes, SIZES_BYTES[2]), SIZES_BYTES[-1])
    # Two sizes that are close tell no slope.
    assert all(2 * size <= larger for size, larger in pairwise(sizes))


def peers(rank: int) -> tuple[tuple[PeerCost, ...], list[str]]:
    world = SynchronizerGroups.of(None, 60.0, 60.0)
    reports: list[str] = []
    peer_probe.ATTEMPTS = 20  # four are few on a machine that disturbs every other line
    probe = PeerProbe(world, Device(torch.device("cpu")), lambda *_: 1.0, 1.0, reports.append)
    between = {(0, 1): LinkCost(1e8, 0.0, 0.0, 0.0), (0, 2): LinkCost(3e8, 0.0, 0.0, 0.0)}
    return probe.probe((1, 1, 1), between, 1.0), reports


def test_every_host_sends_to_and_receives_from_one_and_all_others_at_once() -> None:
    answers = run_world(peers, 3)
    costs, reports = answers[0]
    assert all(answer == costs for answer, _ in answers)
    measured = {(one.host, one.peers, one.outwards) for one in costs}
    assert measured <= {(host, k, out) for host in range(3) for k in (1, 2) for out in (0, 1)}
    assert len(measured) >= 10  # a disturbed line may be flat
    assert all(one.bytes_per_s > 0 and one.message_s >= 0 for one in costs)
    assert reports[0] == "host 0 to 1 peers at once"


def long(
    rank: int, budget_s: float, devices: tuple[int, ...], script_groups: bool = False
) -> tuple[ProbeResult, list[str], int]:
    """`script_groups`: some ranks have created a group, and there was a probe before.

    A busy machine measures these few sizes before any deadline.
    """
    collectives.BETWEEN_BYTES, collectives.SIZES_BYTES = (), SIZES_BYTES[:4]
    collectives.LOADED_BYTES = LOADED_BYTES[:2]  # every rank computes all the while
    collectives.MOST_REPEATS = BATCH_REPEATS
    if script_groups and rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    if script_groups:
        probe_links(None, 0.5, devices)
    before = len(dist.distributed_c10d._world.pg_map)
    reports: list[str] = []
    result = probe_cluster(None, budget_s, devices, reports.append)
    return result, reports, len(dist.distributed_c10d._world.pg_map) - before


def test_hosts_are_probed_inside_and_between_each_other_and_under_load() -> None:
    answers = run_world(long, 4, 150.0, (2, 2), True, timeout_s=240.0)
    result, reports, _ = answers[0]
    assert all(answer[0] == result for answer in answers)
    assert all(left == 0 for _, _, left in answers)  # the probe's groups are gone again
    kinds = {(one.where, one.group_size, one.loaded) for one in result.series}
    assert kinds == {
        (Where.WORLD, 4, False),
        (Where.ACROSS, 2, False),
        (Where.HOST, 2, False),
        (Where.WORLD, 4, True),
    }
    assert {one.primitive for one in result.series if one.where is Where.HOST} <= EVERYWHERE
    assert {one.primitive for one in result.series if one.loaded} <= {
        "all_reduce",
        "push_pull",
        "reduce_scatter_all_gather",
    }
    assert [host for host, _ in result.links.inside] == [0, 1]
    assert [pair for pair, _ in result.links.between] == [(0, 1)]
    assert {(one.host, one.peers) for one in result.links.peers} == {(0, 1), (1, 1)}
    for _, cost in (*result.links.inside, *result.links.between):
        assert cost.bytes_per_s > 0 and cost.latency_s >= 0
    assert any("links of the hosts" in line for line in reports)
    assert any("while they compute" in line for line in reports)


@pytest.mark.parametrize(
    ("ranks", "devices", "groups"),
    [
        (2, (2,), {}),
        (2, (1, 1), {}),
        (3, (3,), {(Where.HOST, 2): [[0, 2]]}),
        (4, (1, 1, 1, 1), {(Where.ACROSS, 2): [[0, 3]]}),
        (4, (2, 2), {(Where.ACROSS, 2): [[0, 2]], (Where.HOST, 2): [[0, 1], [2, 3]]}),
        (
            7,
            (3, 1, 3),
            {
                (Where.ACROSS, 3): [[0, 3, 4]],
                (Where.HOST, 3): [[0, 1, 2], [4, 5, 6]],
                (Where.ACROSS, 2): [[0, 6]],
            },
        ),
        (
            4,
            (2, 2, 2),
            {(Where.HOST, 2): [[0, 3]]},
        ),  # the group is not the whole cluster: nothing is known of its hosts
        (4, (), {(Where.HOST, 2): [[0, 3]]}),
    ],
)
def test_the_groups_are_few_and_follow_the_hosts(ranks, devices, groups) -> None:
    assert members_of(ranks, devices) == groups


def test_thousands_of_ranks_form_three_kinds_of_groups() -> None:
    groups = members_of(8000, (8,) * 1000)
    assert set(groups) == {(Where.ACROSS, 1000), (Where.HOST, 8), (Where.ACROSS, 2)}
    assert sum(len(members) for of_one_kind in groups.values() for members in of_one_kind) == 9002
