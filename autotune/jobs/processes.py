"""A child that runs the user's script: what it says is passed on and its end remembered, and it never outlives its time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

from autotune.jobs.stopping import signals_passed_on

TAIL_BYTES = 8192
POLL_S = 0.2
ENDING_S = 40.0
"""torchrun gives its ranks 30 s to end."""


class Launched:
    """`words` in a session of their own. Their output goes to our stderr, since our stdout is for the result."""

    def __init__(self, words: list[str]) -> None:
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._tail = bytearray()
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._pass_on, args=(self._process.stdout,), daemon=True
        )
        self._reader.start()

    def wait(self, deadline_s: float, enough: Callable[[], bool]) -> int | None:
        """Its exit status; None where `enough` said so, or where the monotonic clock passed the deadline, while it still runs."""
        while True:
            try:
                return self._process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline_s or enough():
                    return None

    def end(self) -> None:
        """Ask it to end, then kill what is left of its session."""
        for number, patience_s in ((signal.SIGTERM, ENDING_S), (signal.SIGKILL, ENDING_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
                break
        self._reader.join(1.0)

    def tail(self) -> str:
        """The end of its output so far."""
        self._reader.join(1.0)
        return self._tail.decode(errors="replace")

    @contextlib.contextmanager
    def signals_passed_on(self) -> Iterator[None]:
        """In the end it is asked to end, and waited for."""
        try:
            with signals_passed_on(self._process, own_session=True):
                yield
        finally:
            if self._process.poll() is None:
                self.end()

    def _pass_on(self, output: IO[bytes]) -> None:
        for line in iter(output.readline, b""):
            if line.startswith(b"USDT:"):  # of torch's profiler, about itself
                continue
            self._tail += line
            del self._tail[:-TAIL_BYTES]
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
