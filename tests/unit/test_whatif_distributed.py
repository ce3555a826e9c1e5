"""What-ifs of distributed training have the step times that their schedules have by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from periodic_training import training
from synthetic_cluster import cluster

from autotune.cluster import Cluster, CollectiveFit, Where
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.lowering.device_costs import costs_of
from autotune.lowering.traffic import Collective
from autotune.whatif.answers.predict import changed
from autotune.whatif.base import Base, steady
from autotune.whatif.changes import all as changes
from autotune.whatif.messages.cluster_size import sized
from autotune.whatif.messages.collective_times import CollectiveTimes, collective_of, faster_network
from autotune.whatif.messages.ddp_buckets import buckets_of
from autotune.whatif.primitives import select
from autotune.whatif.question import Gradient, Question, Reading, TouchedRows
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.registry import combined

assert changes
MIB = 2**20
KERNEL_US = 400.0


def fitted(workers: int, s_per_mib: float, devices: int = 1) -> Cluster:
    """A cluster on which an all-reduce takes this time per MiB, and nothing else."""
    fits = tuple(
        CollectiveFit("all_reduce", count, 0.0, s_per_mib / MIB, 0.0, 1, 2**30)
        for count in (2, 4, 8, workers)
    )
    hosts = [(devices, 1000.0)] * (workers // devices)
    return cluster(*hosts).with_fits(tuple(dict.fromkeys(fits)))


def base_of(host_us: float = 5, kernel_us: float = KERNEL_US) -> Base:
    """Three kernels: two of the backward pass, and the optimizer's."""
    return recorded_base(training(host_us, kernel_us), 0)


def gradients(base: Base, *sizes_mib: float) -> tuple[Gradient, ...]:
    """Gradients that the first kernels complete, one each; the first kernel reads them all."""
    kernels = [int(np.flatnonzero(select(base, name=f"gemm_{n}"))[0]) for n in range(3)]
    return tuple(
        Gradient(f"w{place}", size * MIB, "", kernels[min(place, 1)], kernels[2], kernels[0])
        for place, size in enumerate(sizes_mib)
    )


def step_us(base: Base, names: str, question: Question) -> float:
    return steady(changed(base, combined(names), question)).step_s * 1e6


def ask(base: Base, on: Cluster, *sizes_mib: float, **amounts: float) -> Question:
    """Optimistic: messages do not slow down beside kernels, and fits are exact."""
    return Question(
        reading=Reading.OPTIMISTIC,
        cluster=on,
        gradients=gradients(base, *sizes_mib),
        amounts=amounts,
    )


def test_buckets_are_those_of_ddp() -> None:
    """The first closes at 1 MiB, the others at 25 MiB, each once it holds its limit."""
    sizes = [0.5, 0.4, 0.2, 30, 10, 10, 6, 1]
    made = [Gradient(str(n), size * MIB, "", 0, NONE, NONE) for n, size in enumerate(sizes)]
    assert [bucket.positions for bucket in buckets_of(made)] == [(0, 1, 2), (3,), (4, 5, 6), (7,)]
    half = [replace(one, dtype="float16") if n % 2 else one for n, one in enumerate(made)]
    assert sorted(p for bucket in buckets_of(half) for p in bucket.positions) == list(range(8))
    assert all(len({half[p].dtype for p in bucket.positions}) == 1 for bucket in buckets_of(half))


def test_hidden_messages_cost_copies_only_and_exposed_ones_delay_the_optimizer() -> None:
    """Kernels of 400 us: the second gradient's message of 2 MiB runs behind the backward pass."""
    base = base_of()
    assert steady(base).step_s * 1e6 == pytest.approx(1200, rel=0.01)
    hidden = step_us(base, "distributed", ask(base, fitted(4, 1e-9), 2, 2))
    exposed = step_us(base, "distributed", ask(base, fitted(4, 500e-6), 2, 2))
    assert 1200 < hidden < 1260
    # first message from 400 to 1400 us, second one to 2400 us, then copies and the optimizer
    assert exposed == pytest.approx(hidden + 2400 - 800, rel=0.02)


