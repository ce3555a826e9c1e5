"""The session of this process, for `autotune.apply` inside a launched script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from runtime_rewriter.pytorch.exchange.ranks import Timeouts
from runtime_rewriter.pytorch.hooks import GradientSynchronizer


class Session(Protocol):
    """Steers the models that a launched script builds."""

    @property
    def timeouts(self) -> Timeouts:
        """Timeouts between the ranks of these models."""

    def model_built(self, synchronizer: GradientSynchronizer) -> None:
        """Take a wrapped model, before its first step."""


_active: ContextVar[Session | None] = ContextVar("autotune_session", default=None)


@contextmanager
def active_session(session: Session) -> Iterator[None]:
    """Let `session` steer the models built inside; the previous one is always restored."""
    token = _active.set(session)
    try:
        yield
    finally:
        _active.reset(token)


def current_session() -> Session | None:
    """The launched process's session, or None in an ordinary process."""
    return _active.get()
