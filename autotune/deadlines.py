"""Calls into libraries that may block forever: each on its own thread, with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Overdue(Exception):
    """The call has not returned by its deadline, and is left behind."""


class Call(Generic[T]):
    """`function` on a daemon thread, which ends with the process at the latest."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self, seconds: float) -> T:
        """The result of the function, or its exception; raises `Overdue` after `seconds`.

        Signal handlers run while the caller waits, whatever the function does.
        """
        self._thread.join(seconds if seconds < threading.TIMEOUT_MAX else None)
        if self._thread.is_alive():
            raise Overdue
        if self._error is not None:
            raise self._error
        return self._results[0]


def within(seconds: float, function: Callable[[], T]) -> T:
    """Call `function`; raises `Overdue` if it has not returned after `seconds`."""
    return Call(function).result(seconds)
