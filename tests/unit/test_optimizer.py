"""The search by replay: results are enactable, no slower than the starts, and reproducible."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autotune.canonical import canonical_json
from autotune.cli import main
from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.budget import Budget
from autotune.optimizer.optimize import Optimized, optimize
from autotune.optimizer.passes.compression import MixedPrecision
from autotune.optimizer.registry import PASSES, default_passes
from autotune.optimizer.search import APART
from autotune.optimizer.state import CriticalPath, Speedups, State
from autotune.optimizer.suggest import NEAR, suggestions
from autotune.profiling.op_graph import Op, OpFusion, OpGraph
from autotune.strategy_space.builders.registry import BUILDERS
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import CASTS, Compressor, Strategy, Synchronizer
from autotune.workload import Variable, Workload

SMALL = Budget(replays=60)
NETWORK = Cluster("slow", tuple(Host(f"h{i}", 1, 125e6, 1e-4, 10e9, 1e-5) for i in range(4)))
TWO_LEVEL = Cluster(
    "two hosts", tuple(Host(f"h{i}", 4, 1.25e9, 5e-5, 10e9, 1e-5) for i in range(2))
)


def chain(blocks: int = 6, backward_s: float = 0.004) -> OpGraph:
    """Repeated blocks of a large product, a small norm and a relu, and a large head."""
    ops: list[Op] = []
    for block in range(blocks):
        name = f"block{block}"
        ops.append(
            Op(
                f"{name}.fc",
                "fc",
                backward_s / 2,
                backward_s,
                0.0,
                (Variable(f"{name}.fc.weight", (256, 256)),),
            )
        )
        norm = tuple(Variable(f"{name}.norm.{part}", (256,)) for part in ("weight", "bias"))
        ops.append(Op(f"{name}.norm", "norm", backward_s / 8, backward_s / 4, 0.0, norm))
        ops.append(Op(f"{name}.relu", "relu", backward_s / 8, backward_s / 8))
    ops.append(
        Op(
            "head",
            "head",
            backward_s,
            backward_s,
            0.0,
            (Variable("head.weight", (1024, 512)), Variable("head.bias", (1024,))),
        )
    )
    return OpGraph(
        "chain", tuple(ops), tuple((i, i + 1) for i in range(len(ops) - 1)), source="measured"
    )


def check(found: Optimized, workload: Workload, cluster: Cluster, space: SearchSpace) -> None:
    assert space.violation(found.strategy, workload, cluster) is None
    assert found.plan == plan(found.strategy, workload, cluster.world_size)
    assert refusal_reason(found.plan) is None
    assert not found.cut_short
    assert found.bound_s * (1 - 1e-9) <= found.predicted_step_s <= min(found.starts_s.values())
    assert [kept.step_s for kept in found.log] == sorted(
        (kept.step_s for kept in found.log), reverse=True
    )
    assert found.log[-1].step_s == found.predicted_step_s == found.timeline.makespan_s


@pytest.mark.parametrize("cluster", [NETWORK, TWO_LEVEL], ids=lambda cluster: cluster.name)
def test_the_result_is_in_the_space_enactable_and_as_fast_as_lowered(cluster: Cluster) -> None:
    workload, space = chain().workload(), SearchSpace.default()
    found = optimize(workload, cluster, space, budget=SMALL)
    check(found, workload, cluster, space)
    assert (
        found.predicted_step_s
        == LoweredSteps(workload, cluster).step_s(found.plan)
        == found.enacted_step_s
    )
    assert found.strategy.lossless and found.op_fusion == OpFusion()
    assert found.predicted_step_s < 0.96 * found.before_step_s


def test_equal_inputs_give_equal_results() -> None:
    workload = chain(3).workload()
    looked_at: list[list[str]] = [[], []]
    for asked in looked_at:

        def watched(made: Plan, asked: list[str] = asked) -> bool:
            asked.append(made.id)
            return True

        found = optimize(workload, NETWORK, budget=Budget(replays=160), seed=3, allowed=watched)
        assert (
            any(kept.by == "neighbour" for kept in found.log) or found.replays > 100
        )  # random neighbours were looked at
    assert looked_at[0] == looked_at[1]


def test_a_space_with_one_synchronizer_within_the_step_is_respected() -> None:
    workload = chain().workload()
    space = SearchSpace((Synchronizer.ALL_REDUCE,), max_shards=1)
    found = optimize(workload, NETWORK, space, budget=SMALL)
    check(found, workload, NETWORK, space)
    assert not found.strategy.cross_step


def test_plans_that_the_caller_refuses_are_dropped() -> None:
    workload = chain().workload()
    found = optimize(workload, NETWORK, budget=SMALL, allowed=lambda made: len(made.messages) > 3)
    assert len(found.plan.messages) > 3 and found.dropped > 0


def test_ops_are_fused_if_that_saves_time_and_the_gain_is_reported() -> None:
    graph = chain()
    found = optimize(graph.workload(), NETWORK, graph=graph, budget=SMALL)
    assert found.op_fusion.forward and found.op_fusion.backward
    assert found.predicted_step_s < found.enacted_step_s
    assert any("fused kernels" in note for note in found.assumed)
    measured = optimize(
        graph.workload(),
        NETWORK,
        graph=graph,
        budget=SMALL,
        fused_s=lambda ops, backward: 1.0 + len(ops),
    )
    assert not any("fused kernels" in note for note in measured.assumed)


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
    found = optimize(graph.workload(), NETWORK, graph=graph, budget=SMALL, speedups=speedups)
    check(found, graph.workload(), NETWORK, SearchSpace.default())
    assert (found.partial_replays > 0) is speedups.partial


@pytest.mark.parametrize(
    "name", ["ddp_1mib", "per_variable", "zero2_like", "cross_step_all_reduce", "partitioned_ps"]
)
def test_one_of_equal_workers_takes_as_long_as_all_of_them(name: str) -> None:
    workload = chain(3).workload()
    made = plan(BUILDERS[name](workload, NETWORK), workload, 4)
    one, all_of_them = (
        LoweredSteps(workload, NETWORK, symmetric).step_s(made) for symmetric in (True, False)
    )
    assert one == pytest.approx(all_of_them, rel=1e-9)


def test_the_critical_messages_end_last_and_spans_lie_within_the_step() -> None:
    workload = chain().workload()
    made = plan(BUILDERS["per_variable"](workload, NETWORK), workload, 4)
    steps = LoweredSteps(workload, NETWORK)
    seen = steps.observe(made)
    assert steps.step_s(made) == seen.step_s and steps.replayed == 1
    assert len(seen.start_s) == len(seen.end_s) == len(made.messages)
    assert (seen.start_s <= seen.end_s).all() and seen.end_s.max() <= seen.step_s
    assert seen.end_s.argmax() in seen.critical


def test_partial_replay_of_more_bytes_or_more_messages_takes_longer() -> None:
    workload = chain().workload()
    steps = LoweredSteps(workload, NETWORK)
    small, large = sorted(
        plan(BUILDERS["per_variable"](workload, NETWORK), workload, 4).messages,
        key=lambda m: m.elements,
    )[:: len(workload.variables) - 1]
    assert (
        0
        < steps.sync_s([small], None)
        < steps.sync_s([large], None)
        < steps.sync_s([large, small], None)
        <= steps.sync_s([large], None) + steps.sync_s([small], None)
    )


def test_compressors_are_used_only_where_the_space_has_them() -> None:
    workload = chain().workload()
    space = replace(SearchSpace.default(lossy=True), cross_step=False)
    steps = LoweredSteps(workload, NETWORK)
    suggested = suggestions(steps, space, budget=Budget(replays=150))
    found = suggested.found
    assert not suggested.cut_short
    replayed = steps.replayed
    assert [steps.step_s(plan(own.strategy, workload, 4)) for own in found] == [
        own.predicted_step_s for own in found
    ]
    assert (
        50 < steps.replayed == replayed <= 150
    )  # what the search replayed is remembered, and shared by the sets of compressors
    assert {own.name for own in found} == {
        "lossless, within the step",
        "16 bits, within the step",
        "lossy, within the step",
    }
    used = {own.name.split(",")[0]: _compressors(own.strategy) for own in found}
    assert used["lossless"] == {Compressor.NONE}
    assert used["16 bits"] & CASTS
    assert not any(kind.error_feedback for kind in used["16 bits"])
    assert any(kind.error_feedback for kind in used["lossy"])
    assert [own.predicted_step_s for own in found] == sorted(own.predicted_step_s for own in found)


def test_other_climbs_end_apart_near_the_best_and_outside_avoided_plans() -> None:
    workload = chain().workload()
    steps = LoweredSteps(workload, NETWORK)
    first = suggestions(steps, SearchSpace.default(), budget=Budget(replays=300))
    families = {"within the step", "across steps", "across steps, 2 in flight"}
    assert {own.name for own in first.found} == {f"lossless, {family}" for family in families}
    best_s = first.found[0].predicted_step_s
    times_s = [best_s, *(own.predicted_step_s for own in first.others)]
    assert len(times_s) > 2 and times_s[-1] <= best_s * (1 + NEAR)
    assert all(later >= sooner * (1 + APART) for sooner, later in pairwise(times_s))
    assert all(own.name.endswith(", another climb") for own in first.others)
    tried = {plan(own.strategy, workload, 4).id for own in (*first.found, *first.others)}
    begin = [own.strategy for own in first.found]
    again = suggestions(
        steps, SearchSpace.default(), begin=begin, avoid=tried, budget=Budget(replays=300), seed=1
    )
    fastest_s = again.found[0].predicted_step_s
    assert fastest_s <= best_s and all(
        own.predicted_step_s <= fastest_s * (1 + NEAR) for own in again.found
    )
    assert again.others and not any(
        plan(own.strategy, workload, 4).id in tried for own in again.others
    )
    assert all(
        fastest_s * (1 + APART) <= own.predicted_step_s <= fastest_s * (1 + NEAR)
        for own in again.others
    )


def test_a_search_examines_the_surroundings_of_its_start() -> None:
    """The start is unlike all known starts, so one replay returns another strategy."""
    workload = chain().workload()
    steps, space = LoweredSteps(workload, NETWORK), replace(SearchSpace.default(), cross_step=False)
    far = BUILDERS["ps_round_robin"](workload, NETWORK)
    found = suggestions(steps, space, begin=[far], budget=Budget(replays=1)).found
    assert [own.strategy for own in found] == [far]
    assert suggestions(steps, space, budget=Budget(replays=1)).found[0].strategy != far


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
    plain = optimize(workload, NETWORK, space, budget=SMALL, passes=[MixedPrecision()])
    assert (
        _compressors(plain.strategy) == {Compressor.FP16}
        and plain.predicted_step_s >= workload.compute_s
    )
    half = optimize(
        workload, NETWORK, space, budget=SMALL, passes=[MixedPrecision(compute_factor=0.5)]
    )
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

    def recompute(workload: Workload) -> Workload:
        return slower.workload()

    found = optimize(chain().workload(), NETWORK, budget=SMALL, memory=recompute)
    assert found.predicted_step_s >= slower.workload().compute_s


@pytest.fixture
def asked(example_plugin: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[State]]:
    """The states that the pass of the example plugin is asked about."""
    monkeypatch.syspath_prepend(str(example_plugin))
    monkeypatch.setattr(PASSES, "_plugins", None)
    plugin_pass = importlib.import_module("autotune_example.passes").LargestThroughServer
    propose = plugin_pass.propose
    states: list[State] = []

    def recorded(self: Any, state: State, path: CriticalPath) -> Iterable[State]:
        states.append(state)
        return propose(self, state, path)

    monkeypatch.setattr(plugin_pass, "propose", recorded)
    yield states
    PASSES._entries.pop("largest_through_server", None)


def test_a_pass_of_a_plugin_takes_part_in_the_search_and_in_the_command(
    asked: list[State], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = chain(1).workload()
    optimize(workload, NETWORK, budget=SMALL)
    counts = [len(asked)]
    suggestions(LoweredSteps(workload, NETWORK), SearchSpace.default(), budget=SMALL)
    counts.append(len(asked))
    (tmp_path / "workload.json").write_text(canonical_json(workload))
    (tmp_path / "cluster.yaml").write_text(
        "name: two\nhosts:\n  - {name: a, bandwidth: 1Gbit/s}\n  - {name: b, bandwidth: 1Gbit/s}\n"
    )
    words = [str(tmp_path / "workload.json"), "--cluster", str(tmp_path / "cluster.yaml")]
    assert main(["optimize", *words]) == 0
    assert 0 < counts[0] < counts[1] < len(asked)


def test_a_plugin_that_creates_no_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASSES._entries, "own", lambda: None)
    with pytest.raises(InvalidInput, match=r"a pass needs a name .* 'own' creates None"):
        default_passes()
