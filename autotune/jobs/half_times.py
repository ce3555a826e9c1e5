"""Times a trace's operators in both precisions on this machine, and casts, for what-if `amp_cpu`.

Processors differ in this by more than an order of magnitude: some have instructions for bfloat16,
others convert each element. So a factor from another machine says little.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.files import write_whole
from autotune.jobs.operator_times import working_operators
from autotune.profiling.formats.op_inputs import OpInputs
from autotune.whatif.base import Base, Operator
from autotune.whatif.changes.kernel_times import inputs_text, tensor_text
from autotune.whatif.changes.processor import CAST, COLUMNS, TIMES
from autotune.whatif.kernels.autocast import FLOAT, MATRIX, Dims, autocast

HALF = "c10::BFloat16"
SUFFIX = ".bf16.csv"
TURNS = 3
"""Both precisions take turns; the shortest time of each met the least other work."""
LEAST_SHARE = 5e-4
"""Operators with less of a step are not timed."""
CAST_SHARE = 0.25
"""Share of the budget for operators that timing the casts may take as well."""


@dataclass(frozen=True)
class HalfTime:
    """Seconds of an operator's call in float32 and in bfloat16, the least median of a few turns.

    `step_s`: what its calls take in a step of the trace.
    """

    operator: Operator
    single_s: float
    half_s: float
    step_s: float


@dataclass(frozen=True)
class CastTime:
    """Seconds of the cast of a float32 tensor, and of the cast of its gradient."""

    dims: Dims
    forward_s: float
    backward_s: float


def half_times(base: Base, budget_s: float, least_share: float = LEAST_SHARE) -> Iterator[HalfTime]:
    """Time each operator that autocast changes in both precisions, the longest first.

    Operators with less than `least_share` of the recorded step are left out.

    Operators that cannot be called by themselves are left out. Needs torch.
    """
    from runtime_rewriter.probe.operators import Invocation, operator_times

    half = {
        replace(base.names.operators[number], around=(), optimizer="")
        for number in autocast(base).half
    }
    known = working_operators(base)
    least_s = least_share * sum(known.values())
    chosen: list[tuple[Operator, float]] = []
    calls: list[Invocation] = []
    for operator, step_s in known.items():
        inputs = operator.inputs
        if operator not in half or step_s < least_s or inputs is None:
            continue
        single = Invocation(operator.name, inputs.dims, inputs.types, inputs.values)
        chosen.append((operator, step_s))
        calls += [single, replace(single, types=half_types(operator.name, inputs))] * TURNS
    times = operator_times(calls, "cpu", budget_s)
    for operator, step_s in chosen:
        taken_s = [one.seconds for one in islice(times, 2 * TURNS)]
        single_s, half_s = ([one for one in taken_s[place::2] if one] for place in (0, 1))
        if single_s and half_s:
            yield HalfTime(operator, min(single_s), min(half_s), step_s)


def half_types(name: str, inputs: OpInputs) -> tuple[str, ...]:
    """The types of an operator's inputs under autocast.

    A product has all in bfloat16; another one what is as large as its first tensor, since weights
    and statistics of normalizations stay in float32.
    """
    floats = [dims for dims, kind in zip(inputs.dims, inputs.types, strict=True) if kind == FLOAT]
    size = prod(floats[0]) if floats else 0
    return tuple(
        HALF if kind == FLOAT and (MATRIX.search(name) or prod(dims) == size) else kind
        for dims, kind in zip(inputs.dims, inputs.types, strict=True)
    )


def cast_times(base: Base, budget_s: float) -> Iterator[CastTime]:
    """Time the casts that autocast adds, the largest first, for a share of the budget."""
    from runtime_rewriter.probe.casts import cast_times_s

    end_s = time.perf_counter() + CAST_SHARE * budget_s
    sizes = {cast.dims for cast in autocast(base).casts}
    for dims in sorted(sizes, key=lambda one: (-prod(one), one)):
        if time.perf_counter() > end_s:
            return
        yield CastTime(dims, *cast_times_s(dims))


def write_half_times(path: Path, measured: Sequence[HalfTime], casts: Sequence[CastTime]) -> int:
    """Write the CSV file that `amp_cpu` reads; return its number of rows.

    Operators of one name and inputs that differ otherwise, such as in strides, share a row with
    their means. Raises `InvalidInput` if no operator was timed.
    """
    if not measured:
        raise InvalidInput("no operator of the trace could be timed in both precisions")
    rows: dict[tuple[str, str], list[HalfTime]] = {}
    for one in measured:
        rows.setdefault((one.operator.name, inputs_text(one.operator)), []).append(one)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*COLUMNS, *TIMES])
    for key, same in rows.items():
        single_s = sum(one.single_s for one in same) / len(same)
        half_s = sum(one.half_s for one in same) / len(same)
        writer.writerow([*key, f"{single_s:.9g}", f"{half_s:.9g}"])
    for cast in casts:
        seconds = f"{cast.forward_s:.9g}", f"{cast.backward_s:.9g}"
        writer.writerow([CAST, tensor_text(FLOAT, cast.dims), *seconds])
    write_whole(path, text.getvalue(), "the times in bfloat16")
    return len(rows) + len(casts)
