"""A Ray node in every host of a testbed: a real Ray cluster on one machine, reachable from inside the testbed only."""

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import LaunchError
from autotune.testbed.bed import BedHost, Testbed, words_inside

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1
HEAD_PORT = 6379
OBJECT_STORE_BYTES = 100_000_000  # nothing of ours travels through it; Ray's least is 75 MB
LOG_TAIL_CHARACTERS = 1500
_STARTED = "Ray runtime started"
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True)
class RayHead:
    """Where the first host's node listens, and the token that all nodes ask for."""

    address: str
    token: str


@contextlib.contextmanager
def ray_nodes(bed: Testbed) -> Iterator[RayHead]:
    """One node per host with as many CPUs as the host has devices; all of them end with the block, or with this process.

    What they write is in the testbed's scratch directory. Raises `LaunchError` with what Ray said where one does not start.
    """
    head = RayHead(f"{bed.hosts[0].address}:{HEAD_PORT}", secrets.token_hex(32))
    # No prefix, as Ray puts Unix sockets in it: see `scratch.LONGEST_BYTES`.
    fresh = tempfile.TemporaryDirectory(dir=bed.scratch, prefix="", ignore_cleanup_errors=True)
    with fresh as directory, contextlib.ExitStack() as nodes:
        # One after the other: nodes of one machine share a session directory and number their files in it.
        for number, host in enumerate(bed.hosts):
            process = _start(host, number == 0, head, Path(directory))
            nodes.callback(_stop, process)
            _await(host, process, _log(Path(directory), host))
        yield head


def _start(host: BedHost, is_head: bool, head: RayHead, directory: Path) -> subprocess.Popen[bytes]:
    role = [
        "--head",
        "--port",
        str(HEAD_PORT),
        "--include-dashboard",
        "false",
        "--temp-dir",
        str(directory),
    ]
    where = role if is_head else ["--address", head.address]
    room = ["--num-cpus", str(host.devices), "--object-store-memory", str(OBJECT_STORE_BYTES)]
    ray = [
        sys.executable,
        "-P",
        "-m",
        "ray.scripts.scripts",
    ]  # -P: a file in the user's directory is not taken for one of its modules
    words = [*ray, "start", "--block", "--disable-usage-stats", "--node-ip-address", host.address]
    # What a Ray cluster of this process's past (a loopback one, say) was told does not hold for this one.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = inherited | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": head.token,
        "RAY_worker_niceness": "0",
    }
    with _log(directory, host).open("wb") as log:
        return subprocess.Popen(
            [*words_inside(host.namespace), *words, *where, *room],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the driver, which stops the nodes in its own order
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    """`ray start --block` takes its node down when it is terminated: also where the driver is killed by kill -9."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _log(directory: Path, host: BedHost) -> Path:
    return directory / f"{host.namespace}.log"


def _await(host: BedHost, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while _STARTED not in (said := log.read_text(encoding="utf-8", errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline_s:
            ended = process.returncode is not None
            why = (
                f"ended with status {process.returncode}"
                if ended
                else f"is not up after {START_TIMEOUT_S:.0f} s"
            )
            tail = said[-LOG_TAIL_CHARACTERS:].strip() or "nothing"
            raise LaunchError(f"the Ray node of testbed host {host.name!r} {why}; it said: {tail}")
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Politely, then by force. What is left is ended with the testbed's namespaces, and an error there if it cannot be ended at all."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
