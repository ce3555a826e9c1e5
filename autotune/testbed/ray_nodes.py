"""A Ray node in every host of a testbed: a real Ray cluster on one machine, reachable from inside the testbed only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
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
_PREFIX = "autotune-ray."
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

    Raises `LaunchError` with what Ray said where one does not start.
    """
    head = RayHead(f"{bed.hosts[0].address}:{HEAD_PORT}", secrets.token_hex(32))
    # A short path: Ray puts Unix sockets in it, whose names may have 107 bytes.
    _remove_stale_directories()
    prefix = f"{_PREFIX}{os.getpid()}."
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as directory, contextlib.ExitStack() as nodes:
        # One after the other: nodes of one machine share a session directory and number their files in it.
        for number, host in enumerate(bed.hosts):
            process = _start(host, number == 0, head, Path(directory))
            nodes.callback(_stop, process)
            _await(host, process, _log(Path(directory), host))
        yield head


def _remove_stale_directories() -> None:
    """Those of drivers that were killed before they could remove their own."""
    for entry in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = entry.name.removeprefix(_PREFIX).partition(".")[0]
        ours = entry.is_dir() and not entry.is_symlink() and entry.lstat().st_uid == os.getuid()
        if ours and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(entry, ignore_errors=True)


def _start(host: BedHost, is_head: bool, head: RayHead, directory: Path) -> subprocess.Popen[bytes]:
    role = ["--head", "--port", str(HEAD_PORT), "--include-dashboard", "false", "--temp-dir", str(directory)]
    where = role if is_head else ["--address", head.address]
    room = ["--num-cpus", str(host.devices), "--object-store-memory", str(OBJECT_STORE_BYTES)]
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--node-ip-address", host.address]
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": head.token, "RAY_worker_niceness": "0"}
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
            why = f"ended with status {process.returncode}" if ended else f"is not up after {START_TIMEOUT_S:.0f} s"
            tail = said[-LOG_TAIL_CHARACTERS:].strip() or "nothing"
            raise LaunchError(f"the Ray node of testbed host {host.name!r} {why}; it said: {tail}")
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Politely, then by force; what is left of the node's processes goes with the testbed's namespaces."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
