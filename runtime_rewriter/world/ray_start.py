"""Starts a private Ray cluster in less time than `ray.init` alone takes.

Ray has no public way to do so: `ray.init` lacks the options of `ray start` that leave out servers,
and looks for its node once a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from autotune.patient_ray import patient_start


@contextlib.contextmanager
def quick_start() -> Iterator[None]:
    """Within it, `ray.init` starts no autoscaler, monitor of logs or dashboard, and goes on as soon
    as its node is registered.

    Nobody reads what these would collect, and each takes a core for a part of a second.
    """
    from ray._private import node, services

    def lean_node(ray_params: Any, *arguments: Any, **options: Any) -> Any:
        ray_params.no_monitor, ray_params.include_log_monitor = True, False
        return own_node(ray_params, *arguments, **options)

    def no_dashboard(*arguments: Any, **options: Any) -> tuple[None, None]:
        """As if it had failed to start. `include_dashboard=False` starts the process, too."""
        return None, None

    own_node: Callable[..., Any] = node.Node
    own_start: Callable[..., Any] = services.start_api_server
    node.Node, services.start_api_server = lean_node, no_dashboard  # type: ignore[misc, assignment]
    try:
        with patient_start():
            yield
    finally:
        node.Node, services.start_api_server = own_node, own_start  # type: ignore[misc, assignment]
