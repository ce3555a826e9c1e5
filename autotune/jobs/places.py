"""Start a script's ranks on a local Ray cluster, on a running one, or on a new testbed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from autotune.cluster import Cluster
from autotune.errors import InvalidInput, MissingExtra, install_extra
from autotune.records import Conditions, Network
from autotune.testbed.bed import entered, running
from autotune.testbed.capabilities import capabilities
from autotune.testbed.layout import lay_out, safe_name
from autotune.testbed.ray_nodes import ray_nodes
from autotune.tuning import statistics
from autotune.workload import Workload
from runtime_rewriter.world.ray_cluster import RayCluster
from runtime_rewriter.world.ray_connection import RayPlace
from runtime_rewriter.world.ray_world import ray_world
from runtime_rewriter.world.script_command import ScriptCommand
from runtime_rewriter.world.views import Protected
from runtime_rewriter.world.world import PROBE_S, World

NAME_CHARACTERS = 20
"""Characters of the cluster's name in the name of its testbed; the process id follows."""

Say = Callable[[str], None]
"""Receives one line for people: the step that the command is waiting for."""


@dataclass(frozen=True)
class Where:
    """`address` of a running Ray cluster, or None. `ports`: those that rank 0 may listen on.

    `RayPlace` explains `shared_directory` and `bare`.
    """

    address: str | None
    shared_directory: bool
    ports: tuple[int, int]
    bare: bool = False


@dataclass(frozen=True)
class Ranks:
    """A script on `workers` ranks, its log folder and its timeouts.

    `given_profile` holds the durations that emulated accelerators wait for; None: the measured
    ones. Links are probed for at most `probe_s`. The script sees a view of the `protected`
    folders; None: its writes are real. `World` explains `keeps_training`.
    """

    command: ScriptCommand
    workers: int
    log_directory: Path
    step_timeout_s: float
    start_timeout_s: float
    given_profile: Workload | None = None
    probe_s: float = PROBE_S
    protected: Protected | None = None
    keeps_training: bool = False


def refuse_impossible(cluster: Cluster, conditions: Conditions) -> None:
    """Raise an `AutotuneError` if this machine cannot emulate the network.

    Cheap; call it before anything is created or written.
    """
    if conditions.network is Network.EMULATED:
        able = capabilities()
        able.demand()
        lay_out(cluster, able.means, byte_scale=conditions.byte_scale)


def refuse_elsewhere(conditions: Conditions, address: str | None) -> None:
    """Raise `InvalidInput` if a job would continue on another kind of network."""
    if conditions.network is Network.HOSTS and address is None:
        raise InvalidInput(
            "the job was started on a running Ray cluster and can only continue on one; "
            "give its --address"
        )
    if conditions.network is not Network.HOSTS and address is not None:
        where = "a testbed" if conditions.network is Network.EMULATED else "this machine alone"
        raise InvalidInput(
            f"the job was started on {where} and can only continue there; leave out --address"
        )


@contextlib.contextmanager
def placed_world(
    where: Where, cluster: Cluster, conditions: Conditions, ranks: Ranks, say: Say
) -> Iterator[World]:
    """Run the script's ranks on Ray, with a testbed of `cluster` if the network is emulated.

    Everything that was started ends with the block.
    """
    with _ray(where, cluster, conditions, ranks.workers, say) as (ray, addresses):
        layout = tuple(host.devices for host in cluster.hosts)
        if len(layout) == 1 and ranks.command.nodes > 1:
            layout = (ranks.workers // ranks.command.nodes,) * ranks.command.nodes
        if ray.place.local:
            layout = ()  # a private local cluster is one node, whatever cluster it represents
        world = ray_world(
            ray,
            ranks.command,
            ranks.workers,
            ranks.log_directory,
            ranks.step_timeout_s,
            ranks.start_timeout_s,
            statistics,
            where.ports,
            layout,
            addresses,
            conditions=conditions,
            given_profile=ranks.given_profile,
            probe_s=ranks.probe_s,
            protected=ranks.protected,
            keeps_training=ranks.keeps_training,
            say=say,
        )
        try:
            yield world
        finally:
            world.close()


@contextlib.contextmanager
def _ray(
    where: Where, cluster: Cluster, conditions: Conditions, workers: int, say: Say
) -> Iterator[tuple[RayCluster, tuple[str, ...]]]:
    """Yield the connection and the address of each host of the cluster."""
    if find_spec("ray") is None:
        raise MissingExtra(
            f"the ranks run as Ray actors, but Ray is not installed; {install_extra('tune')}",
            anchor="no-ray",
        )
    if conditions.network is not Network.EMULATED:
        say("starting Ray" if where.address is None else f"connecting to Ray at {where.address}")
        place = RayPlace(where.address, where.shared_directory, bare=where.bare)
        with _connected(place, workers) as ray:
            yield ray, tuple(host.address for host in cluster.hosts)
        return
    say(f"building a testbed of {len(cluster.hosts)} hosts")
    # Two jobs may emulate the same cluster at the same time.
    name = f"{safe_name(cluster.name)[:NAME_CHARACTERS]}-{os.getpid()}"
    with running(cluster, name=name, byte_scale=conditions.byte_scale) as bed:
        say(f"starting Ray on the first host of testbed {bed.name}")
        with ray_nodes(bed, say) as head, entered(bed.hosts[0].namespace):
            place = RayPlace(
                head.address,
                one_machine=True,
                node_address=bed.hosts[0].address,
                interface=bed.interface,
                token=head.token,
            )
            with _connected(place, workers) as ray:
                yield ray, tuple(host.address for host in bed.hosts)


@contextlib.contextmanager
def _connected(place: RayPlace, workers: int) -> Iterator[RayCluster]:
    ray = RayCluster(place, workers)
    try:
        yield ray
    finally:
        ray.close()
