"""The rates that emulated links are shaped to."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.jobs.campaign.dilation import dilated
from autotune.jobs.campaign.domains import cluster_file

ROOT = Path(__file__).parents[2]


def as_shaped(domain: str, probed: Cluster) -> Cluster:
    """Return the cluster with the rates of the domain's file, dilated as its name says.

    A lower bound of the step needs them: a probe beside other work takes a link for slower than it
    is, and measured steps could then be shorter than the bound. Rates within hosts stay as they
    were probed, being this machine's own. So does a cluster whose file is not in the repository.
    """
    file = cluster_file(ROOT, domain.split(".")[1])
    if not file.exists():
        return probed
    dilation = re.search(r"\.dilated_(\d+)\b", domain)
    shaped = dilated(read_cluster(file), int(dilation[1]) if dilation else 1)
    hosts = (
        replace(host, link_bytes_per_s=given.link_bytes_per_s)
        for host, given in zip(probed.hosts, shaped.hosts, strict=True)
    )
    return replace(probed, hosts=tuple(hosts), pair_links=shaped.pair_links)
