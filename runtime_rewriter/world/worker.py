"""The supervisor of one training process: starts it, forwards its messages and kills it.

It runs in a Ray actor, one per rank. The user's script runs in a child process: a crash, a hang or
an exhausted memory costs a trial and not the actor. The supervisor forwards lines without decoding
them, so it imports none of their types.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from autotune.errors import AutotuneError, LaunchError
from autotune.masking import masked, secrets_of
from runtime_rewriter.control import ControlClosed, ControlLine
from runtime_rewriter.ports import bound_port, unclaimed_port
from runtime_rewriter.world.starting import launcher_words

LOG_TAIL_BYTES = 8192
CLOSING_S = 5.0
_SET_BY_RAY = ("PYTHONPATH", "PYTHONBREAKPOINT", "OMP_NUM_THREADS")
"""Variables besides RAY_* that Ray sets in its workers."""
_MACHINE_VARIABLES = frozenset(
    [
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "HOSTNAME",
        "PATH",
        "PWD",
        "OLDPWD",
        "TMPDIR",
        "TMP",
        "TEMP",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "VIRTUAL_ENV",
        "PYTHONHOME",
        "DISPLAY",
        "CUDA_VISIBLE_DEVICES",
    ]
)
_MACHINE_PREFIXES = ("RAY_", "CONDA_", "SSH_", "XDG_", "SLURM_")


class WorkerLost(AutotuneError):
    """The supervisor itself died or does not answer."""


@dataclass(frozen=True)
class ProcessExited:
    """The training process has ended; `log_tail`: its last output, without that of earlier ones."""

    code: int
    log_tail: str


@dataclass(frozen=True)
class Polled:
    """New lines of a training process (encoded `RankEvent`s), and its end once."""

    lines: tuple[str, ...] = ()
    exited: ProcessExited | None = None


class Worker(Protocol):
    """One rank's supervisor, wherever it runs.

    Every call ends within its timeout and a few seconds, or raises `WorkerLost`.
    """

    def start(
        self, words: list[str], environment: dict[str, str], directory: str, log_path: str
    ) -> None: ...
    def instruct(self, line: str) -> None: ...
    def poll(self, timeout_s: float) -> Polled: ...
    def terminate(self) -> None: ...
    def stop(self) -> None: ...


class Process(Protocol):
    """A process that leads its own session, so that it dies with its children; `Popen` is one."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...


Spawn = Callable[[list[str], dict[str, str], str, IO[bytes], socket.socket], Process]
"""Runs `runtime_rewriter.rank.launch` with (its words, its whole environment, directory, log, its
end of the control line)."""


