"""Autocast around forward pass and loss, as the line `with torch.autocast(...)` has them."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autotune.errors import InvalidInput
from runtime_rewriter.changes.forward import FirstForward, trainable


@contextmanager
def autocast_forward(entered: Callable[[], None]) -> Iterator[None]:
    """Enter bf16 autocast at each forward pass of the model that trains; leave at `backward()`.

    `entered` is called at each entry. Raises `InvalidInput` in the script if it uses autocast
    itself.
    """
    active: Any = None

    def enter(module: nn.Module) -> None:
        nonlocal active
        device = trainable(module)[0].device.type
        if torch.is_autocast_enabled(device):
            raise InvalidInput(
                "amp puts the forward pass under torch.autocast, but the script does so itself; "
                "compare another change"
            )
        active = torch.autocast(device, dtype=torch.bfloat16)
        active.__enter__()
        entered()

    forward = FirstForward(enter)
    backward = torch.autograd.backward

    def leave_and_go_back(*values: Any, **options: Any) -> Any:
        nonlocal active
        if active is not None:
            active.__exit__(None, None, None)
            active = None
        try:
            return backward(*values, **options)
        finally:
            forward.wait()

    torch.autograd.backward = leave_and_go_back  # `Tensor.backward` looks it up here
    forward.wait()
    try:
        yield
    finally:
        torch.autograd.backward = backward
        forward.stop()
        if active is not None:
            active.__exit__(None, None, None)