def test_buckets_of_another_size_are_sent_one_by_one() -> None:
    """Two gradients of 2 MiB: a bucket each up to 2 MiB, one bucket from 4 MiB on."""
    base = base_of()
    small, large = (
        changed(base, combined("bucket_size"), ask(base, fitted(4, 1e-4), 2, 2, bucket_size=size))
        for size in (2, 4)
    )
    sent = [one.size_bytes[select(one, kinds=[Kind.COLLECTIVE])].tolist() for one in (small, large)]
    assert sent == [[2 * MIB, 2 * MIB], [4 * MIB]]
    for amount in ({}, {"bucket_size": 0.0}):
        with pytest.raises(InvalidInput, match="the size of a bucket in MiB above 0"):
            changed(base, combined("bucket_size"), ask(base, fitted(4, 1e-4), 2, 2, **amount))
    with pytest.raises(InvalidInput, match="this trace holds collectives"):
        changed(small, combined("bucket_size"), ask(base, fitted(4, 1e-4), 2, 2, bucket_size=1))


def test_sparse_gradients_are_gathered_as_rows_and_copied_nowhere() -> None:
    """A table of 64 MiB, of which a step touches 1 MiB: four workers gather 4 MiB."""
    base = base_of()
    fit = CollectiveFit("all_gather", 4, 0.0, 1e-4 / MIB, 0.0, 1, 2**30)
    on = fitted(4, 1.0)
    on = on.with_fits((*on.fits, fit))
    dense, table = gradients(base, 2, 64)
    table = replace(table, touched=TouchedRows(1, 64, MIB))
    question = replace(ask(base, on), gradients=(dense, table))
    sent = changed(base, combined("distributed"), question)
    messages = select(sent, kinds=[Kind.COLLECTIVE])
    assert sent.size_bytes[messages].tolist() == [2 * MIB, 4 * MIB]
    costs = costs_of("cuda")
    added_s = MIB * (costs["rows_take_s_per_byte"] + 4 * costs["rows_add_s_per_byte"])
    gathered_s = float(sent.duration_s[messages][1])
    assert gathered_s == pytest.approx(4e-4 + 4 * 32 * 1e-4 / MIB + added_s)
    copies = select(sent, kinds=[Kind.PACK, Kind.UNPACK])
    copied_s = 2 * MIB * (costs["pack_s_per_byte"] + costs["unpack_s_per_byte"])
    assert sent.duration_s[copies & sent.on_device].sum() == pytest.approx(copied_s)
    halved = changed(sent, combined("fp16_gradients"), question)
    assert halved.size_bytes[messages].tolist() == [MIB, 4 * MIB]
    with pytest.raises(InvalidInput, match="1 gradients of the trace are sparse, such as 'w1'"):
        changed(base, combined("p3"), question)


def test_gradients_of_16_bits_halve_the_messages_and_cost_their_rounding() -> None:
    base = base_of()
    question = ask(base, fitted(4, 500e-6), 2, 2)
    whole = changed(base, combined("distributed"), question)
    half = changed(base, combined("distributed+fp16_gradients"), question)
    sent = select(whole, kinds=[Kind.COLLECTIVE])
    assert half.size_bytes[sent].tolist() == [MIB, MIB]
    costs = costs_of("cuda", base.device)
    rounding_s = (costs["cast_s_per_byte"] + costs["unpack_s_per_byte"]) * 2 * MIB
    expected = whole.duration_s[sent] / 2 + rounding_s
    assert half.duration_s[sent] == pytest.approx(expected, rel=0.01)
    with pytest.raises(InvalidInput, match=r"changes collectives|distributed\+fp16_gradients"):
        changed(base, combined("fp16_gradients"), question)


