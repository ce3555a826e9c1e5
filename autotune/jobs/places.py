"""Where a job runs: on a private local Ray cluster, on a running one, or on a testbed that is made for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.records import Conditions, Network
from autotune.testbed.bed import entered, running
from autotune.testbed.capabilities import capabilities
from autotune.testbed.layout import lay_out, safe_name
from autotune.testbed.ray_nodes import ray_nodes
from autotune.tuning import statistics
from autotune.workload import Workload
from runtime_rewriter.world.command import ScriptCommand
from runtime_rewriter.world.ray_world import RayCluster, RayPlace, ray_world
from runtime_rewriter.world.world import PROBE_S, World

NAME_CHARACTERS = 20
"""Of a cluster's name in that of its testbed, besides the process id."""

Say = Callable[[str], None]
"""Takes one line for people about what is being waited for."""


@dataclass(frozen=True)
class Where:
    """`address` of a running Ray cluster, or None; see `RayPlace`, also for `bare`. `ports`: those that rank 0 may listen on."""

    address: str | None
    shared_directory: bool
    ports: tuple[int, int]
    bare: bool = False


@dataclass(frozen=True)
class Ranks:
    """What is to run: a script on so many ranks, where its output goes, and how long it may be silent.

    `given_profile` is what emulated accelerators wait for; None: what one replica alone takes. Links are probed for at most `probe_s`.
    """

    command: ScriptCommand
    workers: int
    log_directory: Path
    step_timeout_s: float
    start_timeout_s: float
    given_profile: Workload | None = None
    probe_s: float = PROBE_S


def refuse_impossible(cluster: Cluster, conditions: Conditions) -> None:
    """Raises where the network is to be emulated and this machine cannot; cheap, and before anything is made or written."""
    if conditions.network is Network.EMULATED:
        able = capabilities()
        able.demand()
        lay_out(cluster, able.means, byte_scale=conditions.byte_scale)


def refuse_elsewhere(conditions: Conditions, address: str | None) -> None:
    """Trials of one job are comparable only where they ran on the same kind of network."""
    if conditions.network is Network.HOSTS and address is None:
        raise InvalidInput(
            "the job was started on a running Ray cluster, so it goes on on one; give its --address"
        )
    if conditions.network is not Network.HOSTS and address is not None:
        where = "a testbed" if conditions.network is Network.EMULATED else "this machine alone"
        raise InvalidInput(
            f"the job was started on {where}, so it goes on there; leave out --address"
        )


@contextlib.contextmanager
def placed_world(
    where: Where, cluster: Cluster, conditions: Conditions, ranks: Ranks, say: Say
) -> Iterator[World]:
    """The script's ranks on Ray, on a testbed of `cluster` where the network is emulated; all of it ends with the block."""
    with _ray(where, cluster, conditions, ranks.workers, say) as (ray, addresses):
        layout = tuple(host.devices for host in cluster.hosts)
        if len(layout) == 1 and ranks.command.nodes > 1:
            layout = (ranks.workers // ranks.command.nodes,) * ranks.command.nodes
        world = ray_world(
            ray,
            ranks.command,
            ranks.workers,
            ranks.log_directory,
            ranks.step_timeout_s,
            ranks.start_timeout_s,
            statistics,
            where.ports,
            ()
            if ray.place.local
            else layout,  # a private local cluster is one node, whatever it stands for
            addresses,
            conditions=conditions,
            given_profile=ranks.given_profile,
            probe_s=ranks.probe_s,
        )
        try:
            yield world
        finally:
            world.close()


@contextlib.contextmanager
def _ray(
    where: Where, cluster: Cluster, conditions: Conditions, workers: int, say: Say
) -> Iterator[tuple[RayCluster, tuple[str, ...]]]:
    """The connection, and the address of each of the cluster's hosts in it."""
    if conditions.network is not Network.EMULATED:
        with _connected(
            RayPlace(where.address, where.shared_directory, bare=where.bare), workers
        ) as ray:
            yield ray, tuple(host.address for host in cluster.hosts)
        return
    say(f"building a testbed of {len(cluster.hosts)} hosts")
    name = f"{safe_name(cluster.name)[:NAME_CHARACTERS]}-{os.getpid()}"  # several jobs may emulate the same cluster side by side
    with running(cluster, name=name, byte_scale=conditions.byte_scale) as bed:
        say(f"starting Ray on the {len(bed.hosts)} hosts of testbed {bed.name}")
        with ray_nodes(bed) as head, entered(bed.hosts[0].namespace):
            address = bed.hosts[0].address
            place = RayPlace(
                head.address,
                one_machine=True,
                node_address=address,
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
