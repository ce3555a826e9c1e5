"""Byte scaling of what torch's own DDP sends: 1/k of every bucket and of every buffer travels.

For links whose rates were divided by k. What did not travel keeps this rank's own values, so ranks drift apart: such a
training measures time and nothing else.
"""

# mypy: allow-untyped-calls, no-warn-return-any

# Annotations are not deferred here: DDP compares those of a communication hook with its own classes.

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel.distributed import DistributedDataParallel

from autotune.errors import InvalidInput
from runtime_rewriter.emulation import travelling


@dataclass(frozen=True)
class ScaledReduction:
    """State of the communication hook: the group that averages, and the byte scale."""

    group: dist.ProcessGroup
    byte_scale: float


def scaled_all_reduce(
    state: ScaledReduction, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook, with the first part of the bucket: divide by the world size, sum over the ranks."""
    whole = bucket.buffer().div_(state.group.size())
    if whole.is_sparse:
        return _sparse_all_reduce(whole.coalesce(), state)
    work = dist.all_reduce(
        whole[: travelling(whole.numel(), state.byte_scale)], group=state.group, async_op=True
    )
    assert work is not None
    return work.get_future().then(lambda _: whole)


def _sparse_all_reduce(whole: Tensor, state: ScaledReduction) -> torch.futures.Future[torch.Tensor]:
    """The first rows of this rank; the sum holds those that some rank sent."""
    rows = travelling(whole._nnz(), state.byte_scale)
    part = torch.sparse_coo_tensor(
        whole.indices()[:, :rows], whole.values()[:rows], whole.shape, check_invariants=False
    )
    work = dist.all_reduce(part, group=state.group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def scale_reducer(model: DistributedDataParallel, byte_scale: float) -> None:
    """Makes DDP's own reducer send 1/`byte_scale` of every bucket; raises `InvalidInput` where a hook of the script already decides."""
    rule = f"bytes can be divided by {byte_scale:g} only where DDP itself sends the gradients"
    problem = f"{rule}, but the script registered a communication hook; remove it, or use a byte scale of 1"
    if model._comm_hooks:
        raise InvalidInput(problem)
    try:
        model.register_comm_hook(
            ScaledReduction(model.process_group, byte_scale), scaled_all_reduce
        )
    except RuntimeError as error:  # a built-in hook is known to the reducer alone
        raise InvalidInput(problem) from error


def parts_of(tensors: Iterable[Tensor], byte_scale: float) -> list[Tensor]:
    """The first 1/k of every tensor, as views; a tensor that is not contiguous stays whole."""
    return [
        t.view(-1)[: travelling(t.numel(), byte_scale)]
        if byte_scale != 1 and t.is_contiguous()
        else t
        for t in tensors
    ]
