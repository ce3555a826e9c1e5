"""The part of a cluster that a what-if trains on."""

from __future__ import annotations

from dataclasses import replace

from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.limits import MAX_RANKS, check_range
from autotune.whatif.question import Question


def training_cluster(question: Question) -> Cluster:
    """The cluster of the question, with its number of workers: that of what-if `workers` first.

    Raises `InvalidInput`.
    """
    cluster = question.known_cluster()
    workers = question.amounts.get("workers", question.workers)
    return cluster if workers is None else sized(cluster, int(workers))


def sized(cluster: Cluster, workers: int) -> Cluster:
    """A cluster of the first `workers` devices, or of more hosts like these.

    The fits stay: each is of one number of ranks. Raises `InvalidInput` for more workers than
    there are devices if the hosts differ, and for a number that fills no host evenly.
    """
    check_range(workers, 1, MAX_RANKS, "the number of workers")
    if workers == cluster.world_size:
        return cluster
    if workers > cluster.world_size:
        return replace(cluster, hosts=_more_hosts(cluster, workers), link_fits=(), peer_fits=())
    hosts: list[Host] = []
    left = workers
    for host in cluster.hosts:
        if left > 0:
            hosts.append(replace(host, devices=min(host.devices, left)))
            left -= host.devices
    names = {host.name for host in hosts}
    return replace(
        cluster,
        hosts=tuple(hosts),
        pair_links=tuple(one for one in cluster.pair_links if names.issuperset(one.between)),
        link_fits=tuple(one for one in cluster.link_fits if one.host in names),
        peer_fits=tuple(one for one in cluster.peer_fits if one.host in names),
    )


def _more_hosts(cluster: Cluster, workers: int) -> tuple[Host, ...]:
    first = cluster.hosts[0]
    kinds = {replace(host, name="", address="") for host in cluster.hosts}
    count, left = divmod(workers, first.devices)
    if len(kinds) > 1 or cluster.pair_links or left:
        raise InvalidInput(
            f"more workers than the {cluster.world_size} devices of cluster {cluster.name!r} need "
            f"equal hosts that they fill, but there are to be {workers} on hosts with "
            f"{', '.join(str(host.devices) for host in cluster.hosts[:8])} devices; "
            "describe the larger cluster in a file of its own"
        )
    taken = {host.name for host in cluster.hosts}
    more = (f"{first.name}-{number}" for number in range(count))
    named = [host.name for host in cluster.hosts] + [name for name in more if name not in taken]
    return tuple(replace(first, name=name, address="") for name in named[:count])
