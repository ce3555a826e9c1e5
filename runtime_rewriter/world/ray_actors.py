"""The actor of one rank on its host, and calls to it from the driver."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.deadlines import SLICE_S
from autotune.errors import AutotuneError
from runtime_rewriter.file_view import FileView
from runtime_rewriter.world.interfaces import GLOO_INTERFACE, interface_for_gloo
from runtime_rewriter.world.ray_connection import in_one_line, not_shipped
from runtime_rewriter.world.views import HeldView, Protected, held_view
from runtime_rewriter.world.worker import ProcessSupervisor, WorkerLost, free_port


@dataclass(frozen=True)
class WorkerPlace:
    """The node that an actor is on. `logs`: directory of Ray's session there.

    `interface`: that of gloo, if its own choice would not reach other machines ("": it does).
    """

    node: str
    name: str
    address: str
    gpus: tuple[str, ...]
    logs: str
    interface: str


class RankActor(ProcessSupervisor):
    """The supervisor, the place it is on, and the view of files that its host's ranks share."""

    _view: HeldView | None = None

    def place(self, other_machines: bool) -> WorkerPlace:
        """Where this actor is; `other_machines`: it may have to reach ranks on them."""
        import ray
        import ray._private.worker

        context = ray.get_runtime_context()
        node: Any = ray._private.worker._global_node  # the only source of the session directory
        name = socket.gethostname()
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        chosen = GLOO_INTERFACE in os.environ or not other_machines
        return WorkerPlace(
            node=context.get_node_id(),
            name=name,
            address=address,
            gpus=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
            logs=str(node.get_logs_dir_path()),
            interface="" if chosen else interface_for_gloo(address, name),
        )

    def reserve_port(self, first: int, last: int, host: str) -> int:
        return free_port(first, last, host)

    def renew_view(self, protected: Protected, own_directory: bool) -> FileView:
        """Make a fresh view in place of the last one, with `own_directory` also of ours.

        Raises `LaunchError`.
        """
        self.end_view()
        directories = (str(Path.cwd()),) if own_directory else ()
        self._view = held_view(protected.here(directories), socket.gethostname())
        return self._view.view

    def end_view(self) -> None:
        if self._view is not None:
            self._view.end()
            self._view = None


def fetch(references: Any, timeout_s: float) -> Any:
    """The results of calls to actors.

    It may block for longer: see `RayCluster.ask`. Raises the actor's own error if it is an
    `AutotuneError`, `LaunchError` if the code cannot be sent to its host, and `WorkerLost`
    otherwise.
    """
    import ray

    try:
        return _results(references, timeout_s)
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise not_shipped(error) from error
    except ray.exceptions.RayTaskError as error:
        cause = error.as_instanceof_cause()  # type: ignore[no-untyped-call]
        ours = cause if isinstance(cause, AutotuneError) else WorkerLost(in_one_line(cause))
        raise ours from error
    except ray.exceptions.RayError as error:
        raise WorkerLost(in_one_line(error)) from error


def _results(references: Any, timeout_s: float) -> Any:
    """Wait in slices, of which a pause of this process ends one: see `Call.result`."""
    import ray

    left_s = timeout_s
    while True:
        try:
            return ray.get(references, timeout=min(left_s, SLICE_S))
        except ray.exceptions.GetTimeoutError:
            left_s -= SLICE_S
            if left_s <= 0:
                raise
