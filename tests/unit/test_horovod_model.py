"""Horovod's negotiation, fusion and steps as a model, and the fit of its costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from autotune.cluster import Cluster, CollectiveFit, Host
from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from autotune.lowering.horovod import (
    DERIVED,
    HorovodCosts,
    HorovodLowering,
    HostTimes,
    ring_s_per_byte,
)
from autotune.lowering.negotiation import (
    EnqueuedTensor,
    HorovodSettings,
    fused_batches,
    last_end_s,
    negotiated,
)
from autotune.profiling.formats.horovod import read_horovod
from autotune.profiling.graph.horovod_costs import fit_horovod, measured_times
from autotune.profiling.graph.horovod_steps import horovod_steps
from autotune.recordings.horovod_calls import HorovodCall
from autotune.workload import Variable, Workload

RECORDED = Path(__file__).parents[1] / "stored" / "horovod" / "timeline.json"
SIZES = (4000, 8000, 400_000, 40_000)
WORKLOAD = Workload(
    "four",
    tuple(
        Variable(f"v{number}", (size // 4,), ready_s=0.01 * (number + 1))
        for number, size in enumerate(SIZES)
    ),
    forward_s=0.02,
    backward_s=0.045,
    update_s=0.005,
)


def cluster(link_bytes_per_s: float = 1e8) -> Cluster:
    hosts = tuple(Host(name, 1, link_bytes_per_s, 5e-5, 1e10, 5e-6) for name in "ab")
    return Cluster("two", hosts)


def costs(alpha_s: float = 1e-3) -> HorovodCosts:
    """Costs on `cluster()`, where a byte of a tensor takes 10 ns on the ring of two."""
    fit = CollectiveFit("all_reduce", 2, alpha_s, 1.2e-8, 0.0, 1000, 10_000_000)
    return HorovodCosts(
        all_reduce=fit,
        link_s_per_byte=ring_s_per_byte(cluster()),
        negotiate_s=0.5e-3,
        copy_s=1e-5,
        copy_s_per_byte=1e-10,
        synchronize_s=1e-5,
    )


def tensors(*sizes: float, dtype: str = "float32", at_s: float = 0.0) -> list[EnqueuedTensor]:
    return [EnqueuedTensor(f"t{number}", size, dtype, at_s) for number, size in enumerate(sizes)]


def test_tensors_fuse_in_order_up_to_the_threshold() -> None:
    settings = HorovodSettings(fusion_threshold_bytes=100)
    assert fused_batches(tensors(40, 60, 1, 99, 200), settings) == [(0, 1), (2, 3), (4,)]
    assert fused_batches(tensors(40, 60), HorovodSettings(0)) == [(0,), (1,)]


def test_a_tensor_of_another_type_is_skipped_while_the_skipped_ones_would_fit() -> None:
    mixed = [
        replace(one, dtype="float16") if one.name == "t1" else one for one in tensors(*[20] * 4)
    ]
    assert fused_batches(mixed, HorovodSettings(100)) == [(0, 2, 3), (1,)]
    assert fused_batches(mixed, HorovodSettings(39)) == [(0,), (1,), (2,), (3,)]


def test_groups_are_sent_apart_only_without_group_fusion() -> None:
    grouped = [replace(one, group=number // 2) for number, one in enumerate(tensors(1, 1, 1, 1))]
    assert fused_batches(grouped, HorovodSettings()) == [(0, 1, 2, 3)]
    apart = HorovodSettings(fuses_groups=False)
    assert fused_batches([*grouped, *tensors(1)], apart) == [(0, 1), (2, 3), (4,)]


def test_recorded_batches_are_those_of_the_model() -> None:
    with RECORDED.open("rb") as file:
        timeline = read_horovod(file.read, "timeline.json")
    for step in horovod_steps(timeline)[1:]:
        batches = [timeline.batches[number] for number in step.batches]
        sizes = [
            timeline.operations[member].size_bytes
            for batch in batches
            for member in batch.operations
        ]
        model = fused_batches(tensors(*sizes), HorovodSettings(40_000))
        assert [len(batch) for batch in model] == [len(batch.operations) for batch in batches]


def test_tensors_enqueued_during_a_transfer_wait_for_its_end() -> None:
    enqueued = [*tensors(100.0), *tensors(100.0, 100.0, at_s=2e-3), *tensors(100.0, at_s=0.1)]
    settings = HorovodSettings(cycle_s=1e-3)
    cycles = negotiated(
        enqueued, settings, negotiate_s=1e-4, batch_s=lambda count, size: 5e-3, phase=0.0
    )
    assert [cycle.tensors for cycle in cycles] == [(0,), (1, 2), (3,)]
    assert cycles[0].start_s == 0.0
    assert cycles[1].start_s == pytest.approx(5.1e-3)  # the thread was sending
    assert 0.1 <= cycles[2].start_s <= 0.1 + 1e-3  # idle cycles went on
    assert last_end_s(cycles) == pytest.approx(cycles[2].start_s + 5.1e-3)


def test_without_a_cycle_time_tensors_wait_only_for_transfers() -> None:
    enqueued = [*tensors(100.0), *tensors(100.0, at_s=2e-3), *tensors(100.0, at_s=2.5e-3)]
    cycles = negotiated(
        enqueued, HorovodSettings(cycle_s=0.0), negotiate_s=0.0, batch_s=lambda count, size: 1e-3
    )
    assert [cycle.start_s for cycle in cycles] == pytest.approx([0.0, 2e-3, 3e-3])


def test_the_replayed_graph_takes_the_time_of_the_simulated_cycles() -> None:
    for settings in (HorovodSettings(), HorovodSettings(10_000, 5e-3), HorovodSettings(0, 0.0)):
        lowering = HorovodLowering(WORKLOAD, cluster(), costs())
        cycles = lowering.cycles(settings)
        rest_s = WORKLOAD.update_s + WORKLOAD.forward_s
        synchronized_s = 1e-5 * len(cycles[-1].batches[-1].tensors)
        ended_s = max(last_end_s(cycles), WORKLOAD.backward_s)
        dfg = lowering.graph(settings)
        assert replay(dfg).makespan_s == pytest.approx(ended_s + synchronized_s + rest_s)
        batches = [batch for cycle in cycles for batch in cycle.batches]
        assert sum(DERIVED in name for name in dfg.names.ops) == 2 * len(batches)
        assert sorted(tensor for batch in batches for tensor in batch.tensors) == [0, 1, 2, 3]
        assert all(before.end_s <= after.start_s for before, after in pairwise(batches))


def test_the_graph_of_a_single_rank_has_the_batches_of_its_cycles() -> None:
    """Four tensors enqueued 10 ms apart, each in a batch of its own that takes 20 ms."""
    alone = Cluster("one", (Host("a", 1, 1e8, 5e-5, 1e10, 5e-6),))
    fit = CollectiveFit("all_reduce", 1, 20e-3, 0.0, 0.0, 1000, 10_000_000)
    executed = HorovodCosts(fit, 0.0, 0.0, 0.0, 0.0, 0.0)
    lowering = HorovodLowering(WORKLOAD, alone, executed)
    dfg = lowering.graph(HorovodSettings(0, 0.0))
    rest_s = WORKLOAD.update_s + WORKLOAD.forward_s
    assert replay(dfg).makespan_s == pytest.approx(10e-3 + 4 * 20e-3 + rest_s)
    assert sum(DERIVED in name for name in dfg.names.ops) == 4


def test_another_network_changes_what_its_ring_moves() -> None:
    slow = HorovodLowering(WORKLOAD, cluster(5e7), costs())
    same = HorovodLowering(WORKLOAD, cluster(), costs())
    assert same.all_reduce_s(1e6) == pytest.approx(1e-3 + 1.2e-2)
    assert slow.all_reduce_s(1e6) == pytest.approx(1e-3 + 2.2e-2)
    slower = HorovodLowering(WORKLOAD, cluster(5e6), costs())
    assert slower.step_s(HorovodSettings()) > same.step_s(HorovodSettings())


def test_a_group_is_enqueued_with_its_last_tensor() -> None:
    settings = HorovodSettings(groups=(("v0", "v3"),))
    enqueued = HorovodLowering(WORKLOAD, cluster(), costs()).enqueued(settings)
    assert {one.name: one.at_s for one in enqueued} == pytest.approx(
        {"v0": 0.04, "v1": 0.02, "v2": 0.03, "v3": 0.04}
    )


def test_impossible_settings_and_costs_of_other_ranks_are_refused() -> None:
    with pytest.raises(InvalidInput, match="'v0' is in two"):
        HorovodSettings(groups=(("v0",), ("v1", "v0")))
    with pytest.raises(InvalidInput, match="fusion threshold"):
        HorovodSettings(-1)
    with pytest.raises(InvalidInput, match="cycle time"):
        HorovodSettings(cycle_s=-1.0)
    three = Cluster("three", tuple(Host(name, 1, 1e8, 5e-5, 1e10, 5e-6) for name in "abc"))
    with pytest.raises(InvalidInput, match="they are of 2 and cluster 'three' has 3"):
        HorovodLowering(WORKLOAD, three, costs())


def call(name: str, size: int, step: int, called_s: float, complete_s: float) -> HorovodCall:
    return HorovodCall(
        name=name,
        op="all_reduce",
        tensors=1,
        size_bytes=size,
        dtype="float32",
        step=step,
        called_s=called_s,
        returned_s=called_s,
        incomplete_s=called_s,
        complete_s=complete_s,
        awaited_s=called_s,
    )


def probes(fit: CollectiveFit, negotiate_s: float, cycle_s: float) -> list[HorovodCall]:
    calls = []
    for size in (1000, 10_000, 100_000, 1_000_000, 10_000_000):
        end_s = 1.0
        for number in range(4):
            end_s += fit.seconds(size)
            calls.append(call(f"probe.{size}.{number}", size, -1, 1.0, end_s))
    latency_s = cycle_s / 2 + negotiate_s + fit.alpha_s
    return [*calls, *(call(f"latency.{at}", 4, -1, 2.0, 2.0 + latency_s) for at in range(5))]


def test_costs_are_found_again_from_calls_and_timeline() -> None:
    true = costs()
    listed = probes(true.all_reduce, 0.5e-3, 1e-3)
    with RECORDED.open("rb") as file:
        timeline = read_horovod(file.read, "timeline.json")
    found = fit_horovod(timeline, [listed, listed], cluster(), 1e-3)
    for size in (1000.0, 50_000.0, 5e6):
        assert found.all_reduce.seconds(size) == pytest.approx(true.all_reduce.seconds(size))
    assert found.negotiate_s == pytest.approx(0.5e-3)
    assert found.link_s_per_byte == pytest.approx(1e-8)
    assert 0 < found.copy_s < 1e-4
    # Most ranks died before they completed a probe.
    died = fit_horovod(timeline, [listed, *[[]] * 3], cluster(), 1e-3)
    assert died.all_reduce.seconds(1e6) == pytest.approx(true.all_reduce.seconds(1e6))
    with pytest.raises(InvalidInput, match="must probe 2 sizes or more, but has 0"):
        fit_horovod(timeline, [listed[-1:]], cluster(), 1e-3)


def steps_of_rank(late_s: float) -> tuple[list[HorovodCall], list[float]]:
    """Three steps of 0.1 s; gradients are ready 10 ms apart, all complete 50 ms after the start."""
    calls, ended_s = [], []
    for step in range(3):
        begin_s = 0.1 * step + late_s
        for number in range(len(SIZES)):
            at_s = begin_s + 0.01 * number
            calls.append(call(f"allreduce.v{number}", SIZES[number], step, at_s, 0.1 * step + 0.05))
        ended_s.append(begin_s + 0.035)
    return calls, ended_s


def test_a_step_starts_when_the_slowest_rank_has_enqueued() -> None:
    ranks = [steps_of_rank(0.0), steps_of_rank(0.004)]
    calls, ended_s = [one for one, _ in ranks], [one for _, one in ranks]
    times = measured_times(calls, ended_s, WORKLOAD)
    assert times.enqueued_s == pytest.approx(np.arange(4) * 0.01)
    assert times.backward_s == pytest.approx(0.035)
    assert times.rest_s == pytest.approx(0.1 + 0.004 - 0.05)
    shifted = [
        [
            replace(one, complete_s=(one.complete_s or 0.0) + 7.0, returned_s=one.returned_s + 7.0)
            for one in calls[0]
        ],
        calls[1],
    ]
    apart = measured_times(
        shifted, [[at_s + 7.0 for at_s in ended_s[0]], ended_s[1]], WORKLOAD, aligned=False
    )
    assert apart.rest_s == pytest.approx(times.rest_s)  # the slowest rank's own
    assert apart.enqueued_s == pytest.approx(times.enqueued_s)
    missing = [[one for one in calls[0] if one.name != "allreduce.v2"], calls[1]]
    with pytest.raises(InvalidInput, match="'v2' is not"):
        measured_times(missing, ended_s, WORKLOAD)
    assert isinstance(times, HostTimes)
