"""An optimizer that updates rows of a table has more of them where several workers look rows up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from autotune.arrays import BoolArray
from autotune.dfg.graph import NONE
from autotune.whatif.base import Base, Operator
from autotune.whatif.question import Gradient, Reading

Shape = tuple[int, ...]
UNKNOWN = (
    "the updates of sparse gradients take as long as those of one worker's rows: the trace does "
    "not show which operators of the optimizer work on rows (record_shapes=True)"
)


def with_rows_of_all(
    base: Base, gradients: Sequence[Gradient], workers: int, reading: Reading
) -> Base:
    """The step in which optimizers update the rows that any of the workers touches.

    What works on rows takes as many times as long as there are more rows (`TouchedRows.of_all`).
    """
    sparse = list({one.shape: one for one in gradients if one.touched is not None}.values())
    others = {one.shape for one in gradients if one.touched is None}
    durations_s, known = base.duration_s.copy(), 0
    for one in sparse:
        assert one.touched is not None
        ops = _row_ops(base, one.shape, others)
        durations_s[ops] *= one.touched.of_all(workers).at(reading)
        known += bool(ops.any())
    notes = base.notes if known == len(sparse) else (*base.notes, UNKNOWN)
    return replace(base, duration_s=durations_s, notes=notes)


def _row_ops(base: Base, table: Shape, others: Collection[Shape]) -> BoolArray:
    """(N,) ops of optimizers that work on rows of a table; on the device, if there is one."""
    on_rows = np.array(
        [_works_on_rows(one, table, others) for one in base.names.operators], dtype=np.bool_
    )
    of_op: BoolArray = np.append(on_rows, False)[base.operator]  # NONE is the last one
    of_op &= base.queue != NONE
    return of_op & base.on_device if base.on_device.any() else of_op


def _works_on_rows(operator: Operator, table: Shape, others: Collection[Shape]) -> bool:
    """Whether an input has some of the table's rows, or a second one is the table's sparse form.

    A sparse tensor is recorded with the shape of the whole. The sum of the table, or a state like
    it, and of a sparse gradient touches the gradient's rows.
    """
    if not operator.optimizer or operator.inputs is None or len(table) < 2:
        return False
    dims = operator.inputs.dims
    if sum(one == table for one in dims) > 1 or (table in dims and operator.name == "aten::index"):
        return True
    return any(
        one[1:] == table[1:] and 0 < one[0] < table[0] and one not in others for one in dims if one
    )
