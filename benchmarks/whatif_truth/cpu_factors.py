"""Factors of operators under a change on this CPU, learned from other models (leave one out).

Every model is recorded without and with the change. For one model, an operator's factor is the
ratio of its total times in the recordings of the other models that have it; where none has, that of
its class. Work that only the change adds, such as casts, is a share of the step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.dfg.graph import NONE, Kind
from autotune.whatif.base import Base, steady
from autotune.whatif.primitives import scale, select

LEAST_SHARE = 0.002
"""Operators below this share of a step do not teach a factor of their own."""
MOST_FACTOR = 20.0
CLASSES = (
    ("matrix", re.compile(r"mm$|addmm|linear|convolution|conv|lstm|rnn|matmul|attention")),
    ("update", re.compile(r"optimizer|_fused_|foreach")),
    ("other", re.compile(r"")),
)


@dataclass(frozen=True, eq=False)
class RecordedPair:
    """The bases of one model without and with the change."""

    plain: Base
    changed: Base


def class_of(name: str) -> str:
    return next(kind for kind, expression in CLASSES if expression.search(name))


def times_by_operator(base: Base) -> dict[str, float]:
    """Seconds of each operator in a step; those of the optimizer are one operator."""
    times: dict[str, float] = {}
    for op in np.flatnonzero(base.queue != NONE).tolist():
        name = "optimizer" if base.kind[op] == Kind.UPDATE else base.names.ops[op]
        times[name] = times.get(name, 0.0) + float(base.duration_s[op] + base.gap_s[op])
    return times


def predicted_speedup(model: Base, others: Sequence[RecordedPair]) -> float:
    """The speed-up of `model` by the factors of the others."""
    factors, added = _learned(others)
    names = np.array(
        [
            "optimizer" if kind == Kind.UPDATE else name
            for name, kind in zip(model.names.ops, model.kind.tolist(), strict=True)
        ]
    )
    changed = model
    for name in set(names.tolist()):
        factor = factors.get(name, factors.get(f"class {class_of(name)}", 1.0))
        changed = scale(changed, (names == name) & select(model, on_device=False), factor)
    before_s = steady(model).step_s
    return before_s / (steady(changed).step_s + added * before_s)


def _learned(others: Sequence[RecordedPair]) -> tuple[Mapping[str, float], float]:
    plain: dict[str, float] = {}
    changed: dict[str, float] = {}
    added, total_s = 0.0, 0.0
    for pair in others:
        before, after = times_by_operator(pair.plain), times_by_operator(pair.changed)
        step_s = sum(before.values())
        total_s += step_s
        for name, seconds in before.items():
            if name in after and seconds >= LEAST_SHARE * step_s:
                for key in (name, f"class {class_of(name)}"):
                    plain[key] = plain.get(key, 0.0) + seconds
                    changed[key] = changed.get(key, 0.0) + after[name]
        added += sum(seconds for name, seconds in after.items() if name not in before)
        added -= sum(seconds for name, seconds in before.items() if name not in after)
    factors = {name: min(changed[name] / plain[name], MOST_FACTOR) for name in plain}
    return factors, added / total_s if total_s else 0.0
