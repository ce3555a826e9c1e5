"""Calls into libraries that may block forever: each on its own thread, with a deadline."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

T = TypeVar("T")
SLICE_S = 1.0
"""A caller waits in slices, so that a pause of the process ends one of them, not the deadline."""
_THREAD = "call with a deadline"


class Overdue(Exception):
    """The call has not returned by its deadline, and is left behind."""


class Call(Generic[T]):
    """`function` on a daemon thread, which ends with the process at the latest.

    `until`: after a result, the thread stays until this is set, as processes that it started may
    end with it.
    """

    def __init__(self, function: Callable[[], T], until: threading.Event | None = None) -> None:
        self._function = function
        self._until = until
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._returned = threading.Event()
        threading.Thread(target=self._run, name=_THREAD, daemon=True).start()

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self._error = error
        self._returned.set()
        if self._until is not None and self._error is None:
            self._until.wait()

    @property
    def running(self) -> bool:
        return not self._returned.is_set()

    def result(self, seconds: float) -> T:
        """The result of the function, or its exception; raises `Overdue` after `seconds`.

        Signal handlers run while the caller waits, whatever the function does. A pause of the
        process (Ctrl-Z) counts as one second: whoever answers the call was not heard meanwhile.
        """
        left_s = seconds
        while not self._returned.wait(min(left_s, SLICE_S)):
            left_s -= SLICE_S
            if left_s <= 0:
                raise Overdue
        if self._error is not None:
            raise self._error
        return self._results[0]


class AwakeClock:
    """Seconds since it was made, in which a pause of this process (Ctrl-Z) takes no time.

    `elapsed_s` of the system's clock; more than `longest_s` between two readings was a pause.
    """

    def __init__(self, longest_s: float, elapsed_s: Callable[[], float] = time.monotonic) -> None:
        self._longest_s = longest_s
        self._elapsed_s = elapsed_s
        self._read_s = elapsed_s()
        self._awake_s = 0.0

    def now_s(self) -> float:
        read_s = self._elapsed_s()
        self._awake_s += min(read_s - self._read_s, self._longest_s)
        self._read_s = read_s
        return self._awake_s


def within(seconds: float, function: Callable[[], T]) -> T:
    """Call `function`; raises `Overdue` if it has not returned after `seconds`."""
    return Call(function).result(seconds)


def end_process(status: int) -> NoReturn:
    """Exit with `status`.

    With a call left behind, the interpreter's shutdown is left out: it destroys what the call's
    compiled code uses, which crashes the process.
    """
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
