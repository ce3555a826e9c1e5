"""Calls a function at the first forward pass of the model that trains: its outermost module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


class FirstForward:
    """Waits for the next forward pass with gradients of a module that trains.

    Such a module is in training mode and has trainable parameters. Transforms of images are modules
    in training mode, too, and are called before the model. A hook on all modules costs time at each
    call, so it is removed once it was called.
    """

    def __init__(self, function: Callable[[nn.Module], None]) -> None:
        self._function = function
        self._handle: Any = None

    def wait(self) -> None:
        """Call the function at the next such forward pass."""
        if self._handle is None:
            self._handle = register_module_forward_pre_hook(self._called)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _called(self, module: nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled() and trainable(module):
            self.stop()
            self._function(module)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the module that training changes."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@contextmanager
def first_forward(function: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call `function` with the module of the first such forward pass inside."""
    waiting = FirstForward(function)
    waiting.wait()
    try:
        yield
    finally:
        waiting.stop()
