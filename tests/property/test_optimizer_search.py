"""The search on random workloads and clusters: between the seed strategies and the bound."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.cluster import Cluster, Host
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
    fastest, latency_s = (
        draw(st.sampled_from([0.1, 1.0, 10.0, 100.0])),
        draw(st.sampled_from([1e-5, 1e-4, 1e-3])),
    )
    shares = draw(st.lists(st.sampled_from([1.0, 1.0, 0.25]), min_size=2, max_size=8))
    devices = draw(st.sampled_from([1, 1, 2, 4]))
    hosts = (
        Host(f"h{i}", devices, share * fastest * 125e6, latency_s, 10e9, 5e-6)
        for i, share in enumerate(shares)
    )
    return Cluster("any", tuple(hosts))


def layers(compute_s: float, *sizes: int) -> Workload:
    count = len(sizes)
    variables = tuple(
        Variable(
            f"layer{i}.weight",
            (size, 500),
            ready_s=compute_s * (i + 1) / (1.5 * count),
            needed_s=compute_s * (count - 1 - i) / (3 * count),
        )
        for i, size in enumerate(sizes)
    )
    return Workload("layers", variables, (), compute_s / 3, compute_s / 1.5, compute_s / 50, "cpu")


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Layers of very unequal sizes; computation from 2 ms to 1 s."""
    sizes = draw(st.lists(st.sampled_from([1, 30, 300, 1500]), min_size=1, max_size=24))
    compute_s = draw(st.sampled_from([0.002, 0.05, 1.0]))
    return replace(layers(compute_s, *sizes), device=draw(st.sampled_from(["cpu", "cuda"])))


def evenly(*mbit: float) -> Cluster:
    return Cluster(
        "any",
        tuple(Host(f"h{i}", 1, rate * 125e3, 1e-5, 10e9, 5e-6) for i, rate in enumerate(mbit)),
    )


@settings(max_examples=8, deadline=None)
@given(workloads(), clusters(), st.booleans())
@example(
    layers(0.05, 1500, 1500, 1), evenly(100, 100), True
)  # a shard alone of a variable whose others share messages was cut
@example(
    layers(0.002, 300), evenly(100, 100, 100, 25), False
)  # with a slow host, a server moves less over its link than a ring
def test_the_result_is_no_slower_than_any_seed_strategy(
    workload: Workload, cluster: Cluster, cross_step: bool
) -> None:
    space = (
        SearchSpace.default()
        if cross_step
        else SearchSpace.default().without_cross_step("the test says so")
    )
    found = optimize(workload, cluster, space, budget=Budget(replays=45))
    steps = LoweredSteps(workload, cluster)
    by_hand = {
        name: plan(strategy, workload, cluster.world_size)
        for name, strategy in seed_strategies(workload, cluster, space)
    }
    known_s = {
        name: steps.step_s(made) for name, made in by_hand.items() if refusal_reason(made) is None
    }
    assert found.predicted_step_s <= min(known_s.values()), min(
        known_s, key=lambda name: known_s[name]
    )
    assert found.predicted_step_s >= found.bound_s * (1 - 1e-9)
