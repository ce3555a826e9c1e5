"""The world on a Ray cluster: place, environment and log of each rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from autotune.errors import LaunchError
from autotune.records import REAL_CONDITIONS, Conditions
from autotune.workload import Workload
from runtime_rewriter.scheduling import requested_conditions
from runtime_rewriter.world.command import launcher_threads
from runtime_rewriter.world.interfaces import GLOO_INTERFACE
from runtime_rewriter.world.placement import Launch
from runtime_rewriter.world.ray_actors import WorkerPlace
from runtime_rewriter.world.ray_bundles import Room
from runtime_rewriter.world.ray_cluster import CALL_TIMEOUT_S, RayCluster, RemoteWorker
from runtime_rewriter.world.ray_connection import LOOPBACK
from runtime_rewriter.world.running import Report
from runtime_rewriter.world.script_command import ScriptCommand
from runtime_rewriter.world.views import Protected
from runtime_rewriter.world.worker import Polled, WorkerLost, carried_environment
from runtime_rewriter.world.world import PROBE_S, StepPolicy, World

FIRST_CALL_TIMEOUT_S = 600.0
"""Time for the actors to come up, during which the code is sent to their hosts."""


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
        protected: Protected | None,
        environment: Mapping[str, str],
    ) -> None:
        self._cluster = cluster
        self._protected = protected
        self._command = command
        self._ports = master_ports
        self._conditions = conditions
        self._environment = environment
        self._group, actors = cluster.reserve(workers, rooms)
        try:
            places = _places(cluster, actors, first_call_timeout_s)
        except BaseException:
            cluster.release(self._group)  # no worker has a view yet
            raise
        nodes = list(dict.fromkeys(place.node for place in places))
        order = sorted(range(workers), key=lambda index: (nodes.index(places[index].node), index))
        self.workers = [actors[index] for index in order]
        self._places = [places[index] for index in order]
        for rank, (worker, placed) in enumerate(zip(self.workers, self._places, strict=True)):
            worker.name = f"rank {rank} on {placed.name} at {placed.address}"
        self._log_directory = log_directory

    @property
    def hosts(self) -> tuple[tuple[str, int], ...]:
        """Name and number of ranks of each host; nodes of one machine get a number."""
        names: dict[str, str] = {}
        for place in self._places:
            if place.node not in names:
                name = place.name
                names[place.node] = f"{name}-{len(names)}" if name in names.values() else name
        nodes = [place.node for place in self._places]
        return tuple((name, nodes.count(node)) for node, name in names.items())

    @property
    def addresses(self) -> tuple[str, ...]:
        """Address of each host, as Ray knows it; empty if all ranks are on this machine."""
        if self._cluster.place.same_files:
            return ()
        return tuple({place.node: place.address for place in self._places}.values())

    def launch(self) -> Launch:
        """Take a new master port for every start: the last one may still be in use."""
        place = self._cluster.place
        host = LOOPBACK if place.local else self._places[0].address
        port = self.workers[0].call("reserve_port", *self._ports, host)
        interface = "lo" if place.local else place.interface
        conditions = requested_conditions(self._conditions)
        environments = tuple(
            {
                **launcher_threads(self._command, on_host),
                **of_host,
                **self._environment,
                **of_rank,
                **self._command.environment,
                **conditions,
                **view,
            }
            for on_host, of_host, of_rank, view in zip(
                self._ranks_on_host(),
                map(_interface, self._places),
                _environments(self._places, host, port, interface),
                self._fresh_views(),
                strict=True,
            )
        )
        if self._command.mpirun_words:
            environments = tuple(map(_with_open_mpi, environments))
        return Launch(self._remote_command(), environments, place.directory, self._log_paths())

    def _ranks_on_host(self) -> list[int]:
        """By rank: how many ranks a launcher starts on its host. On one machine, which may emulate
        several hosts, they are those that the command states."""
        if self._cluster.place.same_files:
            stated = self._command.workers or len(self.workers)
            return [stated // self._command.nodes] * len(self.workers)
        nodes = [place.node for place in self._places]
        return [nodes.count(node) for node in nodes]

    def _fresh_views(self) -> list[dict[str, str]]:
        """By rank: variables of a view that the ranks of one machine share."""
        if self._protected is None:
            return [{} for _ in self.workers]
        arguments = self._protected, not self._cluster.place.directory
        first = self._first_workers().values()
        views = self._cluster.results(
            [(worker, "renew_view", arguments) for worker in first], CALL_TIMEOUT_S
        )
        of_machine = dict(zip(self._first_workers(), views, strict=True))
        return [of_machine[self._machine(place)].environment for place in self._places]

    def _machine(self, place: WorkerPlace) -> str:
        return "" if self._cluster.place.same_files else place.node

    def _first_workers(self) -> dict[str, RemoteWorker]:
        """By machine: the worker of its first rank."""
        pairs = reversed(list(zip(self._places, self.workers, strict=True)))
        return {self._machine(place): worker for place, worker in pairs}

    def _remote_command(self) -> ScriptCommand:
        """The command on the hosts: a script inside the sent directory has a relative path."""
        script = Path(self._command.target).resolve()
        same_path = self._cluster.place.directory or self._command.is_module
        if same_path or not script.is_relative_to(Path.cwd()):
            return self._command
        return replace(self._command, target=str(script.relative_to(Path.cwd())))

    def _log_paths(self) -> tuple[str, ...]:
        """Log files, in Ray's session directory on hosts without the job's directory."""
        job = self._log_directory.parent.name
        same_files = self._cluster.place.same_files
        directories = [
            self._log_directory if same_files else Path(place.logs) / f"autotune-{job}"
            for place in self._places
        ]
        return tuple(
            str(directory / f"rank{rank}.log") for rank, directory in enumerate(directories)
        )

    def poll(self, timeout_s: float) -> list[Polled]:
        """Poll all actors at once: a thousand ranks take as long as one."""
        calls = [(worker, "poll", (timeout_s,)) for worker in self.workers]
        return self._cluster.results(calls, CALL_TIMEOUT_S + timeout_s)

    def release(self) -> None:
        """End the actors with their processes, and free their room."""
        if self._protected is not None:
            # The view of a lost one ends with it; Ray may not answer.
            with contextlib.suppress(WorkerLost, LaunchError):
                first = self._first_workers().values()
                self._cluster.results(
                    [(worker, "end_view", ()) for worker in first], CALL_TIMEOUT_S
                )
        self._cluster.release(self._group)


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
    protected: Protected | None = None,
    keeps_training: bool = False,
    say: Report = lambda what: None,
) -> World:
    """The world of `command` on `workers` ranks of this Ray cluster.

    With several hosts in `devices_per_host`, each is a Ray node, at `addresses[host]` ("":
    any), and the first host's ranks come first. Otherwise Ray packs the ranks.
    `conditions` state what is emulated (the caller emulates the network). Emulated accelerators
    wait for the times of `given_profile`. Every start of the script gets a fresh view of the
    `protected` folders; None: its writes are real. `World` explains
    `keeps_training`; `say` gets what it waits for.

    Every start has this process's present environment: the tracker changes it later.
    """
    environment = carried_environment(dict(os.environ))
    rooms = tuple(
        (ranks, addresses[host] if host < len(addresses) else "")
        for host, ranks in enumerate(devices_per_host)
    )
    if len(rooms) > 1 and sum(devices_per_host) != workers:
        raise LaunchError(
            f"the devices of all hosts must add up to the {workers} workers, but are "
            f"{', '.join(map(str, devices_per_host))}"
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
            protected,
            environment,
        )

    return World(
        place,
        step_timeout_s,
        start_timeout_s,
        policy,
        conditions.accelerators,
        given_profile,
        probe_s,
        keeps_training,
        say,
    )


def _places(cluster: RayCluster, actors: list[RemoteWorker], timeout_s: float) -> list[WorkerPlace]:
    try:
        other_machines = not cluster.place.same_files
        return cluster.results([(actor, "place", (other_machines,)) for actor in actors], timeout_s)
    except WorkerLost as error:
        if not isinstance(error.__cause__, TimeoutError):
            raise
        raise LaunchError(
            f"all {len(actors)} workers must come up within {timeout_s:g} s, but did not; "
            "look at `ray status`"
        ) from error


def _interface(place: WorkerPlace) -> dict[str, str]:
    return {GLOO_INTERFACE: place.interface} if place.interface else {}


def _with_open_mpi(environment: dict[str, str]) -> dict[str, str]:
    """The place of a rank under the names that Open MPI gives its processes, too."""
    return environment | {
        f"OMPI_COMM_WORLD_{theirs}": environment[ours]
        for theirs, ours in (
            ("RANK", "RANK"),
            ("SIZE", "WORLD_SIZE"),
            ("LOCAL_RANK", "LOCAL_RANK"),
            ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
            ("NODE_RANK", "LOCAL_RANK"),
        )
    }


def _environments(
    places: list[WorkerPlace], host: str, port: int, interface: str
) -> Iterator[dict[str, str]]:
    """Torchrun's variables, for ranks sorted host by host."""
    members: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        members.setdefault(place.node, []).append(rank)
    nodes = list(members)
    for rank, place in enumerate(places):
        peers = members[place.node]
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(peers.index(rank)),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_WORLD_SIZE": str(len(peers)),
            "GROUP_RANK": str(nodes.index(place.node)),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(len(places)),
            "ROLE_NAME": "default",
            # Lightning takes ranks from the environment only if these are set.
            "TORCHELASTIC_RUN_ID": "autotune",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
        gpus = [gpu for peer in peers for gpu in places[peer].gpus]
        if gpus:  # scripts index the host's devices by LOCAL_RANK
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if interface:
            environment[GLOO_INTERFACE] = interface
        yield environment
