"""The cluster of a campaign as its file states it, and not as it was probed."""

from __future__ import annotations

from dataclasses import replace

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.dataset.trials import Domain
from autotune.jobs.campaign.dilation import dilated
from autotune.jobs.campaign.setups import dilation_of
from benchmarks.repository import cluster_file


def stated_cluster(domain: Domain) -> Cluster | None:
    """Return the domain's cluster file, dilated as its hosts were; None if it is not at hand."""
    file = cluster_file(domain.cluster_name)
    return dilated(read_cluster(file), dilation_of(domain.name)) if file.exists() else None


def as_shaped(domain: Domain) -> Cluster:
    """Return the probed cluster of an emulated domain with the rates to which links are shaped.

    A lower bound of the step needs them: a probe beside other work takes a link for slower than it
    is, and measured steps could then be shorter than the bound. Rates within hosts stay as they
    were probed, being this machine's own. So does a cluster whose file is not at hand.
    """
    stated = stated_cluster(domain)
    if stated is None:
        return domain.cluster
    hosts = (
        replace(host, link_bytes_per_s=given.link_bytes_per_s)
        for host, given in zip(domain.cluster.hosts, stated.hosts, strict=True)
    )
    return replace(domain.cluster, hosts=tuple(hosts), pair_links=stated.pair_links)
