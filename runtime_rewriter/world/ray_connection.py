"""Joins a Ray cluster at a place, or starts a private one on loopback."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import LaunchError, raised_line
from autotune.patient_ray import REGISTERED_S
from runtime_rewriter.world.ray_start import quick_start

SERVER_GONE_S = 7 * 86400
"""Longer than any job: our own deadlines end the calls."""


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RayPlace:
    """A Ray cluster. Without an address a private one is started, on loopback only, with a token.

    shared_directory: the script's directory exists on every host of the address; otherwise it is
        sent there.
    bare: the script needs no directory (it is a module of ours).
    one_machine: all nodes are on this machine (in a testbed), with this installation and files.
    node_address: address of this process's node, if Ray cannot find it out.
    interface: network interface of gloo ("": each host's own).
    token: token of the cluster's nodes ("": the environment's).
    """

    address: str | None = None
    shared_directory: bool = False
    one_machine: bool = False
    node_address: str = ""
    interface: str = ""
    token: str = ""
    bare: bool = False

    @property
    def local(self) -> bool:
        return self.address is None

    @property
    def same_files(self) -> bool:
        """Whether every rank has the files of this process."""
        return self.local or self.one_machine

    @property
    def directory(self) -> str:
        """Directory in which the ranks start ("": the one that Ray unpacked)."""
        shared = self.shared_directory and not self.bare
        return str(Path.cwd()) if self.same_files or shared else ""


def set_environment(place: RayPlace) -> None:
    """Set the variables that Ray reads when it is imported."""
    if place.local:
        # Otherwise Ray binds the first real interface, and without a token it is open to everybody.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # By default Ray gives up a GCS that takes more than 20 s to start.
        os.environ["RAY_gcs_server_port_wait_time_s"] = f"{REGISTERED_S:.0f}"  # noqa: SIM112
    elif place.one_machine:
        # it has several nodes, unlike an earlier local cluster
        os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
    if place.local or place.token:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = place.token or secrets.token_hex(32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # By default Ray ends this process without a word when its server is gone for a minute.
    os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(SERVER_GONE_S)  # noqa: SIM112
    # With Ray's default of 15, everything else on the machine would precede the trials.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own spelling
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"


def start_private(workers: int, folder: Path) -> None:
    with quick_start():
        _init(
            address="local",
            num_cpus=workers,  # a slot per rank, however many cores there are
            include_dashboard=False,
            object_store_memory=100_000_000,
            _node_ip_address=LOOPBACK,
            _temp_dir=str(folder),
        )


def connect(place: RayPlace) -> None:
    options: dict[str, Any] = {"address": place.address}
    if place.node_address:
        options["_node_ip_address"] = place.node_address
    if not place.one_machine:
        options["runtime_env"] = _runtime_environment(place.shared_directory or place.bare)
    _init(**options)


def _runtime_environment(shared_directory: bool) -> dict[str, Any]:
    """The files that Ray sends to its hosts: our code and the script's directory."""
    import autotune
    import runtime_rewriter

    packages = [str(Path(str(package.__file__)).parent) for package in (autotune, runtime_rewriter)]
    environment: dict[str, Any] = {
        "py_modules": packages,
        "excludes": [".git", ".venv", "autotune-jobs", "*.db", "__pycache__"],
    }
    if not shared_directory:
        environment["working_dir"] = str(Path.cwd())
    return environment


def _init(**options: Any) -> None:
    import ray
    from ray import _raylet

    # It warns of a missing handler of SIGTERM, which is ours.
    logging.getLogger("ray").setLevel(logging.ERROR)
    loader: Any = _raylet.AuthenticationTokenLoader  # type: ignore[attr-defined]  # no public way
    loader.instance().reset_cache()  # forget the token of this process's earlier cluster
    quiet: dict[str, Any] = {
        "logging_level": "ERROR",
        "log_to_driver": False,
        "configure_logging": False,
    }
    ray.init(**options, **quiet)


@contextlib.contextmanager
def sigterm_handler_kept() -> Iterator[None]:
    """Restore the process's own handler, which Ray's compiled code replaces."""
    # only the main thread may set one
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # None: set by another language, which Python cannot set again
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def silent_ray_threads() -> Iterator[None]:
    """Let Ray's own threads print no stack trace when its servers are killed."""
    before = threading.excepthook

    def hook(end: threading.ExceptHookArgs) -> None:
        if end.thread is None or not end.thread.name.startswith("ray_"):
            before(end)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def not_shipped(error: Exception) -> LaunchError:
    """The refusal of a place to whose hosts the files cannot be sent."""
    text = raised_line(str(error)) or " ".join(str(error).split())[:600]
    return LaunchError(
        f"the script's directory {Path.cwd()} must be sent to the hosts of the Ray cluster, but "
        f"that failed: {text}; start in a smaller directory (data elsewhere), or use "
        "--shared-directory if this directory exists on every host"
    )


def in_one_line(error: BaseException) -> str:
    """The error without the traceback that Ray writes into it."""
    text = str(error).strip() or type(error).__name__
    return raised_line(text) or text.splitlines()[0]
