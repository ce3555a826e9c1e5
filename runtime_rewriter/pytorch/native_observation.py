"""Reports the inside of a backward pass that torch's reducer synchronizes to observers.

While there are observers, every parameter has a hook. It runs after the gradient was accumulated
and before the reducer's own hooks, so observers see the local gradient.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from runtime_rewriter.pytorch.gradient_hooks import GradientHooks
from runtime_rewriter.pytorch.native_buckets import BucketReducer
from runtime_rewriter.pytorch.observers import BackwardObserver


class ObservedPass:
    """Calls `observers`. The hooks call `on_gradient(position, parameter)`, which calls `ready` in
    a synchronized pass."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        observers: list[BackwardObserver],
        on_gradient: Callable[[int, Tensor], None],
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._observers = observers
        self._hooks = GradientHooks(parameters, on_gradient)
        self._reported: set[int] = set()  # positions that observers have seen in this pass
        self._began = self._accumulated = False

    def prepare(self) -> None:
        """Call after a forward pass whose backward pass will be synchronized."""
        if self._observers and not self._hooks:
            self._hooks.register()
        elif not self._observers:
            self.close()

    def begin(self, unreachable: Sequence[int]) -> None:
        """`unreachable`: positions known to get no gradient. The reducer takes them first."""
        self._began = bool(self._hooks)
        self._accumulated = False
        self._reported = set()
        if not self._began:
            return
        for observer in tuple(self._observers):
            observer.on_backward_start()
        for position in unreachable:
            self._report(position)

    def ready(self, position: int) -> None:
        if self._began:
            self._accumulated = True
            self._report(position)

    def computed(self) -> None:
        """Call when the pass has ended and the reducer has not yet written its averages."""
        if not (self._began and self._accumulated):
            return
        for position in range(len(self._parameters)):
            if position not in self._reported:
                self._report(position)
        for observer in tuple(self._observers):
            observer.on_computed()

    def ended(self, reducer: BucketReducer) -> None:
        """Call when the reducer has written its averages, if every variable took part."""
        if self._began and self._accumulated and reducer.finished:
            unused = reducer.unused()
            unused_numbers = frozenset(n for n, name in enumerate(self._names) if name in unused)
            for observer in tuple(self._observers):
                observer.on_synchronized(unused_numbers)
        self._began = False

    def close(self) -> None:
        self._hooks.remove()

    def _report(self, position: int) -> None:
        self._reported.add(position)
        for observer in tuple(self._observers):
            observer.on_ready(position, self._parameters[position].grad)
