"""Follows a backward pass that torch itself synchronizes, and reports its inside to observers.

While there are observers of a pass under our plan, every parameter has a hook. It runs after the
gradient was accumulated and before the reducer's own hooks, so observers see the local gradient.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from runtime_rewriter.pytorch.gradient_hooks import GradientHooks
from runtime_rewriter.pytorch.native_buckets import BucketReducer
from runtime_rewriter.pytorch.observers import BackwardObserver


class ObservedPass:
    """A pass that `reducer` synchronizes, or the module's own code without a plan.

    `ends_matter` returns whether anyone needs to know when it has ended. The hooks call
    `on_gradient(position, parameter)`, which calls `ready` in a synchronized pass. `on_end` runs
    when torch has written its averages, and calls `finish`.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        observers: list[BackwardObserver],
        *,
        ends_matter: Callable[[], bool],
        on_gradient: Callable[[int, Tensor], None],
        on_end: Callable[[], None],
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._observers = observers
        self._ends_matter, self._on_end = ends_matter, on_end
        self._hooks = GradientHooks(parameters, on_gradient)
        self._versions: list[int | None] = []  # of the gradients as the pass began
        self._reported: set[int] = set()  # positions that observers have seen in this pass
        self._began = self._accumulated = False
        self.reducer: BucketReducer | None = None
        """torch's reducer, if it executes the plan."""
        self.waits = False
        """Whether the reducer waits for its messages."""

    def prepare(self) -> None:
        """Call after a forward pass whose backward pass will be synchronized."""
        if self.reducer is None:
            return
        if self._observers and not self._hooks:
            self._hooks.register()
        elif not self._observers:
            self._hooks.remove()

    def begin(self, reachable: Collection[int]) -> None:
        """Call when the first gradient is being computed.

        `reachable`: positions of the variables that this pass can reach; empty if unknown.
        """
        self._versions = self._gradient_versions() if self._ends_matter() else []
        if self.reducer is not None and self._observers:
            everything = range(len(self._names)) if reachable else ()
            self._begin_report([i for i in everything if i not in reachable])
        torch.autograd.Variable._execution_engine.queue_callback(self._computed)

    def _begin_report(self, unreachable: Sequence[int]) -> None:
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

    def _computed(self) -> None:
        """Run when torch's backward pass has ended, before its reducer waits for its messages."""
        with torch.no_grad():
            self._report_computed()
        self.waits = True
        # DDP queues its own end during the pass; a callback queued from here runs after it.
        torch.autograd.Variable._execution_engine.queue_callback(self._on_end)

    def _report_computed(self) -> None:
        if not (self._began and self._accumulated):
            return
        for position in range(len(self._parameters)):
            if position not in self._reported:
                self._report(position)
        for observer in tuple(self._observers):
            observer.on_computed()

    def finish(self) -> bool:
        """End the pass. Returns whether gradients were accumulated, if `ends_matter`.

        torch.autograd.grad computes gradients without accumulating them.
        """
        self.waits = False
        if self.reducer is not None:
            with torch.no_grad():
                self._report_end(self.reducer)
        return self._ends_matter() and self._gradient_versions() != self._versions

    def _report_end(self, reducer: BucketReducer) -> None:
        """Report the averages of `reducer`, if every variable took part."""
        if self._began and self._accumulated and reducer.finished:
            unused = reducer.unused()
            unused_numbers = frozenset(n for n, name in enumerate(self._names) if name in unused)
            for observer in tuple(self._observers):
                observer.on_synchronized(unused_numbers)
        self._began = False

    def close(self) -> None:
        """Follow `reducer` no longer."""
        self._hooks.remove()
        self.reducer = None

    def _report(self, position: int) -> None:
        self._reported.add(position)
        for observer in tuple(self._observers):
            observer.on_ready(position, self._parameters[position].grad)

    def _gradient_versions(self) -> list[int | None]:
        return [None if p.grad is None else p.grad._version for p in self._parameters]
