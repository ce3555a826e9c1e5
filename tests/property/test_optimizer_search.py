"""The search on random workloads and clusters: between the seed strategies and the bound."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from known_examples import examples
from synthetic_cluster import cluster

from autotune.cluster import Cluster
from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.budget import Budget
from autotune.optimizer.optimize import optimize
from autotune.strategy_space.builders.registry import seed_strategies
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.workload import Variable, Workload


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """2 to 8 hosts, even or not, from 0.1 to 100 Gbit/s and from 10 us to 1 ms away."""
    fastest, latency_s = draw(st.sampled_from([1e2, 1e3, 1e4, 1e5])), 10 ** -draw(st.integers(3, 5))
    shares = draw(st.lists(st.sampled_from([1.0, 1.0, 0.25]), min_size=2, max_size=8))
    devices = draw(st.sampled_from([1, 1, 2, 4]))
    return cluster(*((devices, share * fastest) for share in shares), latency_s=latency_s)


def layers(compute_s: float, *sizes: int) -> Workload:
    count = len(sizes)
    variables = []
    for i, size in enumerate(sizes):
        ready_s = compute_s * (i + 1) / (1.5 * count)
        needed_s = compute_s * (count - 1 - i) / (3 * count)
        variable = Variable(f"layer{i}.weight", (size, 500), ready_s=ready_s, needed_s=needed_s)
        variables.append(variable)
    times_s = (compute_s / 3, compute_s / 1.5, compute_s / 50)
    return Workload("layers", tuple(variables), (), *times_s, "cpu")


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Layers of very unequal sizes; computation from 2 ms to 1 s."""
    sizes = draw(st.lists(st.sampled_from([1, 30, 300, 1500]), min_size=1, max_size=24))
    compute_s = draw(st.sampled_from([0.002, 0.05, 1.0]))
    return replace(layers(compute_s, *sizes), device=draw(st.sampled_from(["cpu", "cuda"])))


def single_devices(*mbit: float) -> Cluster:
    return cluster(*((1, rate) for rate in mbit), latency_s=1e-5)


# A shard alone of a variable whose others share messages was cut.
LONELY_SHARD = example(layers(0.05, 1500, 1500, 1), single_devices(100, 100), True)
# With a slow host, a server moves less over its link than a ring.
SLOW_HOST = example(layers(0.002, 300), single_devices(100, 100, 100, 25), False)


@settings(max_examples=examples(9), deadline=None)
@given(workloads(), clusters(), st.booleans())
@LONELY_SHARD
@SLOW_HOST
def test_the_result_is_no_slower_than_any_seed_strategy(
    workload: Workload, cluster: Cluster, cross_step: bool
) -> None:
    space = SearchSpace.default()
    if not cross_step:
        space = space.without_cross_step("the test says so")
    best = optimize(workload, cluster, space, budget=Budget(replays=45))
    steps = LoweredSteps(workload, cluster)
    known_s = {}
    for name, strategy in seed_strategies(workload, cluster, space):
        enacted = plan(strategy, workload, cluster.world_size)
        if refusal_reason(enacted) is None:
            known_s[name] = steps.step_s(enacted)
    assert best.predicted_step_s <= min(known_s.values()), known_s
    assert best.predicted_step_s >= best.bound_s * (1 - 1e-9)