def test_added_messages_of_16_bits_are_not_halved_again() -> None:
    base = base_of()
    question = ask(base, fitted(4, 500e-6), 2, 2)
    narrow = tuple(replace(one, dtype="bfloat16") for one in gradients(base, 2, 2))
    for names, asked in (
        ("distributed+fp16_gradients", replace(question, gradients=narrow)),
        ("distributed+fp16_gradients+fp16_gradients", question),
    ):
        with pytest.raises(InvalidInput, match="at most 2 bytes"):
            changed(base, combined(names), asked)


def test_one_worker_sends_nothing() -> None:
    base = base_of()
    question = replace(ask(base, fitted(4, 500e-6), 2, 2), workers=1)
    assert step_us(base, "distributed", question) == pytest.approx(1200, rel=0.01)


def test_any_number_of_workers_takes_the_same_graph() -> None:
    base = base_of()
    few = changed(base, combined("workers"), ask(base, fitted(4, 1e-4), 2, 2, workers=2))
    many = changed(base, combined("workers"), ask(base, fitted(4, 1e-4), 2, 2, workers=65536))
    assert few.ops == many.ops


def test_messages_take_longer_while_kernels_run() -> None:
    """The first of two messages of 400 us runs beside the second kernel, the other one alone."""
    base = base_of()
    question = ask(base, fitted(4, 200e-6), 2, 2)
    alone = changed(base, combined("distributed"), question)
    contended = changed(base, combined("distributed"), replace(question, reading=Reading.EXPECTED))
    messages = select(alone, kinds=[Kind.COLLECTIVE])
    ratios = contended.duration_s[messages] / alone.duration_s[messages]
    assert ratios[0] == pytest.approx(1 / 0.772, rel=0.03)
    assert ratios[1] < 1.05


def test_synchronizing_first_gives_a_message_the_device_and_delays_the_host() -> None:
    base = base_of()
    question = replace(ask(base, fitted(4, 200e-6), 2, 2), reading=Reading.EXPECTED)
    before = changed(base, combined("distributed"), question)
    after = changed(base, combined("distributed+sync_before_allreduce"), question)
    messages = select(before, kinds=[Kind.COLLECTIVE])
    assert after.duration_s[messages][0] < before.duration_s[messages][0]
    issue = int(np.flatnonzero(select(after, name="issue bucket 0"))[0])
    pack = int(after.parent[after.child == np.flatnonzero(messages)[0]].min())
    assert pack != issue
    kernels = after.parent[after.child == issue]
    assert (
        after.on_device[kernels].any()
        and not before.on_device[before.parent[before.child == issue]].any()
    )


def test_a_faster_network_shortens_what_is_exposed() -> None:
    base = base_of()
    question = replace(
        ask(base, fitted(4, 500e-6), 2, 2, faster_network=4), reading=Reading.EXPECTED
    )
    before = step_us(base, "distributed", question)
    faster = step_us(base, "distributed+faster_network", question)
    quarter = replace(ask(base, fitted(4, 125e-6), 2, 2), reading=Reading.EXPECTED)
    assert faster == pytest.approx(step_us(base, "distributed", quarter), rel=0.03)
    assert faster < before


@pytest.mark.parametrize("name", ["blueconnect", "deep_gradient_compression"])
def test_a_faster_network_also_carries_the_messages_of_what_follows(name: str) -> None:
    """They took the times of the slow network, without a word."""
    base = base_of()
    slow, fast = (cluster((4, rate), (4, rate)) for rate in (1000.0, 4000.0))
    question = replace(ask(base, slow, 2, 2, faster_network=4), reading=Reading.EXPECTED)
    found = changed(base, combined(f"distributed+faster_network+{name}"), question)
    question = replace(ask(base, fast, 2, 2), reading=Reading.EXPECTED)
    expected = changed(base, combined(f"distributed+{name}"), question)
    messages = select(expected, kinds=[Kind.COLLECTIVE])
    assert found.duration_s[messages] == pytest.approx(expected.duration_s[messages])


def test_overlap_is_perfect_if_only_the_longer_of_both_counts() -> None:
    base = base_of()
    for s_per_mib, expected_us in ((1e-9, 1200), (1000e-6, 4000)):
        question = ask(base, fitted(4, s_per_mib), 2, 2)
        assert step_us(base, "distributed+perfect_overlap", question) == pytest.approx(
            expected_us, rel=0.05
        )


