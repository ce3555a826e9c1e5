"""A dense average becomes a sparse gradient again."""

import pytest
import torch

from runtime_rewriter.pytorch.exchange.present_rows import sparse_rows


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 3)])
def test_rows_that_are_exactly_zero_are_left_out_and_the_rest_is_as_torchs_own(
    shape: tuple[int, ...],
) -> None:
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    dense[1], dense[3] = 0, float("nan")
    mine, torchs = sparse_rows(dense), dense.to_sparse(1)
    assert mine.is_coalesced() and torch.equal(mine.indices(), torchs.indices())
    assert torch.equal(mine.values().nan_to_num(9), torchs.values().nan_to_num(9))
