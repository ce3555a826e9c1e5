"""Memory profiles: validation, JSON and sums; buffers of plans; passes that fit a budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from synthetic_cluster import cluster

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.memory.accumulation import accumulated, accumulated_workload
from autotune.memory.fitting import MemoryFit, choose_runs, fit_memory
from autotune.memory.peak import MemoryEstimate, peak_memory
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

VARIABLES = tuple(
    Variable(name, (10, 10), ready_s=ready_s, needed_s=needed_s)
    for name, ready_s, needed_s in (("b", 0.01, 0.005), ("a", 0.02, 0.0))
)
WORKLOAD = Workload("Two", VARIABLES, (), 0.01, 0.02, 0.001)
LOCAL = Cluster.local(2)
PLAN = plan(per_variable(WORKLOAD), WORKLOAD, 2)
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
    kinds = {"activation": 2100, "gradient": GRAD, "parameter": 2 * GRAD}
    assert kinds.items() <= estimate.by_kind.items()


def test_a_lifetime_may_cross_the_step() -> None:
    profile = two_layers()
    crossing = Lifetime(7, TensorRole.GRADIENT, 3, 1, "a")
    longer = replace(profile, lifetimes=(*profile.lifetimes, crossing))
    assert (longer.live_bytes - profile.live_bytes).tolist() == [7, 7, 0, 7, 7]


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
    """Segment 0 reads a, and segment 1 reads b."""
    before, crossing = (
        peak_memory(two_layers(), WORKLOAD, each, LOCAL, replica=Replica(ddp=False)).live_bytes
        for each in (PLAN, replace(PLAN, cross_step=True))
    )
    assert (crossing - before)[:2].tolist() == [2 * GRAD, GRAD]


def waiting_for_norms(**how: Any) -> Plan:
    """A plan whose results wait for the norms: a message of b, then a; the result of a, then b."""
    messages = tuple(replace(message, **how) for message in PLAN.messages)
    return replace(PLAN, messages=messages, cross_step=True, results=(1, 0))


def test_sums_that_wait_for_norms_are_held_until_their_results_have_arrived() -> None:
    """gloo's copy of a reduce-scatter lives from the backward pass into the next forward pass.

    Each half of a message takes 4.2 ms. So the sums end at 24.2 and 34.2 ms, and the results of a
    and b at 38.4 and 42.6 ms; the next forward pass reads a from 31 ms on and b from 36 ms on.
    """
    enacted = waiting_for_norms(synchronizer=Synchronizer.REDUCE_SCATTER_ALL_GATHER)
    slow = cluster((1, 0.4), (1, 0.4))
    on_cpu = replace(two_layers(), device="cpu")
    estimate = peak_memory(on_cpu, WORKLOAD, enacted, slow, replica=Replica(ddp=False))
    always_bytes = 2 * GRAD + 2 * GRAD // 2  # wires and shards
    crossing = [2 * GRAD, GRAD, 0, 0, 0]
    # reduce-scatters of both and an all-gather, the same, of b, of both, of both
    copies = [3 * GRAD, 3 * GRAD, GRAD, 2 * GRAD, 2 * GRAD]
    alone = [1900, 2900, 3300, 2600, 1600]
    expected = [always_bytes + sum(parts) for parts in zip(alone, crossing, copies, strict=True)]
    assert estimate.live_bytes.tolist() == expected == [5100, 5700, 4900, 4600, 3600]
    assert (estimate.peak_bytes, estimate.segment) == (5700, 1)


def test_a_server_holds_no_copy_between_a_sum_and_its_result() -> None:
    """gloo copies in the gather and again in the scatter: 800 bytes each, on the owner."""
    enacted = waiting_for_norms(synchronizer=Synchronizer.PARAMETER_SERVER, owner=0)
    on_cpu = replace(two_layers(), device="cpu")
    estimate = peak_memory(on_cpu, WORKLOAD, enacted, replica=Replica(ddp=False))
    always_bytes = 2 * GRAD + 2 * 2 * GRAD  # wires, and parts of both ranks
    # without a cluster, both scatters follow the last gather in the segment of the norms
    copies = [0, 0, 2 * GRAD, 2 * 2 * GRAD, 0]
    assert (estimate.live_bytes - always_bytes - copies).tolist() == [2700, 3300, 3300, 2600, 1600]


def test_only_a_ddp_keeps_its_own_buckets_under_a_plan() -> None:
    cases = [(PLAN, Replica(), 2), (PLAN, Replica(ddp=False), 1), (None, Replica(), 1)]
    for enacted, replica, buckets in cases:
        buffers = plan_buffers(enacted, WORKLOAD, replica, 2)
        assert bytes_always(buffers) == buckets * 2 * GRAD


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
    apart = tuple(replace(region, chain=None) for region in two_layers().regions)
    with pytest.raises(InvalidInput, match="one sequence"):
        recomputed(replace(two_layers(), regions=apart), [Run(0, 1)])


def alternating(input_dies: int = 1, relief_bytes: int = 0) -> MemoryProfile:
    """Linear layers that keep their inputs, each with a Tanh that keeps its output: 1000 bytes."""
    forward = [Segment(Phase.FORWARD, 0.005) for _ in range(4)]
    forward[2] = replace(forward[2], relief_bytes=relief_bytes)
    backward = [Segment(Phase.BACKWARD, 0.005) for _ in range(4)]
    ends = (input_dies, 6, 3, 4)
    lifetimes = tuple(
        Lifetime(1000, TensorRole.ACTIVATION, number, dies, region=number, returned=True)
        for number, dies in enumerate(ends)
    )
    regions = tuple(
        Region(f"{number}", (Pass(number, number, 7 - number),), chain="", position=number)
        for number in range(4)
    )
    segments = (*forward, *backward, Segment(Phase.UPDATE))
    return MemoryProfile(WORKLOAD.id, "meta", segments, lifetimes, regions)


@pytest.mark.parametrize(("input_dies", "relief_bytes"), [(1, 0), (2, 1000)])
def test_a_run_holds_its_input_until_its_backward_pass(input_dies: int, relief_bytes: int) -> None:
    """The second reading: the input ends before the linear layer creates its output."""
    after = recomputed(alternating(input_dies, relief_bytes), [Run(1, 2)])
    # forward 0 to 3, backward 3, forward 1 and 2 again, backward 2 to 0, update
    assert after.live_bytes.tolist() == [
        *(1000, 2000, 3000, 3000),
        2000,
        *(2000, 2000),
        *(2000, 2000, 0),
        0,
    ]


def test_a_tensor_from_one_run_to_the_next_exists_only_between_them() -> None:
    after = recomputed(alternating(), [Run(0, 0), Run(1, 2)])
    assert after.live_bytes[-1] == 0


def test_the_budget_is_not_met_by_a_run_that_only_exchanges_its_output_for_its_input() -> None:
    chosen = choose_runs(alternating(), WORKLOAD, 2500, lambda profile, _: peak_memory(profile))
    assert chosen.fits and chosen.runs == (Run(0, 2),)


@pytest.mark.parametrize(
    ("region", "rule"),
    [({"why_not": "it changes buffers"}, "changes buffers"), ({"passes": ()}, "not used")],
)
def test_regions_that_may_not_be_computed_twice_are_refused(region, rule: str) -> None:
    first, second = two_layers().regions
    wrong = replace(two_layers(), regions=(replace(first, **region), second))
    with pytest.raises(InvalidInput, match=rule):
        recomputed(wrong, [Run(0, 0)])


def test_the_bound_of_the_seconds_is_that_of_the_budget_itself() -> None:
    """Recomputation takes 200 bytes that the program does not know, so it is solved for less."""
    phases = (*(Phase.FORWARD,) * 3, *(Phase.BACKWARD,) * 2, Phase.UPDATE)
    seconds = (1.0, 2.0, 0.1, 2.0, 4.0, 0.1)
    profile = MemoryProfile(
        WORKLOAD.id,
        "meta",
        tuple(Segment(phase, second) for phase, second in zip(phases, seconds, strict=True)),
        (
            Lifetime(300, TensorRole.ACTIVATION, 0, 4, region=0),
            Lifetime(600, TensorRole.ACTIVATION, 1, 3, region=1),
            Lifetime(1000, TensorRole.TEMPORARY, 2, 2),
        ),
        (Region("a", (Pass(0, 0, 4),)), Region("b", (Pass(1, 1, 3),))),
    )

    def estimate(candidate: MemoryProfile, trained: Workload) -> MemoryEstimate:
        peak = peak_memory(candidate)
        again = any(one.phase is Phase.RECOMPUTE for one in candidate.segments)
        return replace(peak, peak_bytes=peak.peak_bytes + 200 * again)

    chosen = choose_runs(profile, WORKLOAD, 1700, estimate)
    assert chosen.fits and chosen.runs == (Run(1, 1),)  # Run(0, 0) has a peak of 1600 + 200
    assert chosen.bound_s == pytest.approx(1.0)


def test_a_batch_in_parts_has_smaller_activations_and_whole_gradients() -> None:
    after = accumulated(two_layers(), 2)
    # the second part makes each gradient a second time, to add it
    assert after.live_bytes.tolist() == [1350, 1850, 2250, 2100, 2150, 2650, 3050, 2500, 1600]
    trained = accumulated_workload(WORKLOAD, 2)
    assert trained.forward_s == pytest.approx(0.02) and trained.backward_s == pytest.approx(0.01)
    assert trained.compute_s == pytest.approx(WORKLOAD.compute_s) and trained.source == "assumed"


def test_the_faster_pass_that_fits_is_taken() -> None:
    profile = two_layers()
    peak = peak_memory(profile, WORKLOAD, PLAN, LOCAL).peak_bytes

    def fit(budget: int, slow: Callable[[Workload], bool] = lambda _: False) -> MemoryFit:
        """The fit if the workloads that are `slow` take a second longer."""

        def step_s(trained: Workload) -> float:
            return trained.compute_s + slow(trained)

        return fit_memory(WORKLOAD, LOCAL, PLAN, profile, budget, step_s=step_s)

    again = fit(peak - 200, lambda trained: trained.backward_s < WORKLOAD.backward_s)
    parts = fit(peak - 200, lambda trained: trained.backward_s > WORKLOAD.backward_s)
    assert again.runs and again.parts == 1 and again.estimate.peak_bytes <= peak - 200
    assert parts.parts == 2 and not parts.runs and parts.estimate.peak_bytes <= peak - 200
    assert fit(peak).runs == ()


def test_an_impossible_budget_is_refused_with_the_needs_of_each_pass() -> None:
    needs = r"needs .* as it is, .* computed twice, .* in parts, .* with both: at least 4.05 KiB"
    with pytest.raises(InvalidInput, match=needs):
        fit_memory(
            WORKLOAD, LOCAL, PLAN, two_layers(), 1000, step_s=lambda one: one.compute_s, batch=2
        )


def test_power_sgd_on_a_gpu_has_a_cublas_workspace_per_lane() -> None:
    """On an H100 the GPT example took 100 MB more than all its buffers: three lanes, 33 MB each."""
    workspace, recorded = 2**25, two_layers()
    library = Lifetime(2 * workspace, TensorRole.LIBRARY)
    on_gpu = replace(recorded, lifetimes=(*recorded.lifetimes, library))
    reduced = [replace(m, compressor=Compressor.POWER_SGD, rank=1) for m in PLAN.messages]
    server: dict[str, Any] = {"synchronizer": Synchronizer.PARAMETER_SERVER, "owner": 0}
    served = [replace(m, **server) for m in reduced]
    both = [reduced[0], served[1]]
    for messages, lanes in ((PLAN.messages, 0), (reduced, 3), (served, 3), (both, 4)):
        enacted = replace(PLAN, messages=tuple(messages))
        for profile, workspaces in ((recorded, 0), (on_gpu, 2 + lanes)):
            estimate = peak_memory(profile, WORKLOAD, enacted, replica=Replica())
            assert estimate.by_kind["library"] == workspaces * workspace


def test_only_leaders_of_hosts_keep_buffers_of_hierarchical_servers() -> None:
    how = (Synchronizer.PARAMETER_SERVER, Compressor.NONE, "float32")
    slices = [TensorSlice(name, 100, rows=10) for name in "ab"]
    messages = tuple(Message((each,), *how, owner=0, hierarchical=True) for each in slices)
    hosts = cluster((2, 8000), (2, 8000)).host_of_rank
    sizes = []
    for rank in range(4):
        replica = Replica(rank, False, host_of_rank=hosts)
        buffers = plan_buffers(Plan(WORKLOAD.id, 4, messages), WORKLOAD, replica, 4)
        sizes.append(bytes_always(buffers))
    assert sizes == [2 * GRAD + 2 * 2 * GRAD, 2 * GRAD, 2 * GRAD, 2 * GRAD]
