"""The supervisor of one training process: starts it, talks to it, sees it die, kills all of it.

It lives in a Ray actor, one per rank; the user's script runs in a child process of its own, so that a crash,
a hang or an allocation that takes the process down costs a trial and not the actor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from autotune.errors import AutotuneError, LaunchError
from runtime_rewriter.control import ControlClosed, ControlLine

LOG_TAIL_BYTES = 8192


class WorkerLost(AutotuneError):
    """The supervisor itself died or does not answer."""


class Worker(Protocol):
    """One rank's supervisor, wherever it runs. Every call ends within its timeout and a few seconds, or raises `WorkerLost`."""

    def start(self, words: list[str], environment: dict[str, str], directory: str, log_path: str) -> None: ...
    def instruct(self, message: dict[str, Any]) -> None: ...
    def poll(self, timeout_s: float) -> list[dict[str, Any]]: ...
    def stop(self) -> None: ...


class ProcessSupervisor:
    """Implements `Worker` for a child process on this machine."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._line: ControlLine | None = None
        self._log_path: Path | None = None
        self._exit_told = False

    def start(self, words: list[str], environment: dict[str, str], directory: str, log_path: str) -> None:
        """Start `python -m runtime_rewriter.launch --control FD -- words` with `environment` added to ours."""
        self.stop()
        ours, theirs = socket.socketpair()
        self._line, self._exit_told = ControlLine(ours), False
        self._log_path = Path(log_path)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        # The child finds our packages as this process does, whether they are installed or were sent along.
        search_path = os.pathsep.join(path for path in sys.path if path)
        with self._log_path.open("ab") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "runtime_rewriter.launch", "--control", str(theirs.fileno()), "--", *words],
                env={**os.environ, "PYTHONPATH": search_path, **environment},
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that data-loading processes die with it
            )

    def instruct(self, message: dict[str, Any]) -> None:
        """Queue one instruction; it is read at the next step boundary. A dead process is told by `poll`."""
        if self._line is not None:
            try:
                self._line.send(message)
            except ControlClosed:
                return

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        """Events of the process: waits up to `timeout_s` for the first; the last one may be `exited`."""
        events: list[dict[str, Any]] = []
        if self._line is not None:
            try:
                message = self._line.receive(timeout_s)
                while message is not None:
                    events.append(message)
                    message = self._line.receive(0.0)
            except ControlClosed:
                self._line.close()
                self._line = None
        if self._line is None and self._process is not None and not self._exit_told:
            try:
                code = self._process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                return events
            self._exit_told = True
            events.append({"event": "exited", "code": code, "log": self._log_tail()})
        elif self._line is None and not events:
            time.sleep(min(timeout_s, 0.2))
        return events

    def stop(self) -> None:
        """Kill the process and everything that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=30.0)
            self._process = None
        if self._line is not None:
            self._line.close()
            self._line = None

    def _log_tail(self) -> str:
        assert self._log_path is not None
        with self._log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")


def free_port(first: int, last: int, host: str) -> int:
    """A port on which rank 0 can listen; 0, 0 asks the kernel. Raises `LaunchError` when all are taken."""
    for port in range(first, last + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            chosen: int = probe.getsockname()[1]
            return chosen
    raise LaunchError(f"rank 0 needs a free port in {first}-{last} on {host}, but all are taken; give another range with --master-ports")
