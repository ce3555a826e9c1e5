"""One module under torch's DDP and under ours, and a comparison of their tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runtime_rewriter.pytorch.ddp import PlannedDataParallel

HOOKED: list[int] = []
"""The buckets that `average_hook` has averaged."""


def pair(module: nn.Module, **options: Any) -> tuple[DistributedDataParallel, PlannedDataParallel]:
    """The same module under torch's DDP and under ours."""
    theirs = DistributedDataParallel(copy.deepcopy(module), **options)
    return theirs, PlannedDataParallel(module, **options)


def assert_close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    """Bitwise on 2 ranks; on more, sums may be ordered differently: 1e-5 of the largest float32."""
    for a, b in zip((t.detach() for t in mine), (t.detach() for t in theirs), strict=True):
        if dist.get_world_size() == 2:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().amax() + 1e-3))


def assert_same_state(mine: nn.Module, theirs: nn.Module) -> None:
    """`assert_close` for all parameters and buffers."""
    assert_close(list(mine.parameters()), list(theirs.parameters()))
    assert_close([b.float() for b in mine.buffers()], [b.float() for b in theirs.buffers()])


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def average_hook(state: None, bucket: dist.GradBucket) -> Any:
    """A script's own communication hook."""
    HOOKED.append(bucket.index())
    bucket.buffer().div_(dist.get_world_size())
    return sum_hook(state, bucket)


def sum_hook(state: None, bucket: dist.GradBucket) -> Any:
    """A communication hook that returns the sum instead of the average."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


for _hook in (average_hook, sum_hook):  # DDP reads the annotations
    _hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
