"""Progress of a known number of items on stderr, with the time left."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape

QUIET_S = 5.0
"""Without a terminal, a line is printed when this time has passed since the last one."""


class CountedProgress:
    """A terminal shows the current item below; elsewhere a line appears now and then.

    with CountedProgress(Terminal(), "what-if", 20) as progress:
        progress.begin("amp")
    """

    def __init__(self, console: Console, noun: str, total: int) -> None:
        self._console, self._noun, self._total = console, noun, total
        self._status = console.status("", spinner="dots")
        self._began_s = self._printed_s = time.monotonic()
        self._done = -1

    def __enter__(self) -> CountedProgress:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def begin(self, item: str) -> None:
        """The next item begins; the one before has ended."""
        self._done += 1
        now_s = time.monotonic()
        left = ""
        if self._done:
            left_s = (now_s - self._began_s) / self._done * (self._total - self._done)
            left = f" (ETA {int(left_s) // 60}:{int(left_s) % 60:02d})"
        text = f"{self._noun} {self._done + 1} of {self._total}{left}: {escape(item)}"
        self._status.update(text)
        if not self._console.is_terminal and now_s - self._printed_s >= QUIET_S:
            self._printed_s = now_s
            self._console.print(text, highlight=False, soft_wrap=True)
