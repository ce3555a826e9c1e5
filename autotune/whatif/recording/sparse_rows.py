"""The sparse gradients of embeddings in a trace, and how many rows a step looks up."""

from __future__ import annotations

import bisect
import math

import numpy as np

from autotune.errors import InvalidInput
from autotune.profiling.formats.op_inputs import OpInputs
from autotune.profiling.formats.rank_trace import MISSING, RankTrace
from autotune.profiling.graph.host_units import ACCUMULATE
from autotune.whatif.question import TouchedRows
from autotune.whatif.recording.parameter_sizes import TensorShape
from autotune.workload import Variable

ROW_NUMBER_BYTES = 8
"""torch numbers the rows of sparse tensors by 64-bit integers."""
SPARSE_BACKWARD = "aten::embedding_sparse_backward"
"""Its inputs: the gradient of what was looked up, the row numbers, the rows of the table."""


def counted_rows(variable: Variable) -> TouchedRows | None:
    """The rows that our recording counted; None for a dense gradient."""
    if not variable.sparse:
        return None
    all_rows_bytes = variable.grad_bytes + variable.rows * ROW_NUMBER_BYTES
    share = variable.touched_share
    return TouchedRows(share * variable.rows, variable.rows, share * all_rows_bytes)


def looked_up_rows(shape: TensorShape | None, looked_up: int) -> TouchedRows | None:
    """The rows that a step looks up; None for a dense gradient (no rows).

    Rows that are looked up twice count twice, up to the whole table: the trace does not hold their
    numbers.
    """
    if shape is None or not looked_up:
        return None
    table = max(shape.dims[0], 1)
    rows = min(looked_up, table)
    row_bytes = (shape.size_bytes or 0) / table + ROW_NUMBER_BYTES
    return TouchedRows(rows, table, rows * row_bytes)


class LookedUpRows:
    """For each accumulation of a gradient the rows of its table that were looked up.

    Those of all nodes since the last accumulation of that shape. Raises `InvalidInput` if a trace
    has sparse gradients of unknown shape.
    """

    def __init__(self, trace: RankTrace) -> None:
        self._starts_s: dict[int, list[float]] = {}
        self._rows: dict[int, list[int]] = {}
        known = (ACCUMULATE, SPARSE_BACKWARD)
        names = [number for number, name in enumerate(trace.names) if name in known]
        events = np.flatnonzero(np.isin(trace.name, names))
        pending: dict[tuple[int, tuple[int, ...]], int] = {}
        for event in events[np.argsort(trace.start_s[events], kind="stable")].tolist():
            lane = int(trace.lane[event])
            inputs = int(trace.inputs[event])
            told = None if inputs == MISSING else trace.op_inputs[inputs]
            if trace.name_of(event) == SPARSE_BACKWARD:
                table, count = _lookup(told)
                pending[lane, table] = pending.get((lane, table), 0) + count
                continue
            shape = () if told is None else told.dims[0]
            self._starts_s.setdefault(lane, []).append(float(trace.start_s[event]))
            self._rows.setdefault(lane, []).append(pending.pop((lane, shape), 0))

    def of(self, lane: int, start_s: float) -> int:
        """Of the first accumulation of a thread from a time on; 0 for a dense gradient."""
        place = bisect.bisect_left(self._starts_s.get(lane, []), start_s)
        rows = self._rows.get(lane, [])
        return rows[place] if place < len(rows) else 0


def _lookup(inputs: OpInputs | None) -> tuple[tuple[int, ...], int]:
    """The shape of the table and the number of rows that were looked up."""
    if inputs is not None and len(inputs.dims) > 2 and len(inputs.values) > 2:
        gradient, numbers = inputs.dims[:2]
        if gradient and inputs.values[2].isdecimal():
            return (int(inputs.values[2]), gradient[-1]), math.prod(numbers)
    raise InvalidInput(
        "sparse gradients are sent as rows, but the trace does not state how many: "
        f"{SPARSE_BACKWARD} has no shapes; record with shapes (record_shapes=True)"
    )
