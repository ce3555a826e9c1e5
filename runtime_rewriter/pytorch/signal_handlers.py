"""Signal handlers of the script, while values are under way.

Python runs them in the main thread, between any two of its operations: also where reads are not
noticed. So everything is flushed before a handler runs. In the middle of a flush, or of another
change to what is under way, the handler would see a part of it: it runs once that has ended.
"""

from __future__ import annotations

# `signal` builds an enumeration of each number, which takes longer.
import _signal  # type: ignore[import-not-found]
import _thread
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from runtime_rewriter.pytorch.reads import READING, changing

_NUMBERS = tuple(int(number) for number in signal.valid_signals())


class SignalHandlers:
    """Calls `flush()` before a handler of the script runs, while watching.

    The handler waits while the main thread holds `lock()`, an `RLock`.
    """

    watching: list[SignalHandlers] = []
    _replaced: dict[int, _Flushing] = {}

    def __init__(self, flush: Callable[[], None], lock: Callable[[], Any]) -> None:
        self.flush, self.lock = flush, lock

    def watch(self) -> None:
        everyone = SignalHandlers.watching
        if self not in everyone:
            everyone.append(self)
        if not _in_main_thread():
            return  # a handler is a reader on another thread
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if callable(handler) and not isinstance(handler, _Flushing):
                SignalHandlers._replaced[number] = replacement = _Flushing(handler)
                _signal.signal(number, replacement)

    def stop(self) -> None:
        everyone = SignalHandlers.watching
        if self in everyone:
            everyone.remove(self)
        if SignalHandlers._replaced and not everyone and _in_main_thread():
            for number, replacement in SignalHandlers._replaced.items():
                if _signal.getsignal(number) is replacement:
                    _signal.signal(number, replacement.handler)
            SignalHandlers._replaced.clear()


class _Flushing:
    """A handler of the script behind a flush."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        watching = tuple(SignalHandlers.watching)
        locks = [READING, *(one.lock() for one in watching)]
        if changing() or any(lock._is_owned() for lock in locks):
            # Not of `threading`, in which this thread may have been interrupted.
            _thread.start_new_thread(_repeat, (number, locks))
            return
        for one in watching:
            one.flush()
        self.handler(number, frame)


def _repeat(number: int, locks: Sequence[Any]) -> None:
    """Let a signal arrive again once the main thread has released all locks."""
    for lock in locks:
        lock.acquire()
        lock.release()
    if callable(_signal.getsignal(number)):  # the script has not withdrawn its handler since
        os.kill(os.getpid(), number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