def test_p3_reads_in_the_next_step_and_sends_what_is_read_first() -> None:
    """1 Gbit/s: the slices of 0.25 MiB of both gradients take 2 * 3/4 * S/b each way."""
    base = base_of()
    on = cluster(*[(1, 1000.0)] * 4)
    question = ask(base, on, 1, 1, p3=MIB / 4)
    found = step_us(base, "p3", question)
    sent_us = 2 * 3 / 4 * 2 * MIB / 125e6 * 1e6
    assert found >= sent_us
    assert found < sent_us + 2 * 1200
    p3 = changed(base, combined("p3"), question)
    assert p3.by_priority.any()
    shared = ask(base, cluster((4, 1000.0), (4, 1000.0)), 1, 1, p3=MIB / 4)
    # each host sends 4 workers' halves and the sums of its 4 servers to 4 other workers
    assert step_us(base, "p3", shared) >= 4 * 2 * MIB / 125e6 * 1e6
    with pytest.raises(InvalidInput, match="at most 100000 slices"):
        step_us(base, "p3", ask(base, on, 1, 1, p3=1))


def test_blueconnect_needs_two_levels_and_wins_where_the_inner_links_are_fast() -> None:
    base = base_of()
    flat = cluster((1, 1000.0), (1, 1000.0))
    with pytest.raises(InvalidInput, match="several hosts with several devices"):
        step_us(base, "distributed+blueconnect", ask(base, flat, 2, 2))
    two = cluster((4, 1000.0), (4, 1000.0))
    question = ask(base, two, 2, 2)
    ring = step_us(base, "distributed", question)
    staged = step_us(base, "distributed+blueconnect", question)
    assert staged < ring  # 2 (h - 1) / h of the bytes instead of 2 (n - 1) / n


def test_stages_of_messages_have_the_names_of_their_collectives() -> None:
    base = base_of()
    question = ask(base, cluster((4, 1000.0), (4, 1000.0)), 2, 2)
    parts = changed(base, combined("distributed+blueconnect"), question)
    messages = np.flatnonzero(select(parts, kinds=[Kind.COLLECTIVE]))
    kinds = [collective_of(parts.names.ops[op]) for op in messages.tolist()]
    for kind in (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE, Collective.ALL_GATHER):
        assert kinds.count(kind) == len(messages) // 3 > 0


@pytest.mark.parametrize("first", ["blueconnect", "deep_gradient_compression"])
@pytest.mark.parametrize(
    "then",
    [
        *("faster_network", "fp16_gradients", "sync_before_allreduce", "workers"),
        *("blueconnect", "deep_gradient_compression"),
    ],
)
def test_replaced_messages_are_not_changed_as_whole_ones(first: str, then: str) -> None:
    base = base_of()
    question = ask(base, cluster((4, 1000.0), (4, 1000.0)), 2, 2, workers=8)
    with pytest.raises(InvalidInput, match=f"but {first} before has replaced them"):
        changed(base, combined(f"distributed+{first}+{then}"), question)


def test_compression_sends_a_share_and_costs_kernels() -> None:
    base = base_of()
    on = cluster(*[(1, 1000.0)] * 4)
    question = ask(base, on, 8, 8)
    whole = step_us(base, "distributed", question)
    sent = step_us(base, "distributed+deep_gradient_compression", question)
    assert 1200 < sent < whole / 10
    little = changed(base, combined("distributed+deep_gradient_compression"), question)
    messages = select(little, kinds=[Kind.COLLECTIVE])
    elements = 8 * MIB / 4
    assert little.size_bytes[messages][0] == 4 * np.ceil(0.001 * elements) * 8


