"""One module under torch's DDP and under ours, and a comparison of their tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runtime_rewriter.pytorch.ddp import PlannedDataParallel


def pair(
    module: nn.Module, **arguments: Any
) -> tuple[DistributedDataParallel, PlannedDataParallel]:
    """The same module under torch's DDP and under ours."""
    return DistributedDataParallel(copy.deepcopy(module), **arguments), PlannedDataParallel(
        module, **arguments
    )


def assert_close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    """Bitwise on 2 ranks; on more the sums may be ordered differently: 1e-5 of the largest value,
    float32."""
    for a, b in zip((t.detach() for t in mine), (t.detach() for t in theirs), strict=True):
        if dist.get_world_size() == 2:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().amax() + 1e-3))


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
