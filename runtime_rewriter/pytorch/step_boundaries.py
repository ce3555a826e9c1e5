"""The boundaries of a module's training steps."""

from __future__ import annotations

from collections.abc import Callable

from runtime_rewriter.pytorch.observers import Accelerator, StepListener


class StepBoundaries:
    """Calls the listeners at the boundaries and at the ends of backward passes.

    `listeners` may change between two calls.
    """

    def __init__(self, listeners: list[StepListener]) -> None:
        self._listeners = listeners
        self.due = False
        """Whether the next forward pass with gradients begins a step."""
        self._saw_training = self._saw_evaluation = self._unclean = False

    def forward_begins(
        self, training: bool, accelerator: Accelerator | None, now_s: Callable[[], float]
    ) -> None:
        """Pass the boundary, if one is due, before a forward pass with gradients.

        `training`: whether the module is in training mode.
        """
        if self.due:
            self.due = False
            if accelerator is not None:
                accelerator.before_boundary()
            clean = not (self._unclean or (self._saw_evaluation and self._saw_training))
            self._saw_training = self._saw_evaluation = self._unclean = False
            if self._listeners:
                boundary_s = now_s()
                for listener in tuple(self._listeners):
                    listener.on_boundary(boundary_s, clean)
        self._saw_training |= training
        self._saw_evaluation |= not training

    def mark_unclean(self) -> None:
        """Note that this step is not pure training."""
        self._unclean = True

    def backward_ended(self) -> None:
        """Every `.grad` of a synchronized backward pass is final, or crosses the step."""
        for listener in tuple(self._listeners):
            listener.on_backward_end()
