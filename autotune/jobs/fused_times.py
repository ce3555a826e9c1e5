"""Times the optimizers of a CPU's trace with and without their fused version, on this machine.

What-if `fused_adam_cpu` scales the recorded steps by it.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.files import write_whole
from autotune.whatif.base import Base, Operator
from autotune.whatif.changes.processor_optimizer import COLUMNS, FUSABLE, TIMES, is_fused

SUFFIX = ".fused.csv"
BUDGET_SHARE = 0.1
"""Share of the budget for operators that timing the optimizers may take."""
WEIGHT_DECAY = 0.01
MOMENTUM = 0.9


@dataclass(frozen=True)
class FusedTime:
    """Seconds of an optimizer's step as recorded and fused; `parameters`: how many it updates."""

    optimizer: str
    unfused_s: float
    fused_s: float
    parameters: int


def fused_times(base: Base, budget_s: float) -> list[FusedTime]:
    """Time every optimizer of a trace that has a fused version and is not fused. Needs torch.

    Optimizers whose operators were recorded without shapes are left out.
    """
    from runtime_rewriter.probe.optimizers import Updated, step_times_s

    calls: dict[str, list[Operator]] = {}
    for one in base.names.operators:
        if one.optimizer in FUSABLE and not one.around:
            calls.setdefault(one.optimizer, []).append(one)
    times = []
    for name, operators in sorted(calls.items()):
        shapes = updated_shapes(operators)
        if not shapes or is_fused(base, name):
            continue
        updated = Updated(name, shapes, recorded_options(name, operators))
        unfused_s, fused_s = step_times_s(updated, BUDGET_SHARE * budget_s)
        times.append(FusedTime(name, unfused_s, fused_s, len(shapes)))
    return times


def updated_shapes(operators: Sequence[Operator]) -> tuple[tuple[int, ...], ...]:
    """The shapes of an optimizer's parameters, from what its step changes in place.

    A step calls each of its operators once or several times for each parameter and each of its
    moments. So there are as many parameters of a shape as calls of its rarest operator.
    """
    counts = Counter(
        (one.inputs.dims[0], one.name)
        for one in operators
        if one.inputs is not None
        and one.name.endswith("_")
        and one.inputs.dims[0]
        and one.inputs.types[0] == "float"
    )
    rarest: dict[tuple[int, ...], int] = {}
    for (shape, _), count in counts.items():
        rarest[shape] = min(count, rarest.get(shape, count))
    return tuple(shape for shape, count in sorted(rarest.items()) for _ in range(count))


def recorded_options(optimizer: str, operators: Sequence[Operator]) -> dict[str, Any]:
    """The options that decide which operators a step calls, from the recorded ones."""
    names = {one.name for one in operators}
    options: dict[str, Any] = {"foreach": False}
    if optimizer != "AdamW":  # its decay is no addition to the gradient, and its default
        options["weight_decay"] = WEIGHT_DECAY if "aten::add" in names else 0.0
    if optimizer == "SGD":
        options["momentum"] = MOMENTUM if "aten::mul_" in names else 0.0
    if "aten::maximum" in names:
        options["amsgrad"] = True
    return options


def write_fused_times(path: Path, measured: Sequence[FusedTime]) -> None:
    """Write the CSV file that `fused_adam_cpu` reads. Raises `InvalidInput` without a time."""
    if not measured:
        raise InvalidInput(
            "no optimizer of the trace could be timed in a fused version: it needs one of "
            f"{', '.join(FUSABLE)}, not fused yet, recorded with shapes"
        )
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*COLUMNS, *TIMES])
    for one in measured:
        writer.writerow([one.optimizer, f"{one.unfused_s:.9g}", f"{one.fused_s:.9g}"])
    write_whole(path, text.getvalue(), "the times of optimizers")
