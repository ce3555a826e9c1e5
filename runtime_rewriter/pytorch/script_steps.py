"""Learns from a script's first steps whether its updates can be deferred."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runtime_rewriter.pytorch.extensions import LoadedExtensions
from runtime_rewriter.pytorch.gradient_operations import GradientOperations, PlainOperations
from runtime_rewriter.pytorch.reads import can_watch, script_compiles, unwatch, watch
from runtime_rewriter.pytorch.updates import coupling_reason

LEARNING_STEPS = 2
"""Steps of the script's optimizers that are examined."""
READS_NORMS = (
    "gradients are scaled or their norms read between backward() and step(), as clipping by the "
    "global norm does, which couples all variables; only half of the exchange can cross the step "
    "then, and the plan does not say so (it was made for a script without norms)"
)


class _NotedOperations(PlainOperations):
    """Calls `done` after each operation with how often it has changed the values."""

    def __init__(self, gradient: Tensor, done: Callable[[int], None]) -> None:
        super().__init__(gradient)
        self._done = done

    def norm(self) -> Tensor:
        norm = super().norm()
        self._done(0)
        return norm

    def scale(self, factor: Tensor) -> None:
        before = self.version
        super().scale(factor)
        self._done(self.version - before)

    def unscale(self, found_inf: Tensor, inverse_scale: Tensor) -> None:
        before = self.version
        super().unscale(found_inf, inverse_scale)
        self._done(self.version - before)


class ScriptSteps:
    """Examines the gradients and optimizers of `parameters` in the first steps.

    `own_hooks`: ids of global step hooks that are harmless.
    """

    def __init__(self, parameters: Sequence[Parameter], own_hooks: Set[int]) -> None:
        self._parameters, self._own_hooks = parameters, own_hooks
        # Identity and version of each gradient at the end of the backward pass.
        self._final: list[tuple[int, int] | None] | None = None
        self._counted_together: dict[int, list[int]] = {}
        self._looked = False  # at a step after that backward pass
        self._watched: list[Tensor] = []
        self._was_read = False
        self._reading_steps = 0
        self._refusal: str | None = None
        self._told = False  # that it reads norms
        self._extensions = LoadedExtensions()
        self.seen = 0
        """Steps that were examined."""
        self.norms_are_reads = False
        """No plan can hold back results until the norms are known."""
        self.reads_norms = False
        """Whether it takes norms of gradients, or scales them, between the backward pass and
        `step()`."""

    @property
    def learning(self) -> bool:
        """Whether more steps must be examined; `gradients_final` must be called before them."""
        return self.seen < LEARNING_STEPS

    @property
    def looking(self) -> bool:
        return self._final is not None

    def refusal_reason(self, norms: bool) -> str | None:
        """Why this script's updates cannot be deferred, judged by its steps so far.

        `norms`: gradients under way can be scaled, and their norms are known.
        """
        if self._refusal is None and script_compiles():
            return "the script uses torch.compile, whose graphs read variables unseen"
        extension = self._extensions.unseen()
        if self._refusal is None and extension is not None:
            return f"the extension module {extension} may read variables unseen"
        if self._refusal is None and self.reads_norms and not norms:
            return READS_NORMS
        return self._refusal

    def gradients_final(self) -> None:
        """Call when the backward pass has ended and every `.grad` is final."""
        self.stop_looking()
        if self.learning:
            self._final = self._states()
            self._counted_together = _counted_together([p.grad for p in self._parameters])
            if not script_compiles():  # a compiled step() would specialize on our classes
                gradients = enumerate(p.grad for p in self._parameters)
                watchable = [(n, g) for n, g in gradients if g is not None and can_watch(g)]
                self._watched = [gradient for _, gradient in watchable]
                for position, gradient in watchable:
                    watch(gradient, self._on_read, self.operations(position, gradient))

    def operations(self, position: int, gradient: Tensor) -> GradientOperations | None:
        """Operations on a final gradient that are noted; None if they are reads."""
        if self.norms_are_reads:
            return None
        return _NotedOperations(gradient, partial(self._operated, position))

    def _operated(self, position: int, changes: int) -> None:
        self.reads_norms = True
        if self._final is None:
            return
        for other in self._counted_together.get(position, [position]):
            final = self._final[other]
            if final is not None:
                self._final[other] = (final[0], final[1] + changes)

    def stop_looking(self) -> None:
        """End the examination of the last backward pass."""
        self._unwatch()
        self._final, self._looked, self._was_read = None, False, False

    def look_at(
        self, optimizer: Optimizer, numbers: Mapping[int, int], closure: bool, norms: bool
    ) -> str | None:
        """Examine a step of `optimizer`, before it runs; return the reason to refuse once known.

        `numbers`: identity of each of its parameters -> parameter group. `norms`: see
        `refusal_reason`.
        """
        assert self._final is not None
        self._unwatch()
        if not self._looked:
            self._looked = True
            self.seen += 1
            self._reading_steps += self._was_read
        if self._refusal is not None:
            return None
        self._refusal = self._reason(optimizer, numbers, closure)
        if self._refusal is None and self.reads_norms and not (norms or self._told):
            self._told = True
            return READS_NORMS
        return self._refusal

    def _reason(
        self, optimizer: Optimizer, numbers: Mapping[int, int], closure: bool
    ) -> str | None:
        if closure:
            return "step() is given a closure"
        coupled = coupling_reason(optimizer, self._own_hooks)
        if coupled is not None:
            return coupled
        assert self._final is not None
        after = zip(self._parameters, self._final, self._states(), strict=True)
        if any(
            id(parameter) in numbers and now is not None and now != before
            for parameter, before, now in after
        ):
            if self.norms_are_reads:
                return (
                    "gradients are changed between backward() and step(), as clipping by the "
                    "global norm does, which couples all variables"
                )
            return (
                "gradients are changed between backward() and step(), other than by "
                "clip_grad_norm_ with a 2-norm or by GradScaler"
            )
        if self._reading_steps == LEARNING_STEPS:
            return (
                "gradients are read between backward() and step(), as logging does, which would "
                "wait for all of them"
            )
        return None

    def _on_read(self, _: Tensor) -> None:
        self._was_read = True

    def _unwatch(self) -> None:
        for gradient in self._watched:
            unwatch(gradient)
        self._watched = []

    def _states(self) -> list[tuple[int, int] | None]:
        gradients = (parameter.grad for parameter in self._parameters)
        return [
            None if gradient is None else (id(gradient), gradient._version)
            for gradient in gradients
        ]


def _counted_together(gradients: Sequence[Tensor | None]) -> dict[int, list[int]]:
    """Position of each view among the gradients -> the positions of all views of its base.

    They have one counter of versions. With `gradient_as_bucket_view` DDP's gradients are views of
    its buckets.
    """
    views_of: dict[int, list[int]] = {}
    for position, gradient in enumerate(gradients):
        if gradient is not None and gradient._is_view():
            views_of.setdefault(id(gradient._base), []).append(position)
    return {position: views for views in views_of.values() for position in views}
