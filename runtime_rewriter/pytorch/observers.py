"""Who may watch a module's training steps, and the inside of its backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor


class StepListener(Protocol):
    """Told about the steps of a module; one step is the time from one boundary to the next.

    `on_boundary` comes at the start of the first forward pass with gradients after a synchronized backward
    pass, before anything else happens in it: another plan may be loaded there, or an exception raised.
    `clean` is False if the step also held forward passes that are no training (validation), or if it ran
    under `join()`; such a step must not be timed.  `on_backward_end`: every `.grad` is final; on a GPU, when what is queued is done.
    """

    def on_boundary(self, now_s: float, clean: bool) -> None: ...

    def on_backward_end(self) -> None: ...


class Accelerator(StepListener, Protocol):
    """Takes the place of what the module computes.

    `before_boundary` comes at the end of every step, before its time is taken and the listeners hear of it; `run` stands for
    `compute(*inputs, **kwargs)` in every forward pass with gradients.
    """

    def before_boundary(self) -> None: ...

    def run(
        self, compute: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class BackwardObserver:
    """Sees the inside of a planned, synchronized backward pass; every method may be overridden."""

    def on_forward_start(self) -> None:
        """The module begins to compute; what is sent before a forward pass has been sent."""

    def on_forward_output(self, tensors: list[Tensor]) -> None:
        """The output tensors of a forward pass whose backward pass will be synchronized."""

    def on_backward_start(self) -> None:
        """The first gradient of the backward pass is being computed."""

    def on_ready(self, index: int, gradient: Tensor | None) -> None:
        """A local gradient is final, not scaled and not synchronized; None: unused here and nothing accumulated."""

    def on_computed(self) -> None:
        """All local gradients are final; messages may still be under way."""

    def on_synchronized(self, kept: frozenset[int]) -> None:
        """Every `.grad` holds the average, except the variables in `kept`, which no rank used."""
