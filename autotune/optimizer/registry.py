"""The registry of passes that ships, and the states that a search begins with."""

from __future__ import annotations

from autotune.optimizer.coarsen import coarse_fusion
from autotune.optimizer.passes.compression import ErrorFeedback, MixedPrecision
from autotune.optimizer.passes.issue_order import CrossStep, IssueOrder
from autotune.optimizer.passes.op_fusion import FuseOps
from autotune.optimizer.passes.partition import Partition
from autotune.optimizer.passes.synchronizers import Synchronizers
from autotune.optimizer.passes.tensor_fusion import TensorFusion, TensorSplit
from autotune.optimizer.starts import started
from autotune.optimizer.state import Pass, Problem, State
from autotune.profiling.op_graph import OpFusion
from autotune.strategy_space.strategy import Strategy


def default_passes() -> list[Pass]:
    """The registry that ships, in the order in which the passes are asked; a user's own may be put anywhere in it."""
    return [
        FuseOps(),
        TensorFusion(),
        TensorSplit(),
        Partition(),
        Synchronizers(),
        CrossStep(),
        IssueOrder(),
        MixedPrecision(),
        ErrorFeedback(),
    ]


def all_starts(
    problem: Problem, before: tuple[str, Strategy] | None = None
) -> list[tuple[str, State]]:
    """What the search begins with, `before`, (its name, a strategy), first: so a search that is cut short is no slower than that.

    The layers of the coarsened view are fused from the start (Alg. 1, line 2).
    """
    fusion = OpFusion()
    if problem.graph is not None and problem.speedups.coarsened:
        fusion = coarse_fusion(problem.graph)
    others = started(problem, fusion)
    if before is None:
        return others
    return [
        (before[0], State(before[1], fusion)),
        *(entry for entry in others if entry[1].strategy != before[1]),
    ]