class ProcessSupervisor:
    """Implements `Worker` for a process on this machine that `spawn` starts."""

    def __init__(self, spawn: Spawn | None = None) -> None:
        self._spawn = spawn or _interpreter
        self._process: Process | None = None
        self._line: ControlLine | None = None
        self._log_path: Path | None = None
        self._log_start = 0
        """Size of the log when the process was started; before it is output of earlier starts."""
        self._exit_reported = False
        self._secrets: frozenset[str] = frozenset()

    def start(
        self, words: list[str], environment: dict[str, str], directory: str, log_path: str
    ) -> None:
        """Start `runtime_rewriter.rank.launch --control FD -- words` in `directory` ("": our own).

        `environment` is added to ours without Ray's part of it; PYTHONPATH and OMP_NUM_THREADS
        come from `environment` alone.
        """
        self.stop()
        ours, theirs = socket.socketpair()
        self._line, self._exit_reported = ControlLine(ours), False
        self._log_path = Path(log_path)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = _child_environment(dict(os.environ), environment)
        self._secrets = secrets_of(words, environment)
        with self._log_path.open("ab") as log, theirs:
            self._log_start = log.tell()
            self._process = self._spawn(words, environment, directory, log, theirs)

    def instruct(self, line: str) -> None:
        """Queue one encoded instruction for the next step boundary.

        `poll` reports a dead process.
        """
        if self._line is not None:
            with contextlib.suppress(ControlClosed):
                self._line.send(line)

    def poll(self, timeout_s: float) -> Polled:
        """Wait up to `timeout_s` for the first line; return all lines, and the process's end."""
        lines = self._drained(timeout_s)
        if self._process is None or self._exit_reported:
            if not lines:
                time.sleep(min(timeout_s, 0.2))
            return Polled(tuple(lines))
        # A closed line is not enough: a child of the script may hold it open after the script was
        # killed.
        code = self._process.poll() if self._line is not None else self._code_after_closing()
        if code is None:
            return Polled(tuple(lines))
        lines += self._drained(0.0)  # sent between the last look and the end
        self._exit_reported = True
        return Polled(tuple(lines), ProcessExited(code, self._log_tail()))

    def _drained(self, timeout_s: float) -> list[str]:
        lines: list[str] = []
        if self._line is None:
            return lines
        try:
            line = self._line.receive(timeout_s)
            while line is not None:
                lines.append(line)
                line = self._line.receive(0.0)
        except ControlClosed:
            self._line.close()
            self._line = None
        return lines

    def _code_after_closing(self) -> int | None:
        """A process that closed its line is about to end."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=CLOSING_S)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Send SIGTERM to the process, which may handle it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
                os.kill(self._process.pid, signal.SIGTERM)

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
            log.seek(max(self._log_start, log.tell() - LOG_TAIL_BYTES))
            return masked(log.read().decode(errors="replace"), self._secrets)


def _interpreter(
    words: list[str],
    environment: dict[str, str],
    directory: str,
    log: IO[bytes],
    line: socket.socket,
) -> Process:
    """Implements `Spawn` by a new interpreter, as a user would start the script."""
    return subprocess.Popen(
        [sys.executable, "-u", *launcher_words(), "--control", str(line.fileno()), "--", *words],
        env=environment,
        cwd=directory or None,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=[line.fileno()],
        start_new_session=True,
    )


def carried_environment(environment: dict[str, str]) -> dict[str, str]:
    """The part of the driver's environment that its ranks get on every host.

    Variables of one machine or login are left out: HOME, USER, LOGNAME, SHELL, HOSTNAME, PATH, PWD,
    OLDPWD, TMPDIR, TMP, TEMP, LD_LIBRARY_PATH, LD_PRELOAD, VIRTUAL_ENV, PYTHONHOME, DISPLAY,
    CUDA_VISIBLE_DEVICES, and every RAY_*, CONDA_*, SSH_*, XDG_* and SLURM_*.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in _MACHINE_VARIABLES and not name.startswith(_MACHINE_PREFIXES)
    }


def _child_environment(ours: dict[str, str], added: dict[str, str]) -> dict[str, str]:
    """Ours without Ray's part of it, and the driver's, whose PYTHONPATH is the only one."""
    inherited = {
        name: value
        for name, value in ours.items()
        if name not in _SET_BY_RAY and not name.startswith("RAY_")
    }
    return {**inherited, **added}


def free_port(first: int, last: int, host: str) -> int:
    """A port on which rank 0 can listen; 0, 0 is any (`unclaimed_port`).

    Raises `LaunchError` when all are taken, and when `host` is no address of this machine.
    """
    try:
        if (first, last) == (0, 0):
            return unclaimed_port(host)
        for port in range(first, last + 1):
            if chosen := bound_port(host, port):
                return chosen
    except OSError as error:
        fix = "the address of its node must be one of its interfaces' (ray start --node-ip-address)"
        if isinstance(error, PermissionError):
            fix = "give another range with --master-ports"
        raise LaunchError(
            f"rank 0 must listen on a port in {first}-{last} of {host}, but cannot: "
            f"{error.strerror or error}; {fix}"
        ) from error
    raise LaunchError(
        f"rank 0 needs a free port in {first}-{last} on {host}, but all are taken; "
        "give another range with --master-ports"
    )
