"""Times a trace's operators on this machine, for what-if `kernel_times` (Daydream, sec. 7.4)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autotune.dfg.graph import NONE
from autotune.errors import InvalidInput
from autotune.files import write_whole
from autotune.whatif.base import Base, Operator
from autotune.whatif.changes.kernel_times import inputs_text

DEFAULT_BUDGET_S = 120.0


@dataclass(frozen=True)
class MeasuredOperator:
    """Median seconds of a call of the operator, None with the reason why it was not timed.

    `step_s`: what its calls take in a step of the trace.
    """

    operator: Operator
    seconds: float | None
    step_s: float
    reason: str = ""


def working_operators(base: Base) -> dict[Operator, float]:
    """Operators with distinct inputs and their seconds in a step, the longest first.

    Those that launch work on a device; on the host where the trace has none. Raises `InvalidInput`
    for a trace without operators, or without their shapes.
    """
    device = bool(base.on_device.any())
    working = (base.on_device == device) & (base.queue != NONE) & (base.operator != NONE)
    seconds: dict[Operator, float] = {}
    for op in np.flatnonzero(working).tolist():
        operator = replace(base.names.operators[base.operator[op]], around=(), optimizer="")
        seconds[operator] = seconds.get(operator, 0.0) + float(base.duration_s[op])
    if not seconds:
        raise InvalidInput(
            "operators can be timed where the trace states them; record host events, too "
            "(ProfilerActivity.CPU)"
        )
    if all(operator.inputs is None for operator in seconds):
        raise InvalidInput(
            "operators can be timed with the shapes of their inputs, which the trace does not "
            "state; record with shapes (autotune profile --shapes, or record_shapes=True)"
        )
    return dict(sorted(seconds.items(), key=lambda one: -one[1]))


def measuring_device(base: Base) -> str:
    """The device of torch whose kind the trace's operators ran on: "cuda" or "cpu".

    Raises `InvalidInput` if this machine has no GPU for the operators of one.
    """
    import torch

    if not base.on_device.any():
        return "cpu"
    if not torch.cuda.is_available():
        raise InvalidInput(
            "the operators of a trace with work of a GPU are timed on a GPU, but torch finds none "
            "on this machine; run --measure on a machine with one"
        )
    return "cuda"


def measured_operators(
    base: Base, *, device: str = "", budget_s: float = DEFAULT_BUDGET_S
) -> Iterator[MeasuredOperator]:
    """Time every distinct operator of a base, the longest first, until the budget is spent.

    `device`: of torch; by default `measuring_device`. Operators that mainly call others are not
    timed: these are timed themselves. Needs torch.
    """
    from runtime_rewriter.probe.operators import Invocation, operator_times

    device = device or measuring_device(base)
    seconds = working_operators(base)
    known: list[tuple[Operator, Invocation]] = []
    for operator, step_s in seconds.items():
        if operator.inputs is None:
            yield MeasuredOperator(operator, None, step_s, "the shapes of its inputs are unknown")
            continue
        inputs = operator.inputs
        known.append(
            (operator, Invocation(operator.name, inputs.dims, inputs.types, inputs.values))
        )
    times = operator_times([invocation for _, invocation in known], device, budget_s)
    for (operator, _), found in zip(known, times, strict=True):
        yield MeasuredOperator(operator, found.seconds, seconds[operator], found.reason)


def write_operator_times(path: Path, measured: Sequence[MeasuredOperator]) -> int:
    """Write the CSV file that `kernel_times` reads; return its number of rows.

    Operators of one name and inputs that differ otherwise, such as in strides, share a row with
    their mean. Raises `InvalidInput` if none was timed.
    """
    timed = [(one.operator, one.seconds) for one in measured if one.seconds is not None]
    if not timed:
        reasons = sorted({one.reason for one in measured})
        raise InvalidInput(f"no operator could be timed: {'; '.join(reasons[:3])}")
    return write_means(path, "seconds", timed, "the times of operators")


def write_means(
    path: Path, column: str, values: Iterable[tuple[Operator, float]], content: str
) -> int:
    """Write a CSV file with a row for each name and inputs, and the mean of its values in `column`.

    `content` names the file in errors. Returns the number of rows.
    """
    rows: dict[tuple[str, str], list[float]] = {}
    for operator, value in values:
        rows.setdefault((operator.name, inputs_text(operator)), []).append(value)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["operator", "inputs", column])
    for (name, inputs), of_row in rows.items():
        writer.writerow([name, inputs, f"{sum(of_row) / len(of_row):.9g}"])
    write_whole(path, text.getvalue(), content)
    return len(rows)
