"""The world on a Ray cluster: where each rank runs, with which environment, and where its output goes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.errors import LaunchError
from autotune.records import REAL_CONDITIONS, Conditions
from autotune.workload import Workload
from runtime_rewriter.scheduling import asked_of_ranks
from runtime_rewriter.world.command import ScriptCommand
from runtime_rewriter.world.placement import Launch
from runtime_rewriter.world.ray_cluster import CALL_TIMEOUT_S, LOOPBACK, RemoteWorker, Room, fetch
from runtime_rewriter.world.ray_cluster import (
    RayCluster as RayCluster,  # who builds a world connects first
)
from runtime_rewriter.world.ray_cluster import RayPlace as RayPlace
from runtime_rewriter.world.worker import Polled, WorkerLost, carried_environment
from runtime_rewriter.world.world import PROBE_S, StepPolicy, World

FIRST_CALL_TIMEOUT_S = 600.0
"""How long the actors may take to come up: before that the code is sent to their hosts."""


class _RayPlacement:
    """Implements `Placement`: actors sorted host by host, pinned to their bundles."""

    def __init__(
        self,
        cluster: RayCluster,
        command: ScriptCommand,
        workers: int,
        rooms: tuple[Room, ...],
        log_directory: Path,
        master_ports: tuple[int, int],
        first_call_timeout_s: float,
        conditions: Conditions,
    ) -> None:
        self._cluster, self._command, self._ports, self._conditions = (
            cluster,
            command,
            master_ports,
            conditions,
        )
        self._group, actors = cluster.reserve(workers, rooms)
        try:
            found = _places(actors, first_call_timeout_s)
        except BaseException:
            self.release()
            raise
        nodes = list(dict.fromkeys(place["node"] for place in found))
        order = sorted(range(workers), key=lambda index: (nodes.index(found[index]["node"]), index))
        self.workers = [actors[index] for index in order]
        self._places = [found[index] for index in order]
        self._log_directory = log_directory

    @property
    def hosts(self) -> tuple[tuple[str, int], ...]:
        """Name and number of ranks of each; nodes that share a machine get its name with their number."""
        names: dict[str, str] = {}
        for place in self._places:
            if place["node"] not in names:
                name = place["name"]
                names[place["node"]] = f"{name}-{len(names)}" if name in names.values() else name
        nodes = [place["node"] for place in self._places]
        return tuple((name, nodes.count(node)) for node, name in names.items())

    def launch(self) -> Launch:
        """A fresh master port for every start: the last one may linger."""
        where = self._cluster.place
        host = LOOPBACK if where.local else self._places[0]["address"]
        port = self.workers[0].call("reserve_port", *self._ports, host)
        environments = _environments(
            self._places, host, port, "lo" if where.local else where.interface
        )
        environments = tuple(
            {**environment, **asked_of_ranks(self._conditions)} for environment in environments
        )
        return Launch(self._sent_command(), environments, where.directory, self._log_paths())

    def _sent_command(self) -> ScriptCommand:
        """A script inside a directory that is sent along is found there by its relative path."""
        script = Path(self._command.target)
        if (
            self._cluster.place.directory
            or self._command.is_module
            or not script.resolve().is_relative_to(Path.cwd())
        ):
            return self._command
        return replace(self._command, target=str(script.resolve().relative_to(Path.cwd())))

    def _log_paths(self) -> tuple[str, ...]:
        """On another host the job's directory may not exist: there the session directory of Ray keeps the output."""
        job = self._log_directory.parent.name
        here = self._cluster.place.same_files
        directories = [
            self._log_directory if here else Path(place["logs"]) / f"autotune-{job}"
            for place in self._places
        ]
        return tuple(
            str(directory / f"rank{rank}.log") for rank, directory in enumerate(directories)
        )

    def poll(self, timeout_s: float) -> list[Polled]:
        """Poll all actors at once: a thousand ranks take as long as one."""
        references = [worker.actor.poll.remote(timeout_s) for worker in self.workers]
        polled: list[Polled] = fetch(references, CALL_TIMEOUT_S + timeout_s)
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
    policy: StepPolicy,
    master_ports: tuple[int, int] = (0, 0),
    devices_per_host: tuple[int, ...] = (),
    addresses: tuple[str, ...] = (),
    first_call_timeout_s: float = FIRST_CALL_TIMEOUT_S,
    conditions: Conditions = REAL_CONDITIONS,
    given_profile: Workload | None = None,
    probe_s: float = PROBE_S,
) -> World:
    """The world of `command` on `workers` ranks of this Ray cluster.

    `devices_per_host` of two hosts or more is kept: the first host's ranks come first, each host is a Ray node of its
    own, at `addresses[host]` where that is the address of one. With one host or none given, Ray packs the ranks.
    `conditions` say what is emulated (the network is not made here); `given_profile` is what emulated accelerators wait for.
    """
    rooms = tuple(
        (ranks, addresses[host] if host < len(addresses) else "")
        for host, ranks in enumerate(devices_per_host)
    )
    if len(rooms) > 1 and sum(devices_per_host) != workers:
        raise LaunchError(
            f"the devices of all hosts must add up to the {workers} workers, but are {', '.join(map(str, devices_per_host))}"
        )

    def place() -> _RayPlacement:
        return _RayPlacement(
            cluster,
            command,
            workers,
            rooms,
            log_directory,
            master_ports,
            first_call_timeout_s,
            conditions,
        )

    return World(
        place,
        step_timeout_s,
        start_timeout_s,
        policy,
        conditions.accelerators,
        given_profile,
        probe_s,
    )


def _places(actors: list[RemoteWorker], timeout_s: float) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = fetch(
            [actor.actor.place.remote() for actor in actors], timeout_s
        )
    except WorkerLost as error:
        if not isinstance(error.__cause__, TimeoutError):
            raise
        raise LaunchError(
            f"all {len(actors)} workers must come up within {timeout_s:g} s, but did not; look at `ray status`"
        ) from error
    return found


def _environments(
    places: list[dict[str, Any]], host: str, port: int, interface: str
) -> tuple[dict[str, str], ...]:
    """The driver's environment and the variables that torchrun would set, for ranks that are sorted host by host."""
    members: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        members.setdefault(place["node"], []).append(rank)
    nodes = list(members)
    found = []
    for rank, place in enumerate(places):
        peers = members[place["node"]]
        environment = carried_environment(dict(os.environ)) | {
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
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(
                gpus
            )  # scripts index the host's devices by LOCAL_RANK
        if interface:
            environment["GLOO_SOCKET_IFNAME"] = interface
        found.append(environment)
    return tuple(found)
