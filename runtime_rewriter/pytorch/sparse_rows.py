"""Which rows a sparse gradient has once it is averaged, where the rows themselves travelled in a dense tensor.

A row counts that any rank has, also one whose values are zero: an optimizer that looks at rows (SparseAdam) lets the moments of each
row it is given decay and moves the row, so a lost one would train differently than under torch's DDP, which keeps them.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.errors import SynchronizationError
from runtime_rewriter.pytorch.collectives import Ranks


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Those whose gradients are sparse, by the rule of torch's DDP: of embeddings that were built with `sparse=True`."""
    return {
        parameter
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
        for parameter in child.parameters(recurse=False)
    }


class SparseRows:
    """`parameters`: position -> parameter with a sparse gradient; the same on every rank, and each with at least one axis."""

    def __init__(self, parameters: Mapping[int, nn.Parameter], ranks: Ranks) -> None:
        self._parameters, self._ranks = parameters, ranks

    def of_all_ranks(self) -> dict[int, Tensor]:
        """Collective: position -> indices, shape (rows,), ascending, of the rows that any rank's local gradient has."""
        if not self._parameters:
            return {}
        present = [_present(parameter) for parameter in self._parameters.values()]
        together = torch.cat(present)
        try:
            dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self._ranks.first)
        except RuntimeError as error:
            raise SynchronizationError(
                f"the ranks must agree on the rows of sparse gradients, but rank {self._ranks.rank} failed: {error}"
            ) from error
        parts = together.split([mask.numel() for mask in present])
        return {position: part.nonzero().flatten() for position, part in zip(self._parameters, parts, strict=True)}


def _present(parameter: nn.Parameter) -> Tensor:
    """1 for every row of the local gradient, uint8, shape (extent of the first axis,)."""
    gradient = parameter.grad
    mask = torch.zeros(parameter.shape[0], dtype=torch.uint8, device=parameter.device)
    if gradient is not None and gradient.is_sparse:
        mask[gradient._indices()[0]] = 1
    elif gradient is not None:
        mask.fill_(1)
    return mask


def rows_of(dense: Tensor, rows: Tensor) -> Tensor:
    """The sparse tensor of the given rows."""
    return torch.sparse_coo_tensor(rows.unsqueeze(0), dense[rows], dense.shape, is_coalesced=True, check_invariants=False)