@pytest.mark.parametrize(
    "name", ["faster_network", "sync_before_allreduce", "perfect_overlap", "no_stragglers"]
)
def test_changes_of_messages_need_messages(name: str) -> None:
    base = base_of()
    with pytest.raises(InvalidInput, match="the trace has none; combine it"):
        step_us(base, name, ask(base, fitted(4, 1e-4), 2, 2))


def test_stragglers_show_only_in_the_traces_of_all_ranks() -> None:
    base = base_of()
    question = ask(base, fitted(4, 500e-6), 2, 2)
    with pytest.raises(InvalidInput, match="the traces of all ranks"):
        step_us(base, "distributed+no_stragglers", question)


def test_a_cluster_grows_by_equal_hosts_and_shrinks_from_its_end() -> None:
    even, uneven = cluster((4, 100.0), (4, 100.0)), cluster((4, 100.0), (4, 200.0))
    assert sized(even, 8) is even
    assert [host.devices for host in sized(uneven, 6).hosts] == [4, 2]
    assert sized(even, 4096).world_size == 4096
    for on, count in ((uneven, 16), (even, 10)):
        with pytest.raises(InvalidInput, match="a file of its own"):
            sized(on, count)
    with pytest.raises(InvalidInput, match="the number of workers must be from 1"):
        sized(even, 0)


def test_fewer_workers_of_one_host_cost_what_ranks_of_a_host_do() -> None:
    inside, across = (
        CollectiveFit("all_reduce", 2, 0.0, s_per_byte, 0.0, 1, 2**30, where=where)
        for where, s_per_byte in ((Where.HOST, 1e-10), (Where.ACROSS, 1e-8))
    )
    on = cluster((2, 1000.0), (2, 1000.0)).with_fits((inside, across))
    assert on.fit("all_reduce", 2) == across
    assert sized(on, 2).fit("all_reduce", 2) == inside
    assert sized(cluster((1, 1000.0), (1, 1000.0), (1, 1000.0)), 2).fit("all_reduce", 2) is None


def test_a_faster_network_changes_costs_per_byte_only() -> None:
    before = fitted(4, 1e-3)
    after = faster_network(before, 2.0)
    fit = after.fit("all_reduce", 4)
    assert fit is not None and fit.seconds(MIB) == pytest.approx(0.5e-3)
    assert after.hosts[0].link_bytes_per_s == 2 * before.hosts[0].link_bytes_per_s
    inside = replace(fit, group_size=2, where=Where.HOST)
    faster = faster_network(before.with_fits((inside,)), 2.0)
    assert faster.fit("all_reduce", 2, Where.HOST) == inside
    with pytest.raises(InvalidInput, match="a factor above 0"):
        faster_network(before, 0.0)


def test_kernels_name_their_collective() -> None:
    assert collective_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL(4096)") == "all_reduce"
    assert collective_of("nccl:all_gather") == "all_gather"
    assert collective_of("gloo:all_reduce") == "all_reduce"
    assert collective_of("gloo:sparse_all_reduce") is None
    assert collective_of("ampere_sgemm_128x64") is None
    assert CollectiveTimes  # its costs are those of the lowering, which has its own tests


def test_changes_of_messages_are_on_as_many_workers_as_are_asked_for() -> None:
    """On 4 workers an all-reduce of 2 MiB takes 3 ms, and one of 1 MiB 2 ms."""
    base = base_of()
    fits = [
        CollectiveFit("all_reduce", n, 0.0, s / MIB, 0.0, 1, 2**30)
        for n, s in ((2, 1e-6), (4, 1e-3))
    ]
    bent = replace(fits[1], alpha_s=1e-3)
    on = cluster((1, 1000.0), (1, 1000.0)).with_fits((fits[0], bent))
    half = changed(base, combined("workers+fp16_gradients"), ask(base, on, 2, 2, workers=4))
    sent = select(half, kinds=[Kind.COLLECTIVE])
    costs = costs_of("cuda", base.device)
    rounding_s = (costs["cast_s_per_byte"] + costs["unpack_s_per_byte"]) * 2 * MIB
    assert half.duration_s[sent] == pytest.approx(2e-3 + rounding_s, rel=0.01)
