"""The registry of passes, and the states with which a search begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autotune.errors import InvalidInput
from autotune.optimizer.coarsen import coarse_fusion
from autotune.optimizer.passes.compression import ErrorFeedback, MixedPrecision
from autotune.optimizer.passes.direct_exchange import DirectExchange
from autotune.optimizer.passes.issue_order import CrossStep, IssueOrder
from autotune.optimizer.passes.op_fusion import ChooseOpFusion, FuseOps
from autotune.optimizer.passes.partition import Partition
from autotune.optimizer.passes.synchronizers import Synchronizers
from autotune.optimizer.passes.tensor_fusion import TensorFusion, TensorSplit
from autotune.optimizer.starts import computed, hand_made, started
from autotune.optimizer.state import Pass, Problem, State
from autotune.plugins import Registry
from autotune.profiling.op_graph import OpFusion
from autotune.strategy_space.strategy import Strategy

STARTS = 0.5
"""Share of a search's time for its starts. Climbs found nearly all gains in `search_time`, and
need the rest; without a limit, thousands of variables leave them none."""
PASSES: Registry[Callable[[], Pass]] = Registry("autotune.passes", "pass")
"""Functions without arguments, such as classes, that create a pass; in the order of their use."""
PASSES.register("op_fusion", FuseOps)
PASSES.register("measured_op_fusion", ChooseOpFusion)
PASSES.register("tensor_fusion", TensorFusion)
PASSES.register("tensor_split", TensorSplit)
PASSES.register("tensor_partition", Partition)
PASSES.register("synchronizers", Synchronizers)
PASSES.register("direct_exchange", DirectExchange)
PASSES.register("cross_step", CrossStep)
PASSES.register("issue_order", IssueOrder)
PASSES.register("mixed_precision", MixedPrecision)
PASSES.register("error_feedback", ErrorFeedback)


def default_passes() -> list[Pass]:
    """The built-in passes, then those of installed plugins.

    Raises `InvalidInput` if a plugin cannot be imported or creates no pass.
    """
    passes = []
    for name, create in PASSES.items():
        created = create()
        if not (hasattr(created, "name") and hasattr(created, "propose")):
            raise InvalidInput(
                f"a pass needs a name and a method propose, but {name!r} creates {created!r}"
            )
        passes.append(created)
    return passes


def first_starts(
    problem: Problem, before: tuple[str, Strategy] | None = None
) -> list[tuple[str, State]]:
    """(name, state) of the starts that are built fast. `before` comes first, so that no search ends
    slower than it.

    The layers of the coarsened view are fused from the start (Alg. 1, line 2). Starts may take
    `STARTS` of the time until the problem's deadline; those that were built until then count.
    """
    starts = started(_in_time(problem), _fusion(problem), computed)
    if before is None:
        return starts
    name, strategy = before
    others = [start for start in starts if start[1].strategy != strategy]
    return [(name, State(strategy, _fusion(problem))), *others]


def later_starts(problem: Problem, fastest_s: float) -> list[tuple[str, State]]:
    """(name, state) of the hand-made strategies and even buckets, like `first_starts`.

    `fastest_s`: the fastest replayed step so far; strategies that cannot come near it are left out.
    """
    return started(_in_time(problem), _fusion(problem), hand_made, fastest_s)


def _in_time(problem: Problem) -> Problem:
    return replace(problem, deadline=problem.deadline.share(STARTS))


def _fusion(problem: Problem) -> OpFusion:
    if problem.graph is not None and problem.speedups.coarsened:
        return coarse_fusion(problem.graph)
    return OpFusion()
