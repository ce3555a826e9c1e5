"""Hooks on parameters, which run after a gradient was accumulated."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils.hooks import RemovableHandle

OPTIMIZER_INSIDE = (
    "an optimizer runs inside the backward pass, before the gradients are synchronized; call its "
    "step() after the backward pass"
)


def optimizers_inside(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether torch's `_apply_optimizer_in_backward` has left hooks that update parameters."""
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters)


@contextmanager
def requiring_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let parameters that the script has frozen require gradients inside: torch accepts hooks on
    no others, and keeps those that it has."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad = True
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad = False


class GradientHooks:
    """Calls `on_gradient(position, parameter)` between `register` and `remove`."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], on_gradient: Callable[[int, Tensor], None]
    ) -> None:
        self._parameters, self._on_gradient = parameters, on_gradient
        self._handles: list[RemovableHandle] = []

    def __bool__(self) -> bool:
        """Whether the hooks are registered."""
        return bool(self._handles)

    def register(self) -> None:
        with requiring_gradients(self._parameters):
            self._handles = [
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, position))
                for position, parameter in enumerate(self._parameters)
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def come_last(self) -> None:
        """Move our hooks behind those that the script has registered since, which may change
        gradients: DDP, too, takes a gradient after them."""
        with DisableTorchFunctionSubclass():  # it reads no value that is under way
            for parameter, handle in zip(self._parameters, self._handles, strict=False):
                hooks: Any = parameter._post_accumulate_grad_hooks
                if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                    hooks[handle.id] = hooks.pop(handle.id)  # autograd follows their insertion
