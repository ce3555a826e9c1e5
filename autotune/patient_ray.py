"""Nodes of Ray that may take longer to start than Ray waits for them.

`python -m autotune.patient_ray` is `ray` with this patience. Ray has no option for it.
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
def patient_start() -> Iterator[None]:
    """Let Ray wait for its own node until it is registered or its raylet has ended.

    Ray looks for it often.
    """
    from ray._private import services, state

    def watched_raylet(*arguments: Any, **options: Any) -> Any:
        started = own_raylet(*arguments, **options)
        raylets.append(started.process)
        return started

    def registered_node(gcs_address: str, node_id: str) -> Any:
        known = state.GlobalState()  # type: ignore[no-untyped-call]
        known._initialize_global_state(options_of(gcs_address))
        end_s = time.monotonic() + REGISTERED_S
        while time.monotonic() < end_s:
            for raylet in raylets:
                if raylet.poll() is not None:
                    raise LaunchError(f"the raylet ended with status {raylet.returncode}")
            nodes = known.node_table()  # type: ignore[no-untyped-call]
            if any(entry["NodeID"] == node_id for entry in nodes):
                break
            time.sleep(POLL_S)
        return own_get_node(gcs_address, node_id)

    options_of: Callable[..., Any] = services._get_gcs_client_options
    own_get_node: Callable[..., Any] = services.get_node
    own_raylet: Callable[..., Any] = services.start_raylet
    raylets: list[subprocess.Popen[bytes]] = []
    services.get_node, services.start_raylet = registered_node, watched_raylet
    try:
        yield
    finally:
        services.get_node, services.start_raylet = own_get_node, own_raylet


def main() -> None:
    """Be the command `ray`."""
    from ray.scripts import scripts

    with patient_start():
        scripts.main()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
