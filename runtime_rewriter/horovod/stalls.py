"""Ends waits for Horovod's operations that another rank never joins.

Horovod 0.28.1 has a limit, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, which it ignores over gloo. The
inspector (`StallInspector::CheckForStalledTensors`) looks for missing ranks among the controller's
`global_ranks_`. `GlooController::DoInitialization` fills that vector after `reserve` only, so its
size stays zero and no rank is ever missing. This module keeps the limit instead.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from autotune.errors import SynchronizationError

STALL_DISABLED = "HOROVOD_STALL_CHECK_DISABLE"
STALL_WARNING = "HOROVOD_STALL_CHECK_TIME_SECONDS"
STALL_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_LOOKS_PER_LIMIT = 20
_NEARLY = 0.9
"""Share of the limit after which a wait that fails was stalled, too: ranks that began to wait a
little earlier shut Horovod down for all."""


def stall_limit_s(environment: Mapping[str, str]) -> float | None:
    """The longest wait for another rank, as Horovod documents its variables; None: no limit."""
    if _seconds(environment, STALL_DISABLED) > 0:
        return None
    limit_s = _seconds(environment, STALL_SHUTDOWN)
    return limit_s if limit_s > 0 else None


def set_stall_limit(limit_s: float) -> None:
    """Set Horovod's variables to a limit, unless the user has set one."""
    os.environ.setdefault(STALL_SHUTDOWN, str(int(limit_s)))
    warning_s = (stall_limit_s(os.environ) or limit_s) / 2  # Horovod wants it below the limit
    os.environ.setdefault(STALL_WARNING, str(max(1, int(warning_s))))


def _seconds(environment: Mapping[str, str], name: str) -> float:
    text = environment.get(name, "").strip()
    return float(text) if text.isdecimal() else 0.0


class StallWatch:
    """Shuts Horovod down if a thread waits for one of its operations for longer than the limit.

    Horovod's background threads agree on the shutdown, also with the rank that stalls, and every
    operation under way fails. A process that was stopped answers no longer; then gloo's own
    timeout ends the wait (HOROVOD_GLOO_TIMEOUT_SECONDS, 30 s by default).
    """

    def __init__(self, shutdown: Callable[[], object]) -> None:
        self._shutdown = shutdown
        self._begun_s: dict[int, float] = {}  # of each waiting thread
        self._thread: threading.Thread | None = None
        self._stalled = False
        self._unlimited = 0  # calls under way
        self.limit_s: float | None = None
        """Seconds; None: waits are not limited."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Limit the wait inside; raises `SynchronizationError` if it took too long."""
        if self.limit_s is None or self._unlimited:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="horovod-stalls", daemon=True)
            self._thread.start()
        caller = threading.get_ident()
        self._begun_s[caller] = begun_s = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not self._stalled and time.monotonic() - begun_s < _NEARLY * self.limit_s:
                raise
            raise SynchronizationError(
                f"every rank must take part in each operation of Horovod within {self.limit_s:g} "
                "s, but one did not; see why in the other ranks' logs, or give more time by "
                f"{STALL_SHUTDOWN}"
            ) from TimeoutError(f"timed out: {error}")
        finally:
            self._begun_s.pop(caller, None)

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Leave waits inside alone: `hvd.join()` waits for the other ranks' remaining steps."""
        self._unlimited += 1
        try:
            yield
        finally:
            self._unlimited -= 1

    def _watch(self) -> None:
        while not self._stalled:
            limit_s = self.limit_s or float("inf")
            time.sleep(min(limit_s / _LOOKS_PER_LIMIT, 1.0))
            longest_s = time.monotonic() - min(list(self._begun_s.values()), default=float("inf"))
            self._stalled = longest_s > limit_s
        self._shutdown()
