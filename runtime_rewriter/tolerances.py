"""How far a plan's averaged gradients may differ from a plain reduction of the same gradients.

`runtime_rewriter/pytorch/numerics.py` derives the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Compressor

NOISE_ROUNDOFFS = 64
"""Gradients below this many roundoffs of the model's largest are noise: sums over a batch round
several times."""
UNIT_ROUNDOFFS = {
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float32": 2.0**-24,
    "float64": 2.0**-53,
    "complex64": 2.0**-24,
    "complex128": 2.0**-53,
}
WAITING_ROUNDOFFS = 4
_FEEDBACK_MARGIN = 16


@dataclass(frozen=True)
class GateResult:
    """The outcome for all variables.

    `relative_error`: the largest; 0.0 for equal bits, infinite if ranks differ or a finite
    reference became non-finite. `worst_variable`: the one with the largest share of its own
    tolerance, which is `tolerance`. `ok`: whether every variable is within its tolerance.
    """

    relative_error: float
    tolerance: float
    worst_variable: str
    ok: bool


def tolerance_of(dtype: str, compressor: Compressor, terms: int) -> float:
    """The bound for a sum of `terms` gradients, one per rank."""
    roundoff = UNIT_ROUNDOFFS[dtype]
    if compressor.error_feedback:
        return _FEEDBACK_MARGIN * (terms + 4) * roundoff
    wire = wire_roundoff(compressor)
    if wire > 0:
        return (terms + 1) * wire + 2 * terms * roundoff
    return 0.0 if terms <= 2 else 2 * terms * roundoff


def wire_roundoff(compressor: Compressor) -> float:
    """u_wire of a cast; 0 for other compressors."""
    wire_dtype = compressor.description.wire_dtype
    return 0.0 if wire_dtype is None else UNIT_ROUNDOFFS[wire_dtype]


def coarsest_compressors(plan: Plan, names: Sequence[str]) -> list[Compressor]:
    """The compressor of each variable's coarsest message."""

    def coarseness(compressor: Compressor) -> tuple[float, bool]:
        return wire_roundoff(compressor), compressor.error_feedback

    chosen = dict.fromkeys(names, Compressor.NONE)
    for message in plan.messages:
        for part in message.slices:
            chosen[part.variable] = max(chosen[part.variable], message.compressor, key=coarseness)
    return [chosen[name] for name in names]


def judge(errors: Sequence[float], tolerances: Sequence[float], names: Sequence[str]) -> GateResult:
    """Compare the error of each variable with its tolerance."""

    def share(position: int) -> float:
        error, tolerance = errors[position], tolerances[position]
        return 0.0 if error == 0.0 else error / tolerance if tolerance > 0 else math.inf

    worst = max(range(len(names)), key=share)
    return GateResult(
        max(errors),
        tolerances[worst],
        names[worst],
        all(e <= t for e, t in zip(errors, tolerances, strict=True)),
    )


def judge_differences(
    names: Sequence[str],
    dtypes: Sequence[str],
    differences: Sequence[float],
    largest: Sequence[float],
    terms: Sequence[float],
    plan: Plan,
) -> GateResult:
    """Judge absolute differences relative to the `largest` value of each variable.

    `terms`: gradients that the reference adds up. A variable of noise whose messages are cast
    counts relative to the largest value of the model.
    """
    finite = [one for one in largest if math.isfinite(one)]
    of_model = max(finite, default=0.0)
    relative, tolerances = [], []
    choices = coarsest_compressors(plan, names)
    for place, (dtype, choice) in enumerate(zip(dtypes, choices, strict=True)):
        scale, error = float(largest[place]), float(differences[place])
        noise = NOISE_ROUNDOFFS * UNIT_ROUNDOFFS[dtype] * of_model
        if scale <= noise and wire_roundoff(choice) > 0:
            scale = of_model
        relative.append(error if error in (0.0, math.inf) else _share(error, scale))
        tolerances.append(tolerance_of(dtype, choice, int(terms[place])))
    return judge(relative, tolerances, names)


def _share(error: float, scale: float) -> float:
    return error / scale if 0 < scale < math.inf else math.inf
