"""The two halves of messages whose results wait for the norms of all gradients.

The first half ends when a sum is complete on its owners, as in `runtime_rewriter`'s exchanges; the
second half sends it to all ranks. Compressed sums are complete only at the end of their messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import IntArray
from autotune.lowering.messages import Batch, TimedStep, has_owners
from autotune.lowering.steps import Scope
from autotune.strategy_space.plan import Message, Plan

NORM_BYTES = 24.0
"""Per variable: a norm, a sum of squares and a number of non-finite parts, in float64."""


@dataclass(frozen=True, eq=False)
class Halves:
    """The batches of a plan with `results`, cut in two.

    `results`: batches whose numbers are places among the results that are sent. `sent` (R,):
    message numbers in the order of these places. R is below M if some messages have one half only.
    """

    sums: list[Batch]
    results: list[Batch]
    sent: IntArray

    @staticmethod
    def of(batches: Sequence[Batch], plan: Plan) -> Halves:
        assert plan.results is not None
        cuts = [_first_steps(plan.messages[batch.numbers[0]], batch.steps) for batch in batches]
        cut_in_two = [
            (batch, cut) for batch, cut in zip(batches, cuts, strict=True) if batch.steps[cut:]
        ]
        has_results = np.zeros(len(plan.messages), dtype=np.bool_)
        for batch, _ in cut_in_two:
            has_results[batch.numbers] = True
        order = np.array(plan.results, dtype=np.int64)
        sent = order[has_results[order]]
        place = np.full(len(plan.messages), -1, dtype=np.int64)
        place[sent] = np.arange(len(sent))
        return Halves(
            [b.cut(slice(0, cut), b.numbers) for b, cut in zip(batches, cuts, strict=True)],
            [batch.cut(slice(cut, None), place[batch.numbers]) for batch, cut in cut_in_two],
            sent,
        )


def _first_steps(message: Message, steps: Sequence[TimedStep]) -> int:
    """The number of steps after which a sum is complete on its owners."""
    if not has_owners(message):  # rows are refused: their norms are not known
        return len(steps)
    return 2 if steps[0].step.scope is Scope.HOSTS else 1
