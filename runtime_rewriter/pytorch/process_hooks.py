"""Hooks of this process: around every optimizer's step, before forks and the end of process groups,
and at its end."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import os
import sys
import threading
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from runtime_rewriter.pytorch.addresses import note_addresses
from runtime_rewriter.pytorch.reads import notice_arguments


class Deferring(Protocol):
    """Defers updates of a script's optimizers."""

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None: ...
    def after_step(self, optimizer: Optimizer) -> None: ...
    def flush(self) -> None:
        """Apply all updates that are due."""

    def has_due(self, optimizer: Optimizer) -> bool:
        """Whether updates of `optimizer` are due."""

    def forget(self) -> None:
        """Drop them, in a forked process."""


_PRESENT: WeakSet[Deferring] = WeakSet()
OWN_HOOKS: set[int] = set()
"""Ids of our step hooks."""


def register(cross_step: Deferring) -> None:
    """Report every step of every optimizer to `cross_step`, by torch's process-wide hooks."""
    _PRESENT.add(cross_step)
    note_addresses()
    notice_arguments()
    if not OWN_HOOKS:
        # Before the interpreter stops the threads of lanes, on which other ranks wait.
        threading._register_atexit(flush_all_synchronizers)  # type: ignore[attr-defined]
        os.register_at_fork(before=flush_all_synchronizers, after_in_child=_forget_all)
        OWN_HOOKS.add(register_optimizer_step_pre_hook(_before_any_step).id)
        OWN_HOOKS.add(register_optimizer_step_post_hook(_after_any_step).id)
    _flush_before_groups_end()


def unregister(cross_step: Deferring) -> None:
    _PRESENT.discard(cross_step)


def _flush_before_groups_end() -> None:
    """Flush before `destroy_process_group`: messages that cross the last step need the groups.

    Also where a module of the script has imported the function by name.
    """
    destroy = dist.destroy_process_group
    if hasattr(destroy, "flushes"):
        return

    @wraps(destroy)
    def flush_and_destroy(*args: Any, **kwargs: Any) -> None:
        flush_all_synchronizers()
        destroy(*args, **kwargs)

    flush_and_destroy.flushes = True  # type: ignore[attr-defined]
    for module in tuple(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is destroy:
                setattr(module, name, flush_and_destroy)


def flush_all_synchronizers() -> None:
    """Flush every synchronizer in this process."""
    for present in tuple(_PRESENT):
        present.flush()


def updates_are_due(optimizer: Optimizer) -> bool:
    """Whether any synchronizer in this process has updates of `optimizer` that are due."""
    return any(present.has_due(optimizer) for present in tuple(_PRESENT))


def _forget_all() -> None:
    for present in tuple(_PRESENT):
        present.forget()


def _before_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for present in tuple(_PRESENT):
        present.before_step(optimizer, args, kwargs)


def _after_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for present in tuple(_PRESENT):
        present.after_step(optimizer)
