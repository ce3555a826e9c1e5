"""Rows of sparse gradients: taken from every form, through a buffer of every dtype, added in rank
order.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime_rewriter.pytorch.exchange.rows import Form, RowBuffers, gradient_of, rows_of, summed

SHAPES = ((7,), (7, 1), (7, 3), (7, 3, 5), (7, 0))


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Rows 1, 2, 5 and 6 of a gradient."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.zeros(shape, dtype=dtype)
    gradient[[1, 2, 5, 6]] = torch.randn((4, *shape[1:]), generator=generator, dtype=dtype) + 3
    return gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_survive_a_buffer_in_their_own_dtype(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    dense = filled(shape, dtype, 0)
    rows = rows_of(
        dense.to_sparse(1) if dense.numel() else torch.zeros_like(dense, layout=torch.sparse_coo),
        dense,
        1.0,
    )
    buffers = RowBuffers.of(dense, None)
    for capacity in (rows.count, rows.count + 3):
        buffer = torch.cat([buffers.empty(1), buffers.packed(rows, capacity)])[
            buffers.empty(1).numel() :
        ]  # as one of several
        unpacked = buffers.unpacked(buffer, capacity, rows.count, rows.form)
        assert unpacked.form is Form.COO and torch.equal(unpacked.indices, rows.indices)
        assert torch.equal(gradient_of(unpacked, dense).to_dense(), dense)


def test_duplicates_are_summed_and_dense_gradients_give_their_rows_that_are_not_zero() -> None:
    parameter = torch.zeros(9, 2)
    coo = torch.sparse_coo_tensor(
        torch.tensor([[4, 1, 4]]),
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        (9, 2),
        check_invariants=True,
    )
    rows = rows_of(coo, parameter, 0.5)
    assert (
        rows.indices.tolist() == [1, 4]
        and rows.values.tolist() == [[1.5, 2.0], [3.0, 4.0]]
        and rows.form is Form.COO
    )
    dense = coo.to_dense()
    dense[7, 0] = float("nan")
    rows = rows_of(dense, parameter, 1.0)
    assert (
        rows.indices.tolist() == [1, 4, 7]
        and rows.form is Form.DENSE
        and bool(rows.values[2, 0].isnan())
    )
    assert rows_of(None, parameter, 1.0).count == 0
    twice = rows_of(dense.nan_to_num().to_sparse(), parameter, 1.0)  # two sparse dimensions
    assert twice.indices.tolist() == [1, 4] and twice.form is Form.COO
    assert (
        rows.between(2, 8).indices.tolist() == [4, 7]
        and rows.between(8, 9).count == 0
        and rows.first(1).indices.tolist() == [1]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_that_of_the_dense_gradients_in_rank_order(dtype: torch.dtype) -> None:
    parts = [filled((7, 3), dtype, seed) for seed in range(3)]
    parts[1][5] = 0
    parts[2][0] = 1
    total = summed([rows_of(part, part, 1.0) for part in parts])
    wide = [part.to(torch.float32) for part in parts]
    assert total.indices.tolist() == [0, 1, 2, 5, 6] and total.values.dtype is torch.float32
    assert torch.equal(
        gradient_of(total, torch.zeros(7, 3)).to_dense(), wide[0] + wide[1] + wide[2]
    )


def test_sixteen_bits_travel_rounded_once() -> None:
    dense = filled((7, 3), torch.float32, 1)
    buffers = RowBuffers.of(dense, torch.float16)
    rows = rows_of(dense, dense, 1.0)
    unpacked = buffers.unpacked(buffers.packed(rows, 5), 5, rows.count, rows.form)
    assert torch.equal(unpacked.values, rows.values.half())
