"""Network cost of a direct exchange per byte of the message, by the hosts' own links.

| symbol | meaning | unit |
|---|---|---|
| n, d_h | ranks; ranks on host h | - |
| s_h | share of the sums that the ranks of host h own | - |
| b_h | bandwidth of host h in each direction | B/s |
| p | pieces of the message | - |

In the push, host h sends d_h (1 - s_h) of the message to owners on other hosts and receives
(n - d_h) s_h; in the pull the reverse. So a push and a pull take

    r = max over h of max(d_h (1 - s_h), (n - d_h) s_h) / b_h

each, and each direction of a link is occupied for

    l = max over h of (d_h (1 - s_h) + (n - d_h) s_h) / b_h.

The push of a piece overlaps the pull of the one before. Therefore p pieces take max(l, r (p + 1) /
p). With equal shares on equal hosts both are the time of a ring, 2 (n - 1) / n / b. On one host,
each device counts as a host with the inner link. Pair links do not count; the replay knows them.
"""

from __future__ import annotations

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.strategy_space.shares import Shares


def direct_s_per_byte(
    cluster: Cluster, shares: Shares | None, pieces: int, leaders_only: bool
) -> tuple[float, float]:
    """(seconds per byte, bandwidth of the link that decides), for all ranks of the cluster.

    `shares`: of every rank; None: equal ones. `leaders_only`: one leader per host exchanges, and
    owns what its host's ranks own.
    """
    hosts = np.array(cluster.host_of_rank)
    devices = np.bincount(hosts).astype(np.float64)
    links = np.array([host.link_bytes_per_s for host in cluster.hosts])
    owned = np.full(len(hosts), 1 / len(hosts)) if shares is None else np.array(shares)
    if len(cluster.hosts) == 1:
        devices, links = (
            np.ones(len(hosts)),
            np.full(len(hosts), cluster.hosts[0].inner_bytes_per_s),
        )
    else:
        owned = np.bincount(hosts, weights=owned)
    if leaders_only:
        owned = np.full(len(links), 1 / len(links)) if shares is None else owned
        devices = np.ones(len(links))
    pushed, summed = devices * (1 - owned), (devices.sum() - devices) * owned
    occupied_s: FloatArray = (pushed + summed) / links
    round_s: FloatArray = np.maximum(pushed, summed) / links
    alone_s = float(round_s.max()) * (pieces + 1) / pieces
    decides = occupied_s if float(occupied_s.max()) >= alone_s else round_s
    return max(float(occupied_s.max()), alone_s), float(links[int(decides.argmax())])
