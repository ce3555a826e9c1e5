"""A Ray node in every host of a testbed, reachable from inside the testbed only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import LaunchError, raised_line
from autotune.patient_ray import REGISTERED_S
from autotune.testbed.bed import BedHost, Testbed, words_inside

START_TIMEOUT_S = 30.0 + REGISTERED_S
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1
HEAD_PORT = 6379
OBJECT_STORE_BYTES = 100_000_000  # we do not use it; Ray's minimum is 75 MB
_STARTED = "Ray runtime started"
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True)
class RayHead:
    """Address of the first host's node, and the token of all nodes."""

    address: str
    token: str


@contextlib.contextmanager
def ray_nodes(bed: Testbed, say: Callable[[str], None]) -> Iterator[RayHead]:
    """One node per host, with one CPU per device; all end with the block, or with this process.

    The first one is up before the others start, at the same time. `say` gets what it waits for.
    Their files are in the testbed's scratch directory. Raises `LaunchError` with Ray's reason if a
    node does not start.
    """
    head = RayHead(f"{bed.hosts[0].address}:{HEAD_PORT}", secrets.token_hex(32))
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as directories, contextlib.ExitStack() as nodes:
        nodes.callback(_stop, processes)

        def start(host: BedHost) -> Path:
            # Nodes of one machine number their files, so each has a directory of its own. No
            # prefix, as Ray puts Unix sockets in it: see `state.LONGEST_SCRATCH_BYTES`.
            directory = tempfile.TemporaryDirectory(
                dir=bed.scratch, prefix="", ignore_cleanup_errors=True
            )
            path = Path(directories.enter_context(directory))
            processes.append(_start(host, host is bed.hosts[0], head, path))
            return _log(path, host)

        first, *others = bed.hosts
        log = start(first)
        _await(first, processes[0], log)
        if others:
            say(f"starting Ray on the other {len(others)} hosts of testbed {bed.name}")
        logs = [start(host) for host in others]
        for host, process, log in zip(others, processes[1:], logs, strict=True):
            _await(host, process, log)
        yield head


def _start(host: BedHost, is_head: bool, head: RayHead, directory: Path) -> subprocess.Popen[bytes]:
    port = ("--head", "--port", str(HEAD_PORT))
    role = [*port, "--include-dashboard", "false", "--no-monitor"]
    if not is_head:
        role = ["--address", head.address]
    # Nobody reads what these would collect, and each takes a core for a part of a second.
    role += ["--temp-dir", str(directory), "--include-log-monitor", "false"]
    resources = ["--num-cpus", str(host.devices), "--object-store-memory", str(OBJECT_STORE_BYTES)]
    # -P: import nothing from the user's directory
    ray = [sys.executable, "-P", "-m", "autotune.patient_ray"]
    words = [*ray, "start", "--block", "--disable-usage-stats", "--node-ip-address", host.address]
    # Settings of this process's earlier Ray clusters do not hold for this one.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = inherited | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": head.token,
        "RAY_worker_niceness": "0",
        "RAY_gcs_server_port_wait_time_s": f"{REGISTERED_S:.0f}",  # of its own, Ray waits 20 s
    }
    with _log(directory, host).open("wb") as log:
        return subprocess.Popen(
            [*words_inside(host.namespace), *words, *role, *resources],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the driver, which stops the nodes in order
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    """Let `ray start --block` end its node when the driver dies, even by kill -9."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _log(directory: Path, host: BedHost) -> Path:
    return directory / f"{host.namespace}.log"


def _await(host: BedHost, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while _STARTED not in (output := log.read_text(encoding="utf-8", errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline_s:
            problem = f"is not up after {START_TIMEOUT_S:.0f} s"
            if process.returncode is not None:
                problem = f"ended with status {process.returncode}"
            last = (output.strip() or "it printed nothing").splitlines()[-1].strip()
            reason = (raised_line(output) or last).rstrip(".")
            raise LaunchError(
                f"the Ray node of testbed host {host.name!r} {problem}: {reason}; "
                "start the command again"
            )
        time.sleep(POLL_S)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Stop by SIGTERM, then by SIGKILL. The testbed's removal ends what is left, or raises."""
    for process in processes:
        process.terminate()
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
