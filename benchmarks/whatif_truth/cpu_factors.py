"""The factor of a fused optimizer on this CPU, learned from other models (leave one out).

Every model is recorded without and with it. Another model's factor is the ratio of the optimizer's
times in both recordings, over the ratio of the rest of the step, which the change leaves alone. So
a machine that was slower during one of the recordings cancels out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.arrays import BoolArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base, steady
from autotune.whatif.primitives import scale


@dataclass(frozen=True, eq=False)
class RecordedPair:
    """The bases of one model without and with the change."""

    plain: Base
    changed: Base


def predicted_speedup(model: Base, others: Sequence[RecordedPair]) -> float:
    """The speed-up of `model` with a fused optimizer, by the factor of the others together.

    Raises `InvalidInput` if none of them shows an optimizer.
    """
    plain_s = changed_s = 0.0
    for pair in others:
        before_s, rest_before_s = _times_s(pair.plain)
        after_s, rest_after_s = _times_s(pair.changed)
        plain_s += before_s
        changed_s += after_s * rest_before_s / rest_after_s
    if plain_s <= 0:
        raise InvalidInput(f"none of {len(others)} other recordings shows an optimizer")
    changed = scale(model, _optimizer(model), changed_s / plain_s)
    return steady(model).step_s / steady(changed).step_s


def _optimizer(base: Base) -> BoolArray:
    """(N,) the ops of the optimizer."""
    chosen: BoolArray = (base.kind == Kind.UPDATE) & (base.queue != NONE)
    return chosen


def _times_s(base: Base) -> tuple[float, float]:
    """Seconds of the optimizer in a step, and of everything else; gaps included."""
    spent_s = base.duration_s + base.gap_s
    optimizer = _optimizer(base)
    rest = ~optimizer & (base.queue != NONE)
    return float(spent_s[optimizer].sum()), float(spent_s[rest].sum())
