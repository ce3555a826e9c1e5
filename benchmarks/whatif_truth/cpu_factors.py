"""Factors of operators under a change on this CPU, learned from other models (leave one out).

Every model is recorded without and with the change. Another model's factor of an operator is the
ratio of its times in both recordings, over the ratio of what the change leaves alone: the rest of
the step for the optimizer's change, and the optimizer for the others. So a machine that was slower
during one of the recordings cancels out. For one model, an operator's factor is that of all other
models together; where none has it, that of its class. Work that only the change adds, such as
casts, is a share of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.dfg.graph import NONE, Kind
from autotune.whatif.base import Base, steady
from autotune.whatif.changes.processor import MATRIX
from autotune.whatif.primitives import scale

OPTIMIZER = "optimizer"
"""All ops of the optimizer count as one operator."""
LEAST_SHARE = 0.002
"""Operators below this share of a step do not teach a factor of their own."""
MOST_FACTOR = 20.0


@dataclass(frozen=True, eq=False)
class RecordedPair:
    """The bases of one model without and with the change."""

    plain: Base
    changed: Base


def class_of(operator: str) -> str:
    return "class matrix" if MATRIX.search(operator) else "class other"


def operators_of(base: Base) -> list[str]:
    """(N,) the operator of each op."""
    return [
        OPTIMIZER if kind == Kind.UPDATE else name
        for name, kind in zip(base.names.ops, base.kind.tolist(), strict=True)
    ]


def times_by_operator(base: Base) -> dict[str, float]:
    """Seconds of each operator in a step, gaps included."""
    times: dict[str, float] = {}
    names = operators_of(base)
    for op in np.flatnonzero(base.queue != NONE).tolist():
        seconds = float(base.duration_s[op] + base.gap_s[op])
        times[names[op]] = times.get(names[op], 0.0) + seconds
    return times


def predicted_speedup(model: Base, others: Sequence[RecordedPair], of_optimizer: bool) -> float:
    """The speed-up of `model` by the factors of the others.

    `of_optimizer`: the change is one of the optimizer, and of nothing else.
    """
    learned = _learned(others, of_optimizer)
    names = np.array(operators_of(model))
    changed = model
    for name in sorted(set(names.tolist())):
        if (name == OPTIMIZER) is of_optimizer:
            factor = learned.factors.get(name, learned.factors.get(class_of(name), 1.0))
            changed = scale(changed, names == name, factor)
    before_s = steady(model).step_s
    return before_s / (steady(changed).step_s + learned.added * before_s)


@dataclass(frozen=True)
class _Learned:
    """`factors` by operator and class. `added`: share of the step that only the change has."""

    factors: Mapping[str, float]
    added: float


def _learned(others: Sequence[RecordedPair], of_optimizer: bool) -> _Learned:
    plain: dict[str, float] = {}
    changed: dict[str, float] = {}
    added = total = 0.0
    for pair in others:
        before, after = times_by_operator(pair.plain), times_by_operator(pair.changed)
        speed = _unchanged_s(before, of_optimizer) / _unchanged_s(after, of_optimizer)
        after = {name: seconds * speed for name, seconds in after.items()}
        step_s = sum(before.values())
        total += 1.0
        for name, seconds in before.items():
            if name in after and seconds >= LEAST_SHARE * step_s:
                for key in (name, class_of(name)):
                    plain[key] = plain.get(key, 0.0) + seconds
                    changed[key] = changed.get(key, 0.0) + after[name]
        if not of_optimizer:
            added += sum(s for name, s in after.items() if name not in before) / step_s
            added -= sum(s for name, s in before.items() if name not in after) / step_s
    factors = {name: min(changed[name] / plain[name], MOST_FACTOR) for name in plain}
    return _Learned(factors, added / total if total else 0.0)


def _unchanged_s(times: Mapping[str, float], of_optimizer: bool) -> float:
    return sum(
        seconds for name, seconds in times.items() if (name == OPTIMIZER) is not of_optimizer
    )
