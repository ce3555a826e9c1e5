"""One `tf.distribute.Server` per rank, on a network where nobody else can reach it.

The ranks agree on versions, network, ports and start, so that a fault of one is raised on all.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from autotune.errors import LaunchError, install_extra
from runtime_rewriter.agent_store import AgentStore
from runtime_rewriter.private_network import (
    ISOLATED,
    NETWORK,
    TRUSTED,
    NetworkNamespace,
    new_network_namespace,
    refusal,
)
from runtime_rewriter.rendezvous import Facts, Peers, meet

v1 = tf.compat.v1

JOB = "worker"
LEADER = f"/job:{JOB}/replica:0/task:0"
LOOPBACK = "127.0.0.1"
OLDEST, FIRST_UNTESTED = (2, 21), (3, 0)
"""Versions of TensorFlow: the rewriter reads internals that others may not have."""
FEWEST_INTER_OP_THREADS = 4
"""A replica's computation, its messages and its updates run side by side."""
SERVER = "tf.distribute.Server"


@dataclass(frozen=True)
class RankPlace:
    """A rank of a launched script. `address`, `port`: where rank 0 waits for the others.

    `network`: the value of AUTOTUNE_NETWORK. `agent`: torchrun's, if it has that port.
    `local_rank`, `local_size`: the place on its host and the number of ranks there, or -1.
    """

    rank: int
    world_size: int
    one_host: bool
    address: str
    port: int
    network: str = ""
    local_rank: int = -1
    local_size: int = -1
    agent: AgentStore | None = None

    @staticmethod
    def of(environment: Mapping[str, str]) -> RankPlace | None:
        """The place that a launcher has put into the environment; None for a script alone."""
        size = int(environment.get("WORLD_SIZE", "1"))
        if size < 2:
            return None
        missing = [
            name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment
        ]
        if missing:
            raise LaunchError(
                f"a rank needs {', '.join(missing)} beside WORLD_SIZE in its environment; start "
                "the script by `autotune tune -- python train.py` or by torchrun"
            )
        return RankPlace(
            int(environment["RANK"]),
            size,
            environment.get("LOCAL_WORLD_SIZE") == str(size),
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            environment.get(NETWORK, ""),
            int(environment.get("LOCAL_RANK", "-1")),
            int(environment.get("LOCAL_WORLD_SIZE", "-1")),
            AgentStore.of(environment),
        )


@dataclass(frozen=True)
class Servers:
    """The started servers. `target`: what a session of this rank connects to."""

    place: RankPlace
    peers: Peers
    target: str
    own: Any = field(repr=False)
    hosts: tuple[tuple[int, ...], ...] = ()
    """The ranks of each host; empty if a rank does not know its place."""

    @property
    def config(self) -> Any:
        return session_config()

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(
            f"/job:{JOB}/replica:0/task:{rank}/device:CPU:0"
            for rank in range(self.place.world_size)
        )


def session_config() -> Any:
    """The configuration of every server and session: nothing but the plan moves nodes."""
    threads = int(os.environ.get("OMP_NUM_THREADS", "0"))  # launchers share the cores by it
    config = v1.ConfigProto(
        intra_op_parallelism_threads=threads,
        inter_op_parallelism_threads=max(FEWEST_INTER_OP_THREADS, threads),
    )
    config.experimental.collective_group_leader = LEADER
    config.graph_options.optimizer_options.opt_level = -1
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def start_servers(place: RankPlace, timeout_s: float) -> Servers:
    """Start this rank's server together with those of all ranks.

    This thread enters a network namespace if one is needed. Raises `LaunchError` on every rank if
    one of them cannot start.
    """
    peers, addresses = agree_on_addresses(place, timeout_s)
    specification = tf.train.ClusterSpec({JOB: addresses})
    server: list[Any] = []
    together = _together(place, peers, timeout_s)
    together(_first, lambda: _start(specification, place.rank, server))
    hosts = together(_hosts, lambda: {"local": (place.local_rank, place.local_size)})
    by_host = tuple(tuple(ranks) for ranks in hosts["hosts"])
    return Servers(place, peers, server[0].target, server[0], by_host)


