"""The inside of a backward pass that torch's reducer synchronizes, told to observers as that of any
planned pass.

While somebody observes, every parameter has a hook. It runs when the gradient has been accumulated
and before the reducer, whose own hooks come after the accumulating node, so observers see the local
gradient and the reducer is the one that trains.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runtime_rewriter.pytorch.native_buckets import BucketReducer
from runtime_rewriter.pytorch.observers import BackwardObserver


class ObservedPass:
    """Tells `observers`. `on_gradient(position, parameter)` is called by the hooks and leads to
    `ready` in a synchronized pass."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        observers: list[BackwardObserver],
        on_gradient: Callable[[int, Tensor], None],
    ) -> None:
        self._names, self._parameters, self._observers, self._on_gradient = (
            names,
            parameters,
            observers,
            on_gradient,
        )
        self._handles: list[RemovableHandle] = []
        self._told: set[int] = set()  # positions of this pass whose gradient observers have seen
        self._began = self._accumulated = False

    def prepare(self) -> None:
        """After a forward pass whose backward pass will be synchronized."""
        if self._observers and not self._handles:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, position))
                for position, parameter in enumerate(self._parameters)
            ]
        elif not self._observers:
            self.close()

    def begin(self, unreachable: Sequence[int]) -> None:
        """`unreachable`: positions that this pass is known to leave out. The reducer takes their
        gradients first."""
        self._began, self._accumulated, self._told = bool(self._handles), False, set()
        if not self._began:
            return
        for observer in tuple(self._observers):
            observer.on_backward_start()
        for position in unreachable:
            self._tell(position)

    def ready(self, position: int) -> None:
        if self._began:
            self._accumulated = True
            self._tell(position)

    def computed(self) -> None:
        """The pass has ended and the reducer has not yet written its averages."""
        if not (self._began and self._accumulated):
            return
        for position in range(len(self._parameters)):
            if position not in self._told:
                self._tell(position)
        for observer in tuple(self._observers):
            observer.on_computed()

    def ended(self, reducer: BucketReducer) -> None:
        """The reducer has written its averages, if every variable that it waits for took part."""
        if self._began and self._accumulated and reducer.finished:
            unused = reducer.unused()
            kept = frozenset(
                position for position, name in enumerate(self._names) if name in unused
            )
            for observer in tuple(self._observers):
                observer.on_synchronized(kept)
        self._began = False

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _tell(self, position: int) -> None:
        self._told.add(position)
        for observer in tuple(self._observers):
            observer.on_ready(position, self._parameters[position].grad)
