"""The world on a Ray cluster: one actor per rank in a placement group, local by default, any cluster by address."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, LaunchError
from runtime_rewriter.command import ScriptCommand
from runtime_rewriter.worker import ProcessSupervisor, WorkerLost, free_port
from runtime_rewriter.world import Launch, World

CALL_TIMEOUT_S = 60.0
PLACEMENT_TIMEOUT_S = 60.0
LOOPBACK = "127.0.0.1"


class _Actor(ProcessSupervisor):
    """The supervisor plus what the driver must know about the place it landed on."""

    def place(self) -> dict[str, Any]:
        import ray

        context = ray.get_runtime_context()
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return {"node": context.get_node_id(), "address": address, "gpus": [str(gpu) for gpu in ray.get_gpu_ids()]}

    def reserve_port(self, first: int, last: int, host: str) -> int:
        return free_port(first, last, host)

    def working_directory(self) -> str:
        return str(Path.cwd())


class _RemoteWorker:
    """Implements `Worker` by calls to an actor, each with a timeout."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def call(self, method: str, *arguments: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self.actor, method).remote(*arguments), timeout=CALL_TIMEOUT_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise WorkerLost(str(error).strip().splitlines()[0]) from error
        except ray.exceptions.RayTaskError as error:
            cause = error.as_instanceof_cause()  # type: ignore[no-untyped-call]
            raise (cause if isinstance(cause, AutotuneError) else WorkerLost(str(cause))) from error

    def start(self, words: list[str], environment: dict[str, str], directory: str, log_path: str) -> None:
        self.call("start", words, environment, directory, log_path)

    def instruct(self, message: dict[str, Any]) -> None:
        self.call("instruct", message)

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.call("poll", timeout_s)
        return events

    def stop(self) -> None:
        self.call("stop")


class RayCluster:
    """A connection to Ray. Without an address a private cluster is started: loopback only, with a token."""

    def __init__(self, address: str | None, workers: int) -> None:
        self.local = address is None
        if self.local:
            # Ray binds the first real interface unless this is off, and is open to everybody without a token.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        import ray

        quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": False}
        try:
            if self.local:
                ray.init(
                    address="local",
                    num_cpus=workers,  # a slot per rank, however many cores there are
                    include_dashboard=False,
                    object_store_memory=100_000_000,
                    _node_ip_address=LOOPBACK,
                    **quiet,
                )
            else:
                ray.init(address=address, runtime_env=_shipped_code(), **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = "a local Ray cluster could not be started" if self.local else f"the Ray cluster at {address!r} cannot be reached"
            raise LaunchError(f"{where}: {str(error).strip().splitlines()[0]}; check `ray status` and the address") from error

    def reserve(self, workers: int) -> tuple[Any, list[_RemoteWorker]]:
        """A placement group and one actor per rank in it; raises `LaunchError` if the cluster has no room."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        per_rank = {"CPU": 1.0} | ({"GPU": 1.0} if total.get("GPU", 0) >= workers else {})
        group = placement_group([per_rank] * workers, strategy="PACK")
        if not group.wait(PLACEMENT_TIMEOUT_S):
            remove_placement_group(group)
            cpus = f"{total.get('CPU', 0):.0f} CPUs"
            raise LaunchError(f"the Ray cluster has no room for {workers} workers of {per_rank} each; it has {cpus}, perhaps in use")
        actor_class = ray.remote(_Actor)
        pinned = [PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index) for index in range(workers)]
        options = {"num_cpus": 1, "num_gpus": per_rank.get("GPU", 0)}
        return group, [_RemoteWorker(actor_class.options(scheduling_strategy=place, **options).remote()) for place in pinned]

    def close(self) -> None:
        import ray

        ray.shutdown()


class _RayPlacement:
    """Implements `Placement`: actors sorted host by host, pinned to their bundles."""

    def __init__(
        self, cluster: RayCluster, command: ScriptCommand, workers: int, log_directory: Path, master_ports: tuple[int, int]
    ) -> None:
        self._cluster, self._command, self._ports = cluster, command, master_ports
        self._group, actors = cluster.reserve(workers)
        found = [actor.call("place") for actor in actors]
        order = sorted(range(workers), key=lambda index: (found[index]["node"] != found[0]["node"], found[index]["node"], index))
        self.workers = [actors[index] for index in order]
        self._places = [found[index] for index in order]
        # On a remote host the user's directory may not exist.
        self._logs = log_directory if cluster.local else Path(tempfile.gettempdir()) / f"autotune-logs-{log_directory.parent.name}"

    def launch(self) -> Launch:
        """A fresh master port for every start: the last one may linger."""
        host = LOOPBACK if self._cluster.local else self._places[0]["address"]
        port = self.workers[0].call("reserve_port", *self._ports, host)
        directory = str(Path.cwd()) if self._cluster.local else self.workers[0].call("working_directory")
        return Launch(self._command, _environments(self._places, host, port, self._cluster.local), directory, str(self._logs))

    def poll(self, timeout_s: float) -> list[list[dict[str, Any]]]:
        """All actors at once, so that a thousand ranks take as long as one."""
        import ray

        try:
            polled: list[list[dict[str, Any]]] = ray.get(
                [worker.actor.poll.remote(timeout_s) for worker in self.workers], timeout=CALL_TIMEOUT_S + timeout_s
            )
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            raise WorkerLost(str(error).strip().splitlines()[0]) from error
        return polled

    def release(self) -> None:
        """Ends the actors (and with them their processes) and frees their room."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


def ray_world(
    cluster: RayCluster,
    command: ScriptCommand,
    workers: int,
    log_directory: Path,
    step_timeout_s: float,
    start_timeout_s: float,
    master_ports: tuple[int, int] = (0, 0),
) -> World:
    """The world of `command` on `workers` ranks of this Ray cluster."""
    return World(lambda: _RayPlacement(cluster, command, workers, log_directory, master_ports), step_timeout_s, start_timeout_s)


def _environments(places: list[dict[str, Any]], host: str, port: int, local: bool) -> tuple[dict[str, str], ...]:
    """The variables that torchrun would set, for ranks that are sorted host by host."""
    nodes: list[str] = []
    members: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        if place["node"] not in members:
            nodes.append(place["node"])
        members.setdefault(place["node"], []).append(rank)
    found = []
    for rank, place in enumerate(places):
        peers = members[place["node"]]
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(peers.index(rank)),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_WORLD_SIZE": str(len(peers)),
            "GROUP_RANK": str(nodes.index(place["node"])),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # torchrun's own default
        }
        gpus = [gpu for peer in peers for gpu in places[peer]["gpus"]]
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # scripts index the host's devices by LOCAL_RANK
        if local:
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        found.append(environment)
    return tuple(found)


def _shipped_code() -> dict[str, Any]:
    """What a remote worker needs: the user's directory and our two packages, without data and caches."""
    import autotune
    import runtime_rewriter

    packages = [str(Path(package.__file__).parent) for package in (autotune, runtime_rewriter) if package.__file__]
    return {"working_dir": str(Path.cwd()), "py_modules": packages, "excludes": [".git", ".venv", "autotune-jobs", "*.db", "__pycache__"]}