def agree_on_addresses(place: RankPlace, timeout_s: float) -> tuple[Peers, list[str]]:
    """Meet all ranks, and agree on versions, the network, and a free port for each server.

    This thread enters a network namespace if one is needed. Raises `LaunchError` on every rank if
    one of them finds a fault.
    """
    peers = meet(place.rank, place.world_size, place.address, place.port, timeout_s, place.agent)
    together = _together(place, peers, timeout_s)
    together(_same_versions, versions)
    namespace = together(_first, lambda: _network(place))
    if place.rank > 0 and namespace:
        together(_first, lambda: _enter(namespace))
    elif namespace:
        together(_first, dict)
    hosts = peers.addresses if not namespace else (LOOPBACK,) * place.world_size
    with reserved_port() as port:
        cluster = together(lambda ports: _cluster(hosts, ports), lambda: {"port": port})
    addresses: list[str] = cluster["addresses"]
    return peers, addresses


def _together(place: RankPlace, peers: Peers, timeout_s: float) -> Callable[..., Facts]:
    """Each rank finds its facts, and rank 0 decides; a rank's `LaunchError` is raised on all."""

    def together(decide: Callable[[list[Facts]], Facts], find: Callable[[], Facts]) -> Facts:
        try:
            facts = find()
        except LaunchError as error:
            facts = {"problem": f"rank {place.rank}: {error}" if place.rank else str(error)}
        return peers.agree(facts, decide, timeout_s)

    return together


def _hosts(facts: list[Facts]) -> Facts:
    """Group the ranks by host. They are numbered host by host."""
    places = [tuple(each["local"]) for each in facts]
    hosts: dict[int, list[int]] = {}
    for rank, (local_rank, _) in enumerate(places):
        hosts.setdefault(rank - local_rank, []).append(rank)
    consistent = all(
        0 <= local_rank < local_size and len(hosts[rank - local_rank]) == local_size
        for rank, (local_rank, local_size) in enumerate(places)
    )
    return {"hosts": [hosts[first] for first in sorted(hosts)] if consistent else []}


def _first(facts: list[Facts]) -> Facts:
    return facts[0]


def versions(tensorflow: str = tf.__version__) -> Facts:
    """Versions that all ranks must share. Raises `LaunchError` for an untested TensorFlow."""
    version = tuple(int(part) for part in tensorflow.split(".")[:2])
    if not OLDEST <= version < FIRST_UNTESTED:
        raise LaunchError(
            f"TensorFlow must be at least {'.'.join(map(str, OLDEST))} and below "
            f"{'.'.join(map(str, FIRST_UNTESTED))}, but is {tensorflow}; "
            + install_extra("tensorflow")
        )
    return {
        "TensorFlow": tensorflow,
        "Python": platform.python_version(),
        "byte order": sys.byteorder,
    }


def _same_versions(facts: list[Facts]) -> Facts:
    for name in facts[0]:
        for rank, other in enumerate(facts):
            if other.get(name) != facts[0][name]:
                raise LaunchError(
                    f"{name} must be the same on every rank, but is {facts[0][name]} on rank 0 and "
                    f"{other.get(name)} on rank {rank}; install the same versions on every host"
                )
    return {}


def _network(place: RankPlace) -> Facts:
    """Return nothing on a network that may be used, or the namespace that rank 0 has entered."""
    if place.network in (ISOLATED, TRUSTED) or place.rank > 0:
        return {}
    if not place.one_host:
        raise refusal(SERVER, "the ranks are on several hosts of an ordinary network")
    try:
        namespace = new_network_namespace()
    except OSError as error:
        why = f"this machine gives the ranks no namespace of their own ({error.strerror})"
        raise refusal(SERVER, why) from error
    return {"path": namespace.path, "inode": namespace.inode}


def _enter(namespace: Facts) -> Facts:
    NetworkNamespace(namespace["path"], namespace["inode"]).enter()
    return {}


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else gets within the block."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        yield taken.getsockname()[1]


def _cluster(addresses: tuple[str, ...], ports: list[Facts]) -> Facts:
    pairs = zip(addresses, ports, strict=True)
    return {"addresses": [f"{address}:{facts['port']}" for address, facts in pairs]}


def _start(specification: Any, rank: int, started: list[Any]) -> Facts:
    try:
        server = tf.distribute.Server(
            specification, job_name=JOB, task_index=rank, config=session_config()
        )
    except tf.errors.UnknownError as error:  # gRPC names no reason; a taken port is the usual one
        address = specification.task_address(JOB, rank)
        raise LaunchError(
            f"the server of rank {rank} cannot listen at {address}: address already in use "
            f"({error.message})"
        ) from error
    started.append(server)
    return {}
