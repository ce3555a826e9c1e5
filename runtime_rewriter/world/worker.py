"""The supervisor of one training process: starts it, talks to it, sees it die, kills all of it.

It lives in a Ray actor, one per rank; the user's script runs in a child process of its own, so that a crash,
a hang or an allocation that takes the process down costs a trial and not the actor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

import autotune
import runtime_rewriter
from autotune.errors import AutotuneError, LaunchError
from runtime_rewriter.control import ControlClosed, ControlLine

LOG_TAIL_BYTES = 8192
CLOSING_S = 5.0
_OF_RAY = ("PYTHONPATH", "PYTHONBREAKPOINT")
"""What Ray sets in its workers besides RAY_*."""
_OF_THE_MACHINE = {
    *(
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
    ),
    *(
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "VIRTUAL_ENV",
        "PYTHONHOME",
        "DISPLAY",
        "CUDA_VISIBLE_DEVICES",
    ),
}
_FAMILIES_OF_THE_MACHINE = ("RAY_", "CONDA_", "SSH_", "XDG_", "SLURM_")


class WorkerLost(AutotuneError):
    """The supervisor itself died or does not answer."""


class Worker(Protocol):
    """One rank's supervisor, wherever it runs. Every call ends within its timeout and a few seconds, or raises `WorkerLost`."""

    def start(
        self, words: list[str], environment: dict[str, str], directory: str, log_path: str
    ) -> None: ...
    def instruct(self, message: dict[str, Any]) -> None: ...
    def poll(self, timeout_s: float) -> list[dict[str, Any]]: ...
    def stop(self) -> None: ...


class Process(Protocol):
    """A started process that leads a session of its own, so that all it starts can be killed with it; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...


Spawn = Callable[[list[str], dict[str, str], str, IO[bytes], socket.socket], Process]
"""Runs `runtime_rewriter.rank.launch` with (its words, its whole environment, directory, log, its end of the control line)."""


class ProcessSupervisor:
    """Implements `Worker` for a process on this machine that `spawn` starts."""

    def __init__(self, spawn: Spawn | None = None) -> None:
        self._spawn = spawn or _interpreter
        self._process: Process | None = None
        self._line: ControlLine | None = None
        self._log_path: Path | None = None
        self._exit_told = False

    def start(
        self, words: list[str], environment: dict[str, str], directory: str, log_path: str
    ) -> None:
        """Start `runtime_rewriter.rank.launch --control FD -- words` in `directory` ("": our own).

        `environment` is added to ours without Ray's part of it; the only PYTHONPATH is the one in `environment`.
        """
        self.stop()
        ours, theirs = socket.socketpair()
        self._line, self._exit_told = ControlLine(ours), False
        self._log_path = Path(log_path)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log, theirs:
            self._process = self._spawn(
                words, _child_environment(dict(os.environ), environment), directory, log, theirs
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
        events = self._drained(timeout_s)
        if self._process is None or self._exit_told:
            if not events:
                time.sleep(min(timeout_s, 0.2))
            return events
        # The line alone does not tell: a child of the script may hold it open after the script was killed.
        code = self._process.poll() if self._line is not None else self._code_after_closing()
        if code is not None:
            events += self._drained(0.0)  # said between the last look and the end
            self._exit_told = True
            events.append({"event": "exited", "code": code, "log": self._log_tail()})
        return events

    def _drained(self, timeout_s: float) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        try:
            message = self._line.receive(timeout_s) if self._line is not None else None
            while message is not None and self._line is not None:
                events.append(message)
                message = self._line.receive(0.0)
        except ControlClosed:
            if self._line is not None:
                self._line.close()
            self._line = None
        return events

    def _code_after_closing(self) -> int | None:
        """A process that closed its line is about to end."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=CLOSING_S)
        except subprocess.TimeoutExpired:
            return None

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


def _interpreter(
    words: list[str],
    environment: dict[str, str],
    directory: str,
    log: IO[bytes],
    line: socket.socket,
) -> Process:
    """Implements `Spawn`: an interpreter of its own, as a user would start the script."""
    return subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-m",
            "runtime_rewriter.rank.launch",
            "--control",
            str(line.fileno()),
            "--",
            *words,
        ],
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

    Left out is what belongs to a machine or a login there: HOME, USER, LOGNAME, SHELL, HOSTNAME, PATH, PWD, OLDPWD,
    TMPDIR, TMP, TEMP, LD_LIBRARY_PATH, LD_PRELOAD, VIRTUAL_ENV, PYTHONHOME, DISPLAY, CUDA_VISIBLE_DEVICES, and every
    RAY_*, CONDA_*, SSH_*, XDG_* and SLURM_*.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_THE_MACHINE and not name.startswith(_FAMILIES_OF_THE_MACHINE)
    }


def _child_environment(ours: dict[str, str], added: dict[str, str]) -> dict[str, str]:
    """The child finds our packages where this process does, whether they are installed or were sent along."""
    base = {
        name: value
        for name, value in ours.items()
        if name not in _OF_RAY and not name.startswith("RAY_")
    }
    search_path = [*_package_roots(), *filter(None, added.get("PYTHONPATH", "").split(os.pathsep))]
    return {**base, **added, "PYTHONPATH": os.pathsep.join(search_path)}


def _package_roots() -> list[str]:
    """Directories that hold our packages. Not site-packages: on PYTHONPATH it would come before the standard library."""
    roots = [
        str(Path(str(package.__file__)).resolve().parents[1])
        for package in (autotune, runtime_rewriter)
    ]
    installed = {
        str(Path(path).resolve()) for path in (*site.getsitepackages(), site.getusersitepackages())
    }
    return [root for root in dict.fromkeys(roots) if root not in installed]


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
    raise LaunchError(
        f"rank 0 needs a free port in {first}-{last} on {host}, but all are taken; give another range with --master-ports"
    )
