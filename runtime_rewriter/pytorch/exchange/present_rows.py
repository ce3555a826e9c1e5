"""The rows of a sparse gradient after averaging, if it travelled as a dense tensor.

A row that any rank has counts, even if its values are zero. SparseAdam lets the moments of each
row that it receives decay, and moves the row. A lost row would train differently than under torch's
DDP, which keeps it.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.errors import SynchronizationError


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Parameters with sparse gradients by DDP's rule: embeddings built with `sparse=True`."""
    return {
        parameter
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
        for parameter in child.parameters(recurse=False)
    }


class PresentRows:
    """`parameters`: position -> parameter with a sparse gradient that travels dense, on all
    ranks."""

    def __init__(self, parameters: Mapping[int, nn.Parameter]) -> None:
        self._parameters = parameters
        self._mask: Tensor | None = None  # of all parameters, one after the other
        self._work: dist.Work | None = None

    def ask(self, group: dist.ProcessGroup) -> None:
        """Exchange which rows each rank has, when all local gradients are final. Collective."""
        if not self._parameters:
            return
        mask = torch.cat([_present(parameter) for parameter in self._parameters.values()])
        self._mask = mask
        try:
            self._work = dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=group, async_op=True)
        except RuntimeError as error:
            raise _failed(error) from error

    def only(self, position: int, dense: Tensor) -> Tensor:
        """The rows of a parameter's average that any rank had before, as a COO tensor.

        Waits for the answer. For a parameter that belongs to no embedding: the rows that are not
        zero.
        """
        if position not in self._parameters:
            return sparse_rows(dense)
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise _failed(error) from error
            self._work = None
        assert self._mask is not None
        parts = self._mask.split([parameter.shape[0] for parameter in self._parameters.values()])
        rows = parts[list(self._parameters).index(position)].nonzero().flatten()
        return torch.sparse_coo_tensor(
            rows[None], dense[rows], dense.shape, is_coalesced=True, check_invariants=False
        )


def sparse_rows(dense: Tensor) -> Tensor:
    """The rows along axis 0 that are not zero, as COO.

    `Tensor.to_sparse(1)` is slow: 0.4 s for 7000 x 128.
    """
    rows = dense.reshape(len(dense), dense[:1].numel()).any(1).nonzero().squeeze(1)
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), dense[rows], dense.shape, check_invariants=False, is_coalesced=True
    )


def _present(parameter: nn.Parameter) -> Tensor:
    """1 for every row of the local gradient, uint8, shape (rows of the parameter,)."""
    gradient = parameter.grad
    mask = torch.zeros(parameter.shape[0], dtype=torch.uint8, device=parameter.device)
    if gradient is not None and gradient.is_sparse:
        mask[gradient._indices()[0]] = 1
    elif gradient is not None:
        mask.fill_(1)
    return mask


def _failed(error: RuntimeError) -> SynchronizationError:
    return SynchronizationError(
        f"the ranks must agree on the rows of sparse gradients, but it failed: {error}; "
        "is every other rank alive?"
    )
