"""Byte scaling of torch's own DDP: 1/k of every bucket and of every buffer travels.

For links whose rates were divided by k. Elements that do not travel keep this rank's own values, so
ranks drift apart. Such training measures time and nothing else.
"""

# mypy: allow-untyped-calls, no-warn-return-any

# Annotations are not deferred here: DDP compares those of a communication hook with its own
# classes.

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
    """Average the first part of the bucket as DDP does: divide by the world size, then sum."""
    whole = bucket.buffer().div_(state.group.size())
    if whole.is_sparse:
        return _sparse_all_reduce(whole.coalesce(), state)
    part = whole[: travelling(whole.numel(), state.byte_scale)]
    work = dist.all_reduce(part, group=state.group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: whole)


def _sparse_all_reduce(whole: Tensor, state: ScaledReduction) -> torch.futures.Future[torch.Tensor]:
    """Sum the first rows of each rank; the sum holds the rows that any rank sent."""
    rows = travelling(whole._nnz(), state.byte_scale)
    part = torch.sparse_coo_tensor(
        whole.indices()[:, :rows], whole.values()[:rows], whole.shape, check_invariants=False
    )
    work = dist.all_reduce(part, group=state.group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def scale_reducer(model: DistributedDataParallel, byte_scale: float) -> None:
    """Make DDP's own reducer send 1/`byte_scale` of every bucket.

    Raises `InvalidInput` if the script registered a communication hook.
    """
    problem = (
        f"bytes can be divided by {byte_scale:g} only if DDP itself sends the gradients, but the "
        "script registered a communication hook; remove it, or use a byte scale of 1"
    )
    if model._comm_hooks:
        raise InvalidInput(problem)
    state = ScaledReduction(model.process_group, byte_scale)
    try:
        model.register_comm_hook(state, scaled_all_reduce)
    except RuntimeError as error:  # only the reducer knows a built-in hook
        raise InvalidInput(problem) from error


def is_byte_scale(hook_state: object) -> bool:
    """Whether a DDP's communication hook with this state is ours and not the script's."""
    return isinstance(hook_state, ScaledReduction)


def parts_of(tensors: Iterable[Tensor], byte_scale: float) -> list[Tensor]:
    """The first 1/k of every tensor, as views; a tensor that is not contiguous stays whole."""
    return [
        t.view(-1)[: travelling(t.numel(), byte_scale)]
        if byte_scale != 1 and t.is_contiguous()
        else t
        for t in tensors
    ]
