"""What if kernels took the times that the user measured?"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.dfg.graph import NONE
from autotune.errors import InvalidInput
from autotune.files import read_text
from autotune.whatif.base import Base, Operator
from autotune.whatif.question import Question
from autotune.whatif.registry import what_if

COLUMNS = ("kernel", "layer", "operator", "inputs")
SECONDS = "seconds"
MAX_ROWS = 100_000
MAX_SECONDS = 1e5


@dataclass(frozen=True)
class KernelTime:
    """What a row selects, "" for no condition, and its seconds."""

    line: int
    kernel: str
    layer: str
    operator: str
    inputs: str
    seconds: float


@what_if(
    "kernel_times",
    title="your own kernel times (kernel_times=FILE.csv)",
    source="Daydream (USENIX ATC 2020), sec. 7.4",
    enact="use the kernels whose times the file states",
)
def kernel_times(base: Base, question: Question) -> Base:
    """Device ops take the seconds that a CSV file states for them.

    Columns: `seconds`, and one or more of `kernel` (its whole name), `layer`, `operator` and
    `inputs` (the operator's shapes and types, as `--measure` writes them). Seconds are of one
    execution: of a kernel, of all kernels of one call of the operator, or of a layer's kernels in a
    step. Where several kernels share them, they keep their proportions. A trace without a device
    has its operators on the host. Launches stay.
    """
    path = question.files.get("kernel_times")
    if path is None:
        raise InvalidInput(
            "what-if 'kernel_times' needs times; name a CSV file: kernel_times=FILE.csv"
        )
    seconds = base.duration_s.copy()
    set_by = np.zeros(base.ops, dtype=np.int64)
    device = bool(base.on_device.any())
    for row in read_kernel_times(Path(path)):
        chosen = _chosen(base, row, device)
        if not chosen.any():
            raise InvalidInput(f"{path}, line {row.line}: the trace has nothing that it selects")
        if set_by[chosen].any():
            other = int(set_by[chosen].max())
            raise InvalidInput(f"{path}, line {row.line}: line {other} has stated a time for it")
        set_by[chosen] = row.line
        for ops in _executions(base, row, chosen):
            seconds[ops] = _shared(base.duration_s[ops], row.seconds)
    return replace(base, duration_s=seconds)


def read_kernel_times(path: Path) -> list[KernelTime]:
    """The rows of a file. Raises `InvalidInput` that names the line."""
    reader = csv.DictReader(io.StringIO(read_text(path)))
    named = reader.fieldnames or []
    unknown = [name for name in named if name not in (*COLUMNS, SECONDS)]
    if SECONDS not in named or unknown or not set(named) & set(COLUMNS):
        raise InvalidInput(
            f"{path} needs the column {SECONDS} and some of {', '.join(COLUMNS)}, but has "
            f"{', '.join(named) or 'none'}"
        )
    return list(_rows(reader, path))


def _rows(reader: csv.DictReader[str], path: Path) -> Iterator[KernelTime]:
    for number, row in enumerate(reader):
        where = f"{path}, line {reader.line_num}"
        if number >= MAX_ROWS:
            raise InvalidInput(f"{path} may have at most {MAX_ROWS} rows")
        if None in row or None in row.values():
            raise InvalidInput(f"{where} must have as many values as the first line")
        values = {column: (row.get(column) or "").strip() for column in COLUMNS}
        if not any(values.values()):
            raise InvalidInput(f"{where} selects nothing; state a kernel, layer or operator")
        if values["inputs"] and not values["operator"]:
            raise InvalidInput(f"{where} states inputs of no operator; state the operator, too")
        yield KernelTime(reader.line_num, **values, seconds=_seconds(row[SECONDS], where))


def _seconds(text: str, where: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_SECONDS:
        raise InvalidInput(
            f"{where}: seconds must be 0 to {MAX_SECONDS:.0f}, but are {text[:40]!r}"
        )
    return seconds


def _chosen(base: Base, row: KernelTime, device: bool) -> BoolArray:
    mask: BoolArray = (base.on_device == device) & (base.queue != NONE)
    if row.kernel:
        mask &= _named(base.names.ops, row.kernel)
    if row.layer:
        mask &= np.append(_named(base.names.layers, row.layer), False)[base.layer]
    if row.operator:
        fits = [
            one.name == row.operator and row.inputs in ("", inputs_text(one))
            for one in base.names.operators
        ]
        mask &= np.append(np.array(fits, dtype=np.bool_), False)[base.operator]
    return mask


def _named(names: tuple[str, ...], name: str) -> BoolArray:
    return np.array([one == name for one in names], dtype=np.bool_)


def inputs_text(operator: Operator) -> str:
    """The shapes and types of an operator's inputs: `float[64, 3] float[8, 3] Scalar`."""
    if operator.inputs is None:
        return ""
    tensors = zip(operator.inputs.types, operator.inputs.dims, strict=True)
    return " ".join(tensor_text(kind, dims).strip() for kind, dims in tensors).strip()


def tensor_text(kind: str, dims: tuple[int, ...]) -> str:
    """A tensor's type and shape: `float[64x3]`."""
    return f"{kind}{list(dims) if dims else ''}".replace(", ", "x")


def _executions(base: Base, row: KernelTime, chosen: BoolArray) -> Iterator[BoolArray]:
    """The ops that share the row's seconds: one kernel, a call of an operator, or a layer."""
    ops = np.flatnonzero(chosen)
    groups: IntArray = np.zeros(len(ops), dtype=np.int64)
    if row.kernel:
        groups = ops
    elif row.operator:
        groups = base.operator[ops].astype(np.int64)
    for group in np.unique(groups):
        mask = np.zeros(base.ops, dtype=np.bool_)
        mask[ops[groups == group]] = True
        yield mask


def _shared(before_s: FloatArray, seconds: float) -> FloatArray:
    """`seconds` in the proportions of the times before; in equal parts if all are 0."""
    total_s = float(before_s.sum())
    if total_s == 0:
        return np.full(len(before_s), seconds / len(before_s))
    return before_s * (seconds / total_s)
