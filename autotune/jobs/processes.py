"""A child process that runs the user's script, with its output forwarded and its end bounded."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import IO

from autotune.jobs.stopping import signals_passed_on
from autotune.printing import discard

TAIL_BYTES = 8192
POLL_S = 0.2
_NEEDS_LAUNCHER = "using env:// rendezvous: environment variable"
"""torch's words for a script that a launcher must start."""
ENDING_S = 40.0
"""torchrun gives its ranks 30 s to end."""


def shell_status(status: int) -> int:
    """The exit status of a process as a shell states it: 128 + N after a signal N."""
    return status if status >= 0 else 128 - status


def launcher_needed(text: str) -> str:
    """The fix, before other text, if a script's output says that it needs a launcher; else ""."""
    if _NEEDS_LAUNCHER not in text:
        return ""
    return "the script needs a launcher: start it with torchrun --nproc-per-node 1; "


class Launched:
    """The command `words` in its own session. Its output goes to our stderr.

    Our stdout is reserved for the result. `environment` is added to ours.
    """

    def __init__(
        self, words: list[str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._process = subprocess.Popen(
            words,
            env={**os.environ, **environment},
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
        """Return its exit status; None if it still runs at the deadline or when `enough()`."""
        while True:
            try:
                return self._process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline_s or enough():
                    return None

    def end(self) -> None:
        """Ask it to end, then kill the rest of its session."""
        for number, patience_s in ((signal.SIGTERM, ENDING_S), (signal.SIGKILL, ENDING_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
                break
        self._reader.join(1.0)

    def last_output(self) -> str:
        """The end of its output so far, below a line that introduces it."""
        self._reader.join(1.0)
        text = self._tail.decode(errors="replace").rstrip()
        return f"{launcher_needed(text)}its last output:\n{text}"

    @contextlib.contextmanager
    def signals_passed_on(self) -> Iterator[None]:
        """Forward signals while the block runs, then end the process."""
        with self.ended_afterwards(), signals_passed_on(self._process, own_session=True):
            yield

    @contextlib.contextmanager
    def ended_afterwards(self) -> Iterator[None]:
        """End the process when the block ends."""
        try:
            yield
        finally:
            if self._process.poll() is None:
                self.end()
            self._reader.join(1.0)
            if self._process.stdout is not None and not self._reader.is_alive():
                self._process.stdout.close()

    def _pass_on(self, output: IO[bytes]) -> None:
        """Show the output; read on without our stderr, as the script waits for a full pipe."""
        shown = True
        for line in iter(output.readline, b""):
            if line.startswith(b"USDT:"):  # torch's profiler, about itself
                continue
            self._tail += line
            del self._tail[:-TAIL_BYTES]
            if shown:
                try:
                    sys.stderr.buffer.write(line)
                    sys.stderr.buffer.flush()
                except (OSError, ValueError):  # its reader is gone, or it is closed
                    discard(sys.stderr)
                    shown = False
