"""The world on a Ray cluster: one actor per rank in a placement group, local by default, any cluster by address."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, LaunchError
from runtime_rewriter.command import ScriptCommand
from runtime_rewriter.worker import ProcessSupervisor, Worker, free_port
from runtime_rewriter.world import POLL_S, Launch, World

CALL_TIMEOUT_S = 60.0
PLACEMENT_TIMEOUT_S = 60.0
LOOPBACK = "127.0.0.1"


class _WorkerLost(AutotuneError):
    """A Ray actor died or does not answer."""


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
            raise _WorkerLost(str(error).strip().splitlines()[0]) from error
        except ray.exceptions.RayTaskError as error:
            cause = error.as_instanceof_cause()  # type: ignore[no-untyped-call]
            raise (cause if isinstance(cause, AutotuneError) else _WorkerLost(str(cause))) from error

    def start(self, words: list[str], environment: dict[str, str], directory: str, log_path: str) -> None:
        self.call("start", words, environment, directory, log_path)

    def instruct(self, message: dict[str, Any]) -> None:
        self.call("instruct", message)

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.call("poll", timeout_s)
        return events

    def stop(self) -> None:
        self.call("stop")


def _poll_all(workers: Sequence[Worker], timeout_s: float) -> list[list[dict[str, Any]]]:
    """Poll every actor at once, so that a thousand ranks take as long as one."""
    import ray

    actors = [worker.actor for worker in workers if isinstance(worker, _RemoteWorker)]
    try:
        polled: list[list[dict[str, Any]]] = ray.get([actor.poll.remote(timeout_s) for actor in actors], timeout=CALL_TIMEOUT_S + POLL_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        raise _WorkerLost(str(error).strip().splitlines()[0]) from error
    return polled


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

    def place(self, workers: int) -> list[_RemoteWorker]:
        """One actor per rank, sorted host by host; raises `LaunchError` if the cluster has no room."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        per_rank = {"CPU": 1.0} | ({"GPU": 1.0} if total.get("GPU", 0) >= workers else {})
        group = placement_group([per_rank] * workers, strategy="PACK")
        if not group.wait(PLACEMENT_TIMEOUT_S):
            remove_placement_group(group)
            raise LaunchError(
                f"the Ray cluster has no room for {workers} workers of {per_rank} each; it has {total.get('CPU', 0):.0f} CPUs"
            )
        actor_class = ray.remote(_Actor)
        placed = [
            _RemoteWorker(
                actor_class.options(
                    num_cpus=1,
                    num_gpus=per_rank.get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index),
                ).remote()
            )
            for index in range(workers)
        ]
        places = [worker.call("place") for worker in placed]
        order = sorted(range(workers), key=lambda index: (places[index]["node"] != places[0]["node"], places[index]["node"], index))
        return [placed[index] for index in order]

    def close(self) -> None:
        import ray

        ray.shutdown()


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

    def place() -> tuple[Sequence[Worker], Any]:
        placed = cluster.place(workers)
        places = [worker.call("place") for worker in placed]

        def launch() -> Launch:
            host = LOOPBACK if cluster.local else places[0]["address"]
            port = placed[0].call("reserve_port", *master_ports, host)
            directory = str(Path.cwd()) if cluster.local else placed[0].call("working_directory")
            logs = log_directory if cluster.local else Path(tempfile.gettempdir()) / f"autotune-logs-{log_directory.name}"
            return Launch(command, _environments(places, host, port, cluster.local), directory, str(logs))

        return placed, launch

    return World(place, _poll_all, step_timeout_s, start_timeout_s)


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
