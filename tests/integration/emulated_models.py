"""Emulated accelerators with an invented profile, and a module that counts its real passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from autotune.workload import Workload
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.emulation import EmulatedAccelerator
from runtime_rewriter.pytorch.hooks import GradientSynchronizer


def profile_of(
    module: nn.Module, forward_s: float = 0.0, backward_s: float = 1e-4, update_s: float = 0.0
) -> Workload:
    """Gradients in definition order (the reverse of a real pass), evenly over the backward pass."""
    assumed = assumed_workload(module)
    count = len(assumed.variables)
    ordered = enumerate(reversed(assumed.variables), start=1)
    timed = tuple(replace(v, ready_s=backward_s * i / (count + 1)) for i, v in ordered)
    return replace(
        assumed, variables=timed, forward_s=forward_s, backward_s=backward_s, update_s=update_s
    )


def emulated(synchronizer: GradientSynchronizer, **times: float) -> EmulatedAccelerator:
    timetable = timetable_of(profile_of(synchronizer.module, **times))
    accelerator = EmulatedAccelerator(synchronizer, timetable)
    synchronizer.emulate(accelerator)
    return accelerator


class Forbidden(nn.Module):
    """Computes until it is forbidden."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.computed = inner, 0

    def forward(self, *inputs: Any) -> Any:
        self.computed += 1
        return self.inner(*inputs)
