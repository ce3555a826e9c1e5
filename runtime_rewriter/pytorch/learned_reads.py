"""Finds the variables whose reads in a forward pass are not detected.

A forward pass with every variable watched tells: a variable without a detected read, or one that a
module reads in a way that is not detected, must not wait for its update.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import Parameter

from runtime_rewriter.pytorch.reads import can_watch, is_watched, unwatch, watch
from runtime_rewriter.pytorch.unseen_calls import UnseenModules


class LearnedReads:
    """What one forward pass under a plan showed; nothing may be pending in it."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._position_of = {id(parameter): n for n, parameter in enumerate(parameters)}
        self.unseen: set[int] | None = None
        """Variables whose reads are not detected; None: not known yet."""
        self._unread: set[int] | None = None  # during the forward pass that finds it
        self._hidden: set[int] = set()  # also read in a way that is not detected
        self._modules = UnseenModules(self._position_of.keys(), self._hide)

    def begin(self, observable: bool) -> None:
        """Watch all variables; `observable`: the module itself computes, and is no emulation."""
        if not observable:
            self.unseen = set()
            return
        for position in self._unread or ():  # an earlier forward pass was interrupted
            unwatch(self._parameters[position])
        unread = {n for n, parameter in enumerate(self._parameters) if not is_watched(parameter)}
        self._unread = unread
        self._hidden.clear()
        self._modules.watch()
        for position in tuple(unread):
            if can_watch(self._parameters[position]):
                watch(self._parameters[position], partial(_mark_read, unread, position))

    def end(self) -> None:
        """Call at the end of every forward pass."""
        if self._unread is None:
            return
        for position in self._unread:
            unwatch(self._parameters[position])
        self.unseen, self._unread = self._unread | self._hidden, None
        self._modules.stop()

    def forget(self) -> None:
        """Find it anew, since what computes has changed."""
        self.unseen = None

    def _hide(self, module: nn.Module) -> None:
        identities = (id(parameter) for parameter in module.parameters())
        self._hidden.update(self._position_of[i] for i in identities if i in self._position_of)


def _mark_read(unread: set[int], position: int, _: Tensor) -> None:
    unread.discard(position)
