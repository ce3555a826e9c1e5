"""The search by replay: results are enactable, no slower than the starts, and reproducible."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from synthetic_cluster import cluster

from autotune.canonical import canonical_json
from autotune.cli import main
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.lowering.costs import Constant, RuntimeCosts
from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.budget import Budget
from autotune.optimizer.optimize import DDP, Optimized, optimize
from autotune.optimizer.passes.compression import MixedPrecision
from autotune.optimizer.registry import PASSES, default_passes, first_starts, later_starts
from autotune.optimizer.search import APART
from autotune.optimizer.state import CriticalPath, Problem, Speedups, State, planned
from autotune.optimizer.suggest import NEAR, suggestions
from autotune.profiling.op_graph import Op, OpFusion, OpGraph
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.builders.registry import BUILDERS
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.mirrored import mirrored_space
from autotune.strategy_space.owners import by_bandwidth
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    CASTS,
    Compressor,
    SparseHandling,
    Strategy,
    Synchronizer,
)
from autotune.workload import Variable, Workload

SMALL = Budget(replays=120)
NETWORK = cluster(*[(1, 1000)] * 4, latency_s=1e-4, inner_latency_s=1e-5)
TWO_LEVEL = cluster((4, 10_000), (4, 10_000), inner_latency_s=1e-5)


def chain(blocks: int = 6, backward_s: float = 0.004) -> OpGraph:
    """Repeated blocks of a large product, a small norm and a relu, and a large head."""
    ops: list[Op] = []
    for block in range(blocks):
        name = f"block{block}"
        product = (Variable(f"{name}.fc.weight", (256, 256)),)
        norm = tuple(Variable(f"{name}.norm.{part}", (256,)) for part in ("weight", "bias"))
        ops.append(Op(f"{name}.fc", "fc", backward_s / 2, backward_s, 0.0, product))
        ops.append(Op(f"{name}.norm", "norm", backward_s / 8, backward_s / 4, 0.0, norm))
        ops.append(Op(f"{name}.relu", "relu", backward_s / 8, backward_s / 8))
    head = (Variable("head.weight", (1024, 512)), Variable("head.bias", (1024,)))
    ops.append(Op("head", "head", backward_s, backward_s, 0.0, head))
    edges = tuple((i, i + 1) for i in range(len(ops) - 1))
    return OpGraph("chain", tuple(ops), edges, source="measured")


def check(optimized: Optimized, workload: Workload, cluster: Cluster, space: SearchSpace) -> None:
    assert space.violation(optimized.strategy, workload, cluster) is None
    assert optimized.plan == plan(optimized.strategy, workload, cluster.world_size)
    assert refusal_reason(optimized.plan) is None
    assert not optimized.cut_short
    assert (
        optimized.bound_s * (1 - 1e-9)
        <= optimized.predicted_step_s
        <= min(optimized.starts_s.values())
    )
    logged_s = [entry.step_s for entry in optimized.log]
    assert logged_s == sorted(logged_s, reverse=True)
    assert optimized.log[-1].step_s == optimized.predicted_step_s == optimized.timeline.makespan_s


@pytest.mark.parametrize("cluster", [NETWORK, TWO_LEVEL], ids=["slow", "two hosts"])
def test_the_result_is_in_the_space_enactable_and_as_fast_as_lowered(cluster: Cluster) -> None:
    workload, space = chain().workload(), SearchSpace.default()
    optimized = optimize(workload, cluster, space, budget=SMALL)
    check(optimized, workload, cluster, space)
    lowered_s = LoweredSteps(workload, cluster).step_s(optimized.plan)
    assert optimized.predicted_step_s == lowered_s == optimized.enacted_step_s
    assert optimized.strategy.lossless and optimized.op_fusion == OpFusion()
    assert optimized.predicted_step_s < 0.96 * optimized.before_step_s


def test_equal_inputs_give_equal_results() -> None:
    workload = chain(3).workload()
    looked_at: list[list[str]] = [[], []]
    for asked in looked_at:

        def watched(candidate: Plan, asked: list[str] = asked) -> bool:
            asked.append(candidate.id)
            return True

        optimized = optimize(workload, NETWORK, budget=Budget(replays=160), seed=3, allowed=watched)
        # Random neighbours were looked at.
        assert any(entry.by == "neighbour" for entry in optimized.log) or optimized.replays > 100
    assert looked_at[0] == looked_at[1]


def test_passes_improve_the_best_cuts_before_hand_made_strategies_are_replayed() -> None:
    graph = chain()
    optimized = optimize(graph.workload(), NETWORK, graph=graph, budget=Budget(replays=40))
    gains = [entry.by for entry in optimized.log if entry.by not in optimized.starts_s]
    assert {one.name for one in default_passes()} & set(gains)
    longer = optimize(graph.workload(), NETWORK, graph=graph, budget=Budget(replays=160))
    assert "parameter_server" in longer.starts_s
    assert longer.predicted_step_s <= optimized.predicted_step_s


def test_hand_made_strategies_that_can_hardly_win_are_not_replayed() -> None:
    """Sixteen workers over one server each: their estimates are several times the best step."""
    graph, even = chain(), cluster(*[(1, 1000)] * 16)
    problem = Problem(graph.workload(), even, SearchSpace.default(), graph)
    every = dict(later_starts(problem, math.inf))
    steps = LoweredSteps(graph.workload(), even)
    steps_s = {name: steps.step_s(planned(state, problem)) for name, state in every.items()}
    fastest_s = min(steps_s.values())
    near = dict(later_starts(problem, fastest_s))
    assert near.keys() < every.keys()
    assert min(steps_s[name] for name in near) == fastest_s
    assert all(steps_s[name] > 2 * fastest_s for name in every.keys() - near.keys())


def test_ranks_own_equal_shares_where_results_wait_for_norms() -> None:
    """On uneven hosts the shares by bandwidth are the best only if nothing waits for norms."""
    model = Workload("m", tuple(Variable(f"v{i}", (512, 128)) for i in range(12)), (), 0.02, 0.04)
    uneven = cluster((1, 2000), (1, 1000), (1, 1000), (1, 500))
    equal, by_rate = "direct_exchange, buckets of 256 KiB, across steps", by_bandwidth(uneven)

    def starts(workload: Workload) -> dict[str, State]:
        return dict(later_starts(Problem(workload, uneven, SearchSpace.default()), math.inf))

    assert equal not in starts(model)
    clipped = replace(model, reads_norms=True)
    strategy = starts(clipped)[equal].strategy
    chosen = tuple(
        replace(one, shards=tuple(replace(shard, shares=by_rate) for shard in one.shards))
        for one in strategy.variables
    )
    steps = LoweredSteps(clipped, uneven)
    equal_s, by_rate_s = (
        steps.step_s(plan(one, clipped, 4))
        for one in (strategy, replace(strategy, variables=chosen))
    )
    assert all(shard.shares is None for one in strategy.variables for shard in one.shards)
    assert equal_s < 0.9 * by_rate_s


def test_a_space_with_one_synchronizer_within_the_step_is_respected() -> None:
    workload = chain().workload()
    space = SearchSpace((Synchronizer.ALL_REDUCE,), max_shards=1)
    optimized = optimize(workload, NETWORK, space, budget=SMALL)
    check(optimized, workload, NETWORK, space)
    assert not optimized.strategy.cross_step


def test_plans_that_the_caller_refuses_are_dropped() -> None:
    workload = chain().workload()
    optimized = optimize(
        workload, NETWORK, budget=SMALL, allowed=lambda candidate: len(candidate.messages) > 3
    )
    assert len(optimized.plan.messages) > 3 and optimized.dropped > 0


def test_ops_are_fused_if_that_saves_time_and_the_gain_is_reported() -> None:
    graph = chain()
    network = cluster(*[(1, 4000)] * 4, latency_s=1e-4, inner_latency_s=1e-5)
    optimized = optimize(graph.workload(), network, graph=graph, budget=SMALL)
    assert optimized.op_fusion.forward and optimized.op_fusion.backward
    assert optimized.predicted_step_s < optimized.enacted_step_s
    assert any("fused kernels" in note for note in optimized.assumed)

    def fused_s(ops, backward) -> float:
        return 1.0 + len(ops)

    measured = optimize(graph.workload(), NETWORK, graph=graph, budget=SMALL, fused_s=fused_s)
    assert not any("fused kernels" in note for note in measured.assumed)


TABLE = Variable("table", (20_000, 64), sparse=True, touched_rows=100.0)


@pytest.mark.parametrize("rows_only", [False, True])
@pytest.mark.parametrize("narrow", [lambda space: space, mirrored_space], ids=["all", "mirrored"])
def test_the_step_before_sends_the_rows_of_sparse_gradients_as_ddp_does(
    rows_only: bool, narrow: Callable[[SearchSpace], SearchSpace]
) -> None:
    variables = (Variable("weight", (256, 256)), replace(TABLE, rows_only=rows_only))
    workload = Workload("m", variables, forward_s=0.004, backward_s=0.008)
    rows = plan(with_rows(ddp_default(workload), workload), workload, NETWORK.world_size)
    space = narrow(SearchSpace.default())
    optimized = optimize(workload, NETWORK, space, budget=Budget(replays=30))
    before_s = LoweredSteps(workload, NETWORK).step_s(rows)
    assert optimized.before_step_s == optimized.starts_s[DDP] == before_s


def test_starts_send_rows_of_sparse_gradients_flat_as_they_are_replayed() -> None:
    table = replace(TABLE, rows_only=True)
    workload = Workload("m", (*chain(2).workload().variables, table), backward_s=0.01)
    problem = Problem(workload, TWO_LEVEL, SearchSpace.default())
    starts = (*first_starts(problem), *later_starts(problem, math.inf))
    messages = [one for _, state in starts for one in planned(state, problem).messages]
    hierarchical = {one.sparse for one in messages if one.hierarchical}
    assert hierarchical == {SparseHandling.DENSE} < {one.sparse for one in messages}


def test_an_op_graph_of_another_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match="other variables"):
        optimize(chain(3).workload(), NETWORK, graph=chain(4))


@pytest.mark.parametrize(
    "speedups",
    [Speedups(False, False, False), Speedups(True, False, False), Speedups(True, True, False)],
    ids=["strawman", "coarse", "partial"],
)
def test_results_without_the_speedups_are_valid(speedups: Speedups) -> None:
    graph = chain(2)
    optimized = optimize(graph.workload(), NETWORK, graph=graph, budget=SMALL, speedups=speedups)
    check(optimized, graph.workload(), NETWORK, SearchSpace.default())
    assert (optimized.partial_replays > 0) is speedups.partial


@pytest.mark.parametrize(
    "name", ["ddp_1mib", "per_variable", "zero2_like", "cross_step_all_reduce", "partitioned_ps"]
)
def test_one_of_equal_workers_takes_as_long_as_all_of_them(name: str) -> None:
    workload = chain(3).workload()
    enacted = plan(BUILDERS[name](workload, NETWORK), workload, 4)
    one_s, all_s = (
        LoweredSteps(workload, NETWORK, symmetric).step_s(enacted) for symmetric in (True, False)
    )
    assert one_s == pytest.approx(all_s, rel=1e-9)


def test_the_critical_messages_end_last_and_spans_lie_within_the_step() -> None:
    workload = chain().workload()
    observed_plan = plan(BUILDERS["per_variable"](workload, NETWORK), workload, 4)
    steps = LoweredSteps(workload, NETWORK)
    observed = steps.observe(observed_plan)
    assert steps.step_s(observed_plan) == observed.step_s and steps.replayed == 1
    assert len(observed.start_s) == len(observed.end_s) == len(observed_plan.messages)
    assert (observed.start_s <= observed.end_s).all() and observed.end_s.max() <= observed.step_s
    assert observed.end_s.argmax() in observed.critical


def test_partial_replay_of_more_bytes_or_more_messages_takes_longer() -> None:
    workload = chain().workload()
    steps = LoweredSteps(workload, NETWORK)
    messages = plan(BUILDERS["per_variable"](workload, NETWORK), workload, 4).messages
    small, *_, large = sorted(messages, key=lambda message: message.elements)
    small_s, large_s, both_s = (
        steps.sync_s(sent, None) for sent in ([small], [large], [large, small])
    )
    assert 0 < small_s < large_s < both_s <= large_s + small_s


def test_compressors_are_used_only_where_the_space_has_them() -> None:
    workload = chain().workload()
    space = replace(SearchSpace.default(lossy=True), cross_step=False)
    steps = LoweredSteps(workload, NETWORK)
    suggested = suggestions(steps, space, budget=Budget(replays=150))
    best = suggested.best
    assert not suggested.cut_short
    replayed = steps.replayed
    times_s = [steps.step_s(plan(one.strategy, workload, 4)) for one in best]
    assert times_s == [one.predicted_step_s for one in best]
    # The sets of compressors share the remembered replays.
    assert 50 < steps.replayed == replayed <= 150
    kinds = ("lossless", "16 bits", "lossy")
    assert {one.name for one in best} == {f"{kind}, within the step" for kind in kinds}
    used = {one.name.split(",")[0]: _compressors(one.strategy) for one in best}
    assert used["lossless"] == {Compressor.NONE}
    assert used["16 bits"] & CASTS
    assert not any(kind.error_feedback for kind in used["16 bits"])
    assert any(kind.error_feedback for kind in used["lossy"])
    assert times_s == sorted(times_s)


def test_other_climbs_end_apart_near_the_best_and_outside_avoided_plans() -> None:
    workload, space = chain().workload(), SearchSpace.default()
    # Flushing costs enough for climbs to end in plans that differ by more than `APART`.
    costly = replace(RuntimeCosts(), settle_s=Constant(0.002, "test"))
    steps = LoweredSteps(workload, NETWORK, costs=costly)
    budget = Budget(replays=600)
    first = suggestions(steps, space, budget=budget)
    families = {"within the step", "across steps", "across steps, 2 in flight"}
    assert {one.name for one in first.best} == {f"lossless, {family}" for family in families}
    best_s = first.best[0].predicted_step_s
    times_s = [best_s, *(one.predicted_step_s for one in first.others)]
    assert len(times_s) > 2 and times_s[-1] <= best_s * (1 + NEAR)
    assert all(later >= sooner * (1 + APART) for sooner, later in pairwise(times_s))
    assert all(one.name.endswith(", another climb") for one in first.others)

    def ids(suggested):
        return {plan(one.strategy, workload, 4).enacted_id for one in suggested}

    tried, begin = ids([*first.best, *first.others]), [one.strategy for one in first.best]
    again = suggestions(steps, space, begin=begin, avoid=tried, budget=budget, seed=1)
    fastest_s = again.best[0].predicted_step_s
    slowest_s = fastest_s * (1 + NEAR)
    assert fastest_s <= best_s
    assert all(one.predicted_step_s <= slowest_s for one in again.best)
    assert again.others and not ids(again.others) & tried
    others_s = [one.predicted_step_s for one in again.others]
    assert all(fastest_s * (1 + APART) <= other_s <= slowest_s for other_s in others_s)


def test_a_search_examines_the_surroundings_of_its_start() -> None:
    """The start is unlike all known starts, so one replay returns another strategy."""
    workload = chain().workload()
    steps, space = LoweredSteps(workload, NETWORK), replace(SearchSpace.default(), cross_step=False)
    far = BUILDERS["ps_round_robin"](workload, NETWORK)
    near = suggestions(steps, space, begin=[far], budget=Budget(replays=1)).best
    assert [one.strategy for one in near] == [far]
    assert suggestions(steps, space, budget=Budget(replays=1)).best[0].strategy != far


def test_a_budget_of_ops_counts_remembered_steps() -> None:
    workload, space = chain(3).workload(), replace(SearchSpace.default(), cross_step=False)
    steps = LoweredSteps(workload, NETWORK)
    steps.step_s(plan(BUILDERS["per_variable"](workload, NETWORK), workload, 4))
    budget = Budget(replays=1000, ops=40 * steps.ops)
    first = suggestions(steps, space, budget=budget)
    replayed = steps.replayed
    assert suggestions(steps, space, budget=budget) == first
    assert steps.replayed - replayed < replayed / 2  # the others were remembered
    unbounded = LoweredSteps(workload, NETWORK)
    suggestions(unbounded, space, budget=replace(budget, ops=10**12))
    assert replayed < unbounded.replayed / 2


def _compressors(strategy: Strategy) -> set[Compressor]:
    return {shard.compressor for choice in strategy.variables for shard in choice.shards}


def test_mixed_precision_scales_the_computation_by_a_measured_factor() -> None:
    workload, space = chain().workload(), SearchSpace.default(lossy=True)
    space = replace(space, compressors=(Compressor.NONE, Compressor.FP16), cross_step=False)

    def optimized(halved: MixedPrecision) -> Optimized:
        return optimize(workload, NETWORK, space, budget=SMALL, passes=[halved], seed=4)

    plain, half = optimized(MixedPrecision()), optimized(MixedPrecision(compute_factor=0.5))
    assert _compressors(plain.strategy) == {Compressor.FP16}
    assert plain.predicted_step_s >= workload.compute_s
    assert half.predicted_step_s < min(plain.predicted_step_s, half.enacted_step_s)
    assert any("as the caller measured" in note for note in half.assumed)
    with pytest.raises(InvalidInput, match="measured factor"):
        MixedPrecision(compute_factor=0.0)


def test_the_pass_of_the_example_plugin_proposes_a_server(asked: list[State]) -> None:
    workload = chain().workload()
    result = optimize(workload, NETWORK, budget=SMALL)
    assert asked
    check(result, workload, NETWORK, SearchSpace.default())
    create = PASSES["largest_through_server"]
    strategies: list[Strategy] = []

    class Watched:
        name = "watched"

        def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
            for proposed in create().propose(state, path):
                strategies.append(proposed.strategy)
                yield proposed

    optimize(workload, NETWORK, budget=SMALL, passes=[*default_passes(), Watched()])
    used = {shard.synchronizer for choice in strategies[0].variables for shard in choice.shards}
    assert Synchronizer.PARAMETER_SERVER in used


def test_the_memory_pass_comes_first_and_changes_the_workload() -> None:
    slower = chain(backward_s=0.02)
    trained = chain().workload()
    optimized = optimize(trained, NETWORK, budget=SMALL, memory=lambda _: slower.workload())
    assert optimized.predicted_step_s >= slower.workload().compute_s


@pytest.fixture
def asked(example_plugin: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[State]]:
    """The states that the pass of the example plugin is asked about."""
    monkeypatch.syspath_prepend(str(example_plugin))
    plugin_pass = importlib.import_module("autotune_example.passes").LargestThroughServer
    propose = plugin_pass.propose
    states: list[State] = []

    def recorded(self: Any, state: State, path: CriticalPath) -> Iterable[State]:
        states.append(state)
        return propose(self, state, path)

    monkeypatch.setattr(plugin_pass, "propose", recorded)
    with PASSES.separate():
        yield states


def test_a_pass_of_a_plugin_takes_part_in_the_search_and_in_the_command(
    asked: list[State], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = chain(1).workload()
    optimize(workload, NETWORK, budget=SMALL)
    by_optimize = len(asked)
    suggestions(LoweredSteps(workload, NETWORK), SearchSpace.default(), budget=SMALL)
    by_suggestions = len(asked)
    source, two = tmp_path / "workload.json", tmp_path / "cluster.yaml"
    source.write_text(canonical_json(workload))
    hosts = [f"  - {{name: {name}, bandwidth: 1Gbit/s}}\n" for name in "ab"]
    two.write_text("name: two\nhosts:\n" + "".join(hosts))
    assert main(["optimize", str(source), "--cluster", str(two)]) == 0
    assert 0 < by_optimize < by_suggestions < len(asked)


def test_a_plugin_that_creates_no_pass_is_refused() -> None:
    message = r"a pass needs a name .* 'own' creates None"
    with PASSES.separate(), pytest.raises(InvalidInput, match=message):
        PASSES.register("own", lambda: None)
        default_passes()
