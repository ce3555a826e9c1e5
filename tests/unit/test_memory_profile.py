"""Memory profiles: validation, JSON and sums; buffers of plans; passes that fit a budget."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.memory.accumulation import accumulated, accumulated_workload
from autotune.memory.fitting import fit_memory
from autotune.memory.peak import peak_memory
from autotune.memory.plan_buffers import bytes_always, plan_buffers
from autotune.memory.recomputation import Run, recomputed, recomputed_workload
from autotune.recordings.memory_profile import (
    Lifetime,
    MemoryProfile,
    Pass,
    Phase,
    Region,
    Replica,
    Segment,
    TensorRole,
)
from autotune.strategy_space.builders.collectives import per_variable
from autotune.strategy_space.plan import Message, Plan, TensorSlice, plan
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Variable, Workload

WORKLOAD = Workload(
    "Two",
    (
        Variable("b", (10, 10), ready_s=0.01, needed_s=0.005),
        Variable("a", (10, 10), ready_s=0.02, needed_s=0.0),
    ),
    (),
    0.01,
    0.02,
    0.001,
)
GRAD = 400


def two_layers() -> MemoryProfile:
    """Two layers with activations of 1000 bytes each, and gradients until the update."""
    segments = (
        Segment(Phase.FORWARD, 0.005, reads=("a",)),
        Segment(Phase.FORWARD, 0.005, reads=("b",)),
        Segment(Phase.BACKWARD, 0.01, readies=("b",)),
        Segment(Phase.BACKWARD, 0.01, readies=("a",)),
        Segment(Phase.UPDATE, 0.001),
    )
    lifetimes = (
        Lifetime(2 * GRAD, TensorRole.PARAMETER),
        Lifetime(1000, TensorRole.ACTIVATION, 0, 3, region=0),
        Lifetime(100, TensorRole.ACTIVATION, 0, 2, region=0, returned=True),
        Lifetime(1000, TensorRole.ACTIVATION, 1, 2, region=1),
        Lifetime(GRAD, TensorRole.GRADIENT, 2, 4, "b"),
        Lifetime(GRAD, TensorRole.GRADIENT, 3, 4, "a"),
    )
    regions = (
        Region("a", (Pass(0, 0, 3),), chain="", position=0),
        Region("b", (Pass(1, 1, 2),), chain="", position=1),
    )
    return MemoryProfile(WORKLOAD.id, "meta", segments, lifetimes, regions)


def test_the_curve_is_the_sum_of_live_tensors() -> None:
    estimate = peak_memory(two_layers())
    assert estimate.live_bytes.tolist() == [1900, 2900, 3300, 2600, 1600]
    assert (estimate.peak_bytes, estimate.segment) == (3300, 2)
    assert estimate.at_s == pytest.approx(0.02)
    assert (
        estimate.by_kind["activation"] == 2100
        and estimate.by_kind["gradient"] == GRAD
        and estimate.by_kind["parameter"] == 2 * GRAD
    )


def test_a_lifetime_may_cross_the_step() -> None:
    profile = two_layers()
    kept = replace(
        profile, lifetimes=(*profile.lifetimes, Lifetime(7, TensorRole.GRADIENT, 3, 1, "a"))
    )
    assert (kept.live_bytes - profile.live_bytes).tolist() == [7, 7, 0, 7, 7]


def test_a_profile_is_the_same_after_json() -> None:
    profile = two_layers()
    assert MemoryProfile.from_data(json.loads(json.dumps(profile.to_data()))) == profile


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"segments": ()}, "1 to"),
        ({"lifetimes": (Lifetime(1, TensorRole.ACTIVATION, 0, 5),)}, "segments 0 to 4"),
        ({"lifetimes": (Lifetime(1, TensorRole.ACTIVATION, 0),)}, "both segments"),
        ({"lifetimes": (Lifetime(1, TensorRole.ACTIVATION, 0, 1, region=9),)}, "one of 2 regions"),
        ({"regions": (Region("a", (Pass(2, 1, 3),)),), "lifetimes": ()}, "forward before"),
        ({"segments": (Segment(Phase.FORWARD, relief_bytes=10**9),) * 5}, "relief_bytes"),
    ],
)
def test_a_wrong_profile_is_refused(change: dict[str, object], rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        replace(two_layers(), **change)  # type: ignore[arg-type]


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match="one model"):
        peak_memory(replace(two_layers(), model="workload-0"), WORKLOAD)


def test_crossing_gradients_live_until_their_variables_are_read() -> None:
    cluster = Cluster.local(2)
    inside = plan(per_variable(WORKLOAD), WORKLOAD, 2)
    replica = Replica(ddp=False)
    before = peak_memory(two_layers(), WORKLOAD, inside, cluster, replica=replica).live_bytes
    crossing = peak_memory(
        two_layers(), WORKLOAD, replace(inside, cross_step=True), cluster, replica=replica
    ).live_bytes
    # a is read in segment 0, b in segment 1
    wires_move = crossing - before
    assert wires_move[0] == 2 * GRAD + 0 and wires_move[1] == GRAD


def test_only_a_ddp_keeps_its_own_buckets_under_a_plan() -> None:
    bucket = 2 * GRAD
    made = plan(per_variable(WORKLOAD), WORKLOAD, 2)
    assert bytes_always(plan_buffers(made, WORKLOAD, Replica(), 2)) == 2 * bucket
    assert bytes_always(plan_buffers(made, WORKLOAD, Replica(ddp=False), 2)) == bucket
    assert bytes_always(plan_buffers(None, WORKLOAD, Replica(), 2)) == bucket


def test_recomputation_repeats_dropped_tensors_and_costs_time() -> None:
    profile = two_layers()
    after = recomputed(profile, [Run(0, 0)])
    # forward a, forward b, backward b, forward a again, backward a, update
    assert after.live_bytes.tolist() == [1900, 1900, 2300, 2200, 2600, 1600]
    trained = recomputed_workload(WORKLOAD, profile, [Run(0, 0)])
    assert trained.backward_s == pytest.approx(0.025)
    assert [variable.ready_s for variable in trained.variables] == [0.01, pytest.approx(0.025)]


def test_neighbors_that_are_recomputed_together_drop_their_interface() -> None:
    after = recomputed(two_layers(), [Run(0, 1)])
    assert [segment.phase for segment in after.segments[2:4]] == [Phase.RECOMPUTE, Phase.RECOMPUTE]
    assert after.live_bytes.tolist() == [1900, 2900, 1900, 2900, 3300, 2600, 1600]
    apart = replace(
        two_layers(), regions=tuple(replace(region, chain=None) for region in two_layers().regions)
    )
    with pytest.raises(InvalidInput, match="one sequence"):
        recomputed(apart, [Run(0, 1)])


@pytest.mark.parametrize(
    ("region", "rule"),
    [({"why_not": "it changes buffers"}, "changes buffers"), ({"passes": ()}, "not used")],
)
def test_regions_that_may_not_be_computed_twice_are_refused(
    region: dict[str, object], rule: str
) -> None:
    profile = two_layers()
    wrong = replace(profile, regions=(replace(profile.regions[0], **region), profile.regions[1]))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=rule):
        recomputed(wrong, [Run(0, 0)])


def test_a_batch_in_parts_has_smaller_activations_and_whole_gradients() -> None:
    after = accumulated(two_layers(), 2)
    # the second part makes each gradient a second time, to add it
    assert after.live_bytes.tolist() == [1350, 1850, 2250, 2100, 2150, 2650, 3050, 2500, 1600]
    trained = accumulated_workload(WORKLOAD, 2)
    assert trained.forward_s == pytest.approx(0.02) and trained.backward_s == pytest.approx(0.01)
    assert trained.compute_s == pytest.approx(WORKLOAD.compute_s) and trained.source == "assumed"


def test_the_faster_pass_that_fits_is_taken() -> None:
    profile, cluster, made = (
        two_layers(),
        Cluster.local(2),
        plan(per_variable(WORKLOAD), WORKLOAD, 2),
    )
    peak = peak_memory(profile, WORKLOAD, made, cluster).peak_bytes

    def slow_parts(workload: Workload) -> float:
        return workload.compute_s + (1.0 if workload.backward_s < WORKLOAD.backward_s else 0.0)

    def slow_again(workload: Workload) -> float:
        return workload.compute_s + (1.0 if workload.backward_s > WORKLOAD.backward_s else 0.0)

    budget = peak - 200
    again = fit_memory(WORKLOAD, cluster, made, profile, budget, step_s=slow_parts)
    parts = fit_memory(WORKLOAD, cluster, made, profile, budget, step_s=slow_again)
    assert again.runs and again.parts == 1 and again.estimate.peak_bytes <= budget
    assert parts.parts == 2 and not parts.runs and parts.estimate.peak_bytes <= budget
    assert fit_memory(WORKLOAD, cluster, made, profile, peak).runs == ()


def test_an_impossible_budget_is_refused_with_the_needs_of_each_pass() -> None:
    profile, made = two_layers(), plan(per_variable(WORKLOAD), WORKLOAD, 2)
    with pytest.raises(
        InvalidInput,
        match=r"needs .* as it is, .* computed twice, .* in parts, .* with both: at least 4.05 KiB",
    ):
        fit_memory(WORKLOAD, Cluster.local(2), made, profile, 1000, batch=2)


def test_power_sgd_on_a_gpu_has_a_cublas_workspace_per_lane() -> None:
    """On an H100 the GPT example took 100 MB more than all its buffers: three lanes, 33 MB each."""
    workspace = 2**25
    recorded = two_layers()
    on_gpu = replace(
        recorded, lifetimes=(*recorded.lifetimes, Lifetime(2 * workspace, TensorRole.LIBRARY))
    )
    plain = plan(per_variable(WORKLOAD), WORKLOAD, 2)
    low_rank = replace(
        plain,
        messages=tuple(replace(m, compressor=Compressor.POWER_SGD, rank=1) for m in plain.messages),
    )
    served = replace(
        low_rank,
        messages=tuple(
            replace(m, synchronizer=Synchronizer.PARAMETER_SERVER, owner=0)
            for m in low_rank.messages
        ),
    )
    both = replace(low_rank, messages=(low_rank.messages[0], served.messages[1]))
    for made, lanes in ((plain, 0), (low_rank, 3), (served, 3), (both, 4)):
        library = {
            profile: peak_memory(profile, WORKLOAD, made, replica=Replica()).by_kind["library"]
            for profile in (recorded, on_gpu)
        }
        assert library == {recorded: 0, on_gpu: (2 + lanes) * workspace}


def test_only_leaders_of_hosts_keep_buffers_of_hierarchical_servers() -> None:
    message = Message(
        (TensorSlice("a", 100, rows=10),),
        Synchronizer.PARAMETER_SERVER,
        Compressor.NONE,
        "float32",
        owner=0,
        hierarchical=True,
    )
    other = replace(message, slices=(TensorSlice("b", 100, rows=10),))
    made = Plan(WORKLOAD.id, 4, (message, other))
    cluster = Cluster(
        "two", (Host("x", 2, 1e9, 1e-5, 1e9, 1e-5), Host("y", 2, 1e9, 1e-5, 1e9, 1e-5))
    )
    sizes = [
        bytes_always(
            plan_buffers(made, WORKLOAD, Replica(r, False, host_of_rank=cluster.host_of_rank), 4)
        )
        for r in range(4)
    ]
    assert sizes == [2 * GRAD + 2 * 2 * GRAD, 2 * GRAD, 2 * GRAD, 2 * GRAD]
