"""How much of a module's time does not shrink with its batch: its passes over one batch, whole and cut to a half.

    t(b) = fixed + slope b          fixed share of t(b) = (t(c) / t(b) - c / b) / (1 - c / b)

| symbol | meaning | unit |
|---|---|---|
| b, c | samples of the batch, and of the part of it | - |
| t | time of one forward, or of one backward, pass; on a CPU that of the thread, which nobody else's work makes longer | s |
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from autotune.recordings.memory_profile import FixedShare
from runtime_rewriter.pytorch.exchange.device import Device

ROUNDS = 3


@dataclass(frozen=True)
class Call:
    """One call of a module in a training step."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def part(self, samples: int, of: int) -> Call:
        """With the first samples of everything whose leading dimension is the batch's."""

        def cut(leaf: Any) -> Any:
            return (
                leaf[:samples]
                if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == of
                else leaf
            )

        return Call(tree_map(cut, self.arguments), tree_map(cut, self.options))


def fixed_share(module: nn.Module, call: Call, batch: int) -> FixedShare:
    """Measured between two steps; parameters, gradients, buffers and random numbers are as before.

    Raises whatever the module raises where it cannot compute half of the batch.
    """
    half = batch // 2
    whole: list[tuple[float, float]] = []
    part: list[tuple[float, float]] = []
    with _unchanged(module):
        for _ in range(ROUNDS + 1):
            whole.append(_seconds(module, call))
            part.append(_seconds(module, call.part(half, batch)))
    shares = []
    for number in range(2):
        ratio = median(taken[number] for taken in part[1:]) / max(
            median(taken[number] for taken in whole[1:]), 1e-9
        )
        shares.append(min(1.0, max(0.0, (ratio - half / batch) / (1 - half / batch))))
    return FixedShare(*shares)


def _seconds(module: nn.Module, call: Call) -> tuple[float, float]:
    """Of the forward and of the backward pass."""
    variables = [parameter for parameter in module.parameters() if parameter.requires_grad]
    device = Device(variables[0].device)
    now_s = time.thread_time if device.device.type == "cpu" else device.now_s
    began_s = now_s()
    with torch.enable_grad():
        output = module.forward(
            *call.arguments, **call.options
        )  # without hooks of its own: a synchronizer's may be among them
    tensors = [
        leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    returned_s = now_s()
    torch.autograd.grad(
        tensors, variables, [torch.ones_like(tensor) for tensor in tensors], allow_unused=True
    )
    return returned_s - began_s, now_s() - returned_s


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Buffers and random numbers are put back."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    cuda = [
        parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"
    ][:1]
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
