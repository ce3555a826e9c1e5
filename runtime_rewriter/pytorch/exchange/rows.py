"""The rows of one variable's gradient that a step touched, and their form on the wire.

| symbol | meaning | shape |
|---|---|---|
| n | rows of one rank, or of the union over ranks | - |
| c | real numbers per row of the variable, two for a complex one | - |
| indices | row numbers, ascending and unique | (n,), int64 |
| values | the rows | (n, c) |
| capacity | rows of a buffer: the largest number on any rank | - |
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_ALIGNMENT = 8
"""Bytes; values of every dtype may start at a multiple of it."""


class Form(IntEnum):
    """A gradient's form in autograd; a sum has the largest form of its terms."""

    NONE = 0  # this rank did not use the variable
    DENSE = 1
    COO = 2


@dataclass(frozen=True)
class GradientRows:
    """`indices` and `values` as in the table above."""

    indices: Tensor
    values: Tensor
    form: Form

    @property
    def count(self) -> int:
        return self.indices.numel()

    def between(self, start: int, stop: int) -> GradientRows:
        """The rows with start <= index < stop, as views."""
        limits = torch.tensor([start, stop], device=self.indices.device)
        first, end = torch.searchsorted(self.indices, limits).tolist()
        return GradientRows(self.indices[first:end], self.values[first:end], self.form)

    def first(self, count: int) -> GradientRows:
        """The first `count` rows, as views."""
        return GradientRows(self.indices[:count], self.values[:count], self.form)


def rows_of(gradient: Tensor | None, parameter: Tensor, scale: float) -> GradientRows:
    """The gradient's rows times `scale`.

    These are the rows present in a COO gradient, with duplicates summed, or the rows of a dense
    one that are not all zero.
    """
    if gradient is None:
        none = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return GradientRows(
            none, _matrix(parameter.new_empty((0, *parameter.shape[1:]))), Form.NONE
        )
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        gathered = gradient.coalesce()
        return GradientRows(gathered.indices()[0], _matrix(gathered.values() * scale), Form.COO)
    dense = dense_of(gradient)
    indices = (dense.reshape(len(dense), -1) != 0).any(1).nonzero().flatten()
    form = Form.COO if gradient.is_sparse else Form.DENSE
    return GradientRows(indices, _matrix(dense.index_select(0, indices) * scale), form)


def dense_of(gradient: Tensor) -> Tensor:
    """The gradient as a dense tensor.

    Rows that a sparse one has several times are summed by `coalesce`, as torch's DDP does before it
    sends them. `to_dense` alone adds them in another order, which rounds otherwise.
    """
    return gradient.coalesce().to_dense() if gradient.is_sparse else gradient


def gradient_of(rows: GradientRows, parameter: Tensor) -> Tensor:
    """The COO gradient of `parameter` with these rows; a view if the dtypes are equal."""
    return torch.sparse_coo_tensor(
        rows.indices[None],
        values_of(rows, parameter),
        parameter.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def values_of(rows: GradientRows, parameter: Tensor) -> Tensor:
    """The rows in the parameter's dtype and shape, (n, *parameter.shape[1:])."""
    if not parameter.is_complex():
        return rows.values.to(parameter.dtype).view(rows.count, *parameter.shape[1:])
    return torch.view_as_complex(rows.values.view(rows.count, *parameter.shape[1:], 2))


def summed(parts: Sequence[GradientRows]) -> GradientRows:
    """The sum of the ranks' rows, added in rank order, with the same bits on every device.

    The rows of one rank are unique, so no two threads add to the same one. 16-bit values are
    summed in float32 and not rounded.
    """
    union = torch.unique(torch.cat([part.indices for part in parts]))
    dtype = parts[0].values.dtype
    if dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    shape = (len(union), parts[0].values.shape[1])
    total = torch.zeros(shape, dtype=dtype, device=union.device)
    for part in parts:
        total.index_add_(0, torch.searchsorted(union, part.indices), part.values.to(total.dtype))
    return GradientRows(union, total, max(part.form for part in parts))


def joined_rows(parts: Sequence[GradientRows]) -> GradientRows:
    """Rows of ascending ranges, one behind the other."""
    indices = torch.cat([part.indices for part in parts])
    values = torch.cat([part.values for part in parts])
    return GradientRows(indices, values, max(part.form for part in parts))


@dataclass(frozen=True)
class RowBuffers:
    """The layout of one variable's rows in a buffer of bytes.

    A buffer holds `capacity` indices, then as many rows of `columns` values.
    """

    columns: int
    wire: torch.dtype
    index: torch.dtype
    device: torch.device

    @staticmethod
    def of(parameter: Tensor, wire: torch.dtype | None) -> RowBuffers:
        """`wire`: the dtype that travels; None: the parameter's, or that of its real part."""
        columns = math.prod(parameter.shape[1:]) * (2 if parameter.is_complex() else 1)
        index = torch.int32 if parameter.shape[0] <= 2**31 else torch.int64
        return RowBuffers(columns, wire or parameter.dtype.to_real(), index, parameter.device)

    def empty(self, capacity: int) -> Tensor:
        """A flat buffer of bytes for `capacity` rows."""
        size = self._offset(capacity) + _aligned(capacity * self.columns * self.wire.itemsize)
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def packed(self, rows: GradientRows, capacity: int) -> Tensor:
        """The rows in a new buffer, rounded to the dtype that travels."""
        buffer = self.empty(capacity)
        indices, values = self._views(buffer, capacity)
        indices[: rows.count].copy_(rows.indices)
        values[: rows.count].copy_(rows.values)
        return buffer

    def unpacked(self, buffer: Tensor, capacity: int, count: int, form: int) -> GradientRows:
        """The first `count` rows of a buffer of `capacity`; the values are a view."""
        indices, values = self._views(buffer, capacity)
        return GradientRows(indices[:count].long(), values[:count], Form(form))

    def _offset(self, capacity: int) -> int:
        return _aligned(capacity * self.index.itemsize)

    def _views(self, buffer: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        offset = self._offset(capacity)
        indices = buffer[: capacity * self.index.itemsize].view(self.index)
        end = offset + capacity * self.columns * self.wire.itemsize
        values = buffer[offset:end].view(self.wire)
        return indices, values.view(capacity, self.columns)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _matrix(rows: Tensor) -> Tensor:
    """Shape (n, c); complex numbers become pairs of real ones."""
    real = torch.view_as_real(rows) if rows.is_complex() else rows
    return real.reshape(len(rows), math.prod(real.shape[1:]))
