"""Interfaces to a module's training steps and to the inside of its backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor


class StepListener(Protocol):
    """Follows the steps of a module; a step lasts from one boundary to the next.

    `on_boundary` is called at the start of the first forward pass with gradients after a
    synchronized backward pass, before anything else. It may load another plan or raise. `clean` is
    False if the step also had forward passes for validation, or ran under `join()`; do not time
    such a step. `on_backward_end` is called when every `.grad` is final; on a GPU, once the queued
    work is done.
    """

    def on_boundary(self, now_s: float, clean: bool) -> None: ...

    def on_backward_end(self) -> None: ...


class Accelerator(StepListener, Protocol):
    """Replaces the module's computation.

    `before_boundary` is called at the end of every step, before its time is taken and listeners
    are called. `run` replaces `compute(*inputs, **kwargs)` in every forward pass with gradients.
    `before_wait` is called with variables whose messages a read is about to wait for.
    """

    def before_boundary(self) -> None: ...

    def before_wait(self, positions: Sequence[int]) -> None: ...

    def run(
        self, compute: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class BackwardObserver:
    """Sees the inside of a planned, synchronized backward pass; every method may be overridden."""

    def on_forward_start(self) -> None:
        """The module begins to compute; its buffers have been sent."""

    def on_forward_output(self, tensors: list[Tensor]) -> None:
        """The output tensors of a forward pass whose backward pass will be synchronized."""

    def on_backward_start(self) -> None:
        """The first gradient of the backward pass is being computed."""

    def on_ready(self, index: int, gradient: Tensor | None) -> None:
        """A local gradient is final, not scaled and not synchronized. None: unused here."""

    def on_computed(self) -> None:
        """All local gradients are final; messages may still be under way."""

    def on_synchronized(self, unused: frozenset[int]) -> None:
        """Every `.grad` holds the average, except the variables in `unused`, which no rank used."""
