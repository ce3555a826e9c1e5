"""Measures the share of a module's time that does not shrink with its batch.

It runs the passes over one batch, whole and cut to a half.

    t(b) = fixed + slope b          fixed share of t(b) = (t(c) / t(b) - c / b) / (1 - c / b)

| symbol | meaning | unit |
|---|---|---|
| b, c | samples of the batch, and of the part of it | - |
| t | time of one forward or backward pass; on a CPU that of the thread, without other work | s |
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from autotune.recordings.memory_profile import FixedShare
from runtime_rewriter.pytorch.exchange.device import Device

ROUNDS = 3


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module in a training step."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def part(self, samples: int, batch: int) -> ModuleCall:
        """The first samples of every tensor whose leading dimension is `batch`."""

        def cut(leaf: Any) -> Any:
            is_batch = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch
            return leaf[:samples] if is_batch else leaf

        return ModuleCall(tree_map(cut, self.arguments), tree_map(cut, self.options))


def fixed_share(module: nn.Module, call: ModuleCall, batch: int) -> FixedShare:
    """Measure between two steps; parameters, gradients, buffers and random state stay unchanged.

    Raises the module's own error if it cannot compute half of the batch.
    """
    half = batch // 2
    whole_s, half_s = [], []
    with _unchanged(module):
        for _ in range(ROUNDS + 1):
            whole_s.append(_pass_seconds(module, call))
            half_s.append(_pass_seconds(module, call.part(half, batch)))
    # of both passes, without the first round
    ratio = np.median(half_s[1:], axis=0) / np.maximum(np.median(whole_s[1:], axis=0), 1e-9)
    share = np.clip((ratio - half / batch) / (1 - half / batch), 0.0, 1.0)
    return FixedShare(*share.tolist())


def _pass_seconds(module: nn.Module, call: ModuleCall) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""
    variables = [parameter for parameter in module.parameters() if parameter.requires_grad]
    device = Device(variables[0].device)
    now_s = time.thread_time if device.device.type == "cpu" else device.now_s
    began_s = now_s()
    with torch.enable_grad():
        # `forward` runs no hooks: a synchronizer's may be among them
        output = module.forward(*call.arguments, **call.options)
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if leaf.requires_grad]
    returned_s = now_s()
    ones = [torch.ones_like(tensor) for tensor in tensors]
    torch.autograd.grad(tensors, variables, ones, allow_unused=True)
    return returned_s - began_s, now_s() - returned_s


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore buffers and random state at the end."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = [parameter.device for parameter in module.parameters()]
    cuda = [device for device in devices if device.type == "cuda"][:1]
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
