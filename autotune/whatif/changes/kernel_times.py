"""What if kernels took the times that the user measured?"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Hashable, Iterator, Sequence
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
    index = _OpIndex(base)
    for row in read_kernel_times(Path(path)):
        ops = index.chosen(row)
        if not len(ops):
            raise InvalidInput(f"{path}, line {row.line}: the trace has nothing that it selects")
        if set_by[ops].any():
            other = int(set_by[ops].max())
            raise InvalidInput(f"{path}, line {row.line}: line {other} has stated a time for it")
        set_by[ops] = row.line
        seconds[ops] = row.seconds * _shares(base, row, ops)
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


class _Column:
    """A value of each of `ops`, shape (N,) with the other ops, and the ops of each value."""

    def __init__(self, count: int, ops: IntArray, values: Sequence[Hashable]) -> None:
        self._number_of = {value: number for number, value in enumerate(dict.fromkeys(values))}
        self._number = np.full(count, NONE, dtype=np.int64)
        self._number[ops] = [self._number_of[value] for value in values]
        order = ops[np.argsort(self._number[ops], kind="stable")]
        counts = np.bincount(self._number[ops], minlength=len(self._number_of))
        self._ops = np.split(order, np.cumsum(counts)[:-1])

    def ops(self, value: Hashable) -> IntArray:
        number = self._number_of.get(value)
        none: IntArray = np.zeros(0, dtype=np.int64)
        return none if number is None else self._ops[number]

    def has(self, ops: IntArray, value: Hashable) -> BoolArray:
        mask: BoolArray = self._number[ops] == self._number_of.get(value, NONE - 1)
        return mask


class _OpIndex:
    """The ops that take times of a file, by everything that its rows may state.

    A row takes time in the number of the ops of its rarest value, not in that of all ops.
    """

    def __init__(self, base: Base) -> None:
        device = bool(base.on_device.any())
        ops = np.flatnonzero((base.on_device == device) & (base.queue != NONE))
        layered, called = ops[base.layer[ops] != NONE], ops[base.operator[ops] != NONE]
        layers, operators = base.names.layers, base.names.operators
        calls = base.operator[called].tolist()
        keys = [(one.name, inputs_text(one)) for one in operators]
        self._kernels = _Column(base.ops, ops, [base.names.ops[op] for op in ops.tolist()])
        self._layers = _Column(base.ops, layered, [layers[n] for n in base.layer[layered].tolist()])
        self._operators = _Column(base.ops, called, [keys[call][0] for call in calls])
        self._inputs = _Column(base.ops, called, [keys[call] for call in calls])

    def chosen(self, row: KernelTime) -> IntArray:
        """(K,) the ops that meet every condition of the row, in their order."""
        conditions: list[tuple[_Column, Hashable]] = []
        if row.kernel:
            conditions.append((self._kernels, row.kernel))
        if row.layer:
            conditions.append((self._layers, row.layer))
        if row.inputs:
            conditions.append((self._inputs, (row.operator, row.inputs)))
        elif row.operator:
            conditions.append((self._operators, row.operator))
        ops = min((column.ops(value) for column, value in conditions), key=len)
        for column, value in conditions:
            ops = ops[column.has(ops, value)]
        return ops


def inputs_text(operator: Operator) -> str:
    """The shapes and types of an operator's inputs: `float[64, 3] float[8, 3] Scalar`."""
    if operator.inputs is None:
        return ""
    tensors = zip(operator.inputs.types, operator.inputs.dims, strict=True)
    return " ".join(tensor_text(kind, dims).strip() for kind, dims in tensors).strip()


def tensor_text(kind: str, dims: tuple[int, ...]) -> str:
    """A tensor's type and shape: `float[64x3]`."""
    return f"{kind}{list(dims) if dims else ''}".replace(", ", "x")


def _shares(base: Base, row: KernelTime, ops: IntArray) -> FloatArray:
    """(K,) the share of each op in the row's seconds.

    These are of one kernel, of one call of an operator, or of a layer, and keep the proportions of
    the times before; in equal parts if all are 0.
    """
    groups: IntArray = np.zeros(len(ops), dtype=np.int64)
    if row.kernel:
        groups = ops
    elif row.operator:
        groups = base.operator[ops].astype(np.int64)
    _, group = np.unique(groups, return_inverse=True)
    before_s = base.duration_s[ops]
    total_s = np.bincount(group, weights=before_s)[group]
    equal = 1 / np.bincount(group)[group]
    shares: FloatArray = np.divide(before_s, total_s, out=equal, where=total_s > 0)
    return shares
