"""Starts a private Ray cluster in less time than `ray.init` alone takes.

Ray has no public way to do so: `ray.init` lacks the options of `ray start` that leave out servers,
and looks for its node once a second.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from autotune.errors import LaunchError

POLL_S = 0.02
REGISTERED_S = 240.0
"""Ray itself gives up after 30 s, which a node exceeds on a machine with a load of 100."""


@contextlib.contextmanager
def quick_start() -> Iterator[None]:
    """Within it, `ray.init` starts no autoscaler, monitor of logs or dashboard, and goes on as soon
    as its node is registered.

    Nobody reads what these would collect, and each takes a core for a part of a second.
    """
    from ray._private import node, services, state

    def lean_node(ray_params: Any, *arguments: Any, **options: Any) -> Any:
        ray_params.no_monitor, ray_params.include_log_monitor = True, False
        return own_node(ray_params, *arguments, **options)

    def watched_raylet(*arguments: Any, **options: Any) -> Any:
        started = own_raylet(*arguments, **options)
        raylets.append(started.process)
        return started

    def registered_node(gcs_address: str, node_id: str) -> Any:
        known = state.GlobalState()  # type: ignore[no-untyped-call]
        options: Any = services._get_gcs_client_options(gcs_address)  # type: ignore[no-untyped-call]
        known._initialize_global_state(options)
        end_s = time.monotonic() + REGISTERED_S
        while time.monotonic() < end_s:
            for raylet in raylets:
                if raylet.poll() is not None:
                    raise LaunchError(f"the raylet ended with status {raylet.returncode}")
            if any(entry["NodeID"] == node_id for entry in known.node_table()):  # type: ignore[no-untyped-call]
                break
            time.sleep(POLL_S)
        return own_get_node(gcs_address, node_id)

    def no_dashboard(*arguments: Any, **options: Any) -> tuple[None, None]:
        """As if it had failed to start. `include_dashboard=False` starts the process, too."""
        return None, None

    own_node: Callable[..., Any] = node.Node
    own_get_node: Callable[..., Any] = services.get_node
    own_start: Callable[..., Any] = services.start_api_server
    own_raylet: Callable[..., Any] = services.start_raylet
    raylets: list[subprocess.Popen[bytes]] = []
    node.Node, services.get_node = lean_node, registered_node  # type: ignore[misc, assignment]
    services.start_api_server, services.start_raylet = no_dashboard, watched_raylet
    try:
        yield
    finally:
        node.Node, services.get_node = own_node, own_get_node  # type: ignore[misc, assignment]
        services.start_api_server, services.start_raylet = own_start, own_raylet
