"""The clusters of Table 2 of AutoSync's supplement (sec. 9.1).

A1 and A2 were the authors' own; B1 to B12 were at AWS. Setup A2 is "Cluster A" of the main paper,
and B7 its "Cluster B". The table states the GPUs of each node and the rate of its network
interface. Nothing was probed: latencies and the links inside a node are the defaults of a cluster
file.

All AWS nodes "have 10GbE single-flow bandwidth": one TCP connection moves at most 10 Gbit/s.
`CLUSTERS` has the rates of the interfaces, as the table does. They hold for software that opens
enough connections between two nodes, and for the input of a server from several nodes.
`single_flow` is the other end of the range: a pair of nodes shares one connection, as two of
TensorFlow's servers do. A real run lies between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType

from autotune.cluster import Cluster, Host, PairLink
from autotune.errors import InvalidInput

GBIT_PER_S = 1e9 / 8
"""Bytes per second."""
GB = 10**9
SINGLE_FLOW = "-single-flow"
"""Suffix of the names of clusters from `single_flow`."""
SINGLE_FLOW_BYTES_PER_S = 10 * GBIT_PER_S

LATENCY_S = 50e-6
INNER_BYTES_PER_S = 10e9
INNER_LATENCY_S = 5e-6
"""These three are the defaults of a cluster file. All GPUs are on PCIe 3.0 x16, about 10 GB/s."""


@dataclass(frozen=True)
class _Node:
    """A type of machine with `gpus` of `gpu_bytes` each."""

    name: str
    gpus: int
    gpu_bytes: int
    gbit_per_s: float
    cores: int = 0
    single_flow: bool = True

    def host(self, index: int) -> Host:
        return Host(
            f"{self.name}-{index}",
            self.gpus,
            self.gbit_per_s * GBIT_PER_S,
            LATENCY_S,
            INNER_BYTES_PER_S,
            INNER_LATENCY_S,
            memory_bytes=self.gpu_bytes,
            cores=self.cores,
        )


_A = _Node("titan-x", gpus=1, gpu_bytes=12 * GB, gbit_per_s=40, cores=16, single_flow=False)
_G3_4 = _Node("g3.4xlarge", gpus=1, gpu_bytes=8 * GB, gbit_per_s=10)  # Tesla M60
_G3_16 = _Node("g3.16xlarge", gpus=4, gpu_bytes=8 * GB, gbit_per_s=25)
_G4DN_2 = _Node("g4dn.2xlarge", gpus=1, gpu_bytes=16 * GB, gbit_per_s=25)  # T4
_G4DN_12 = _Node("g4dn.12xlarge", gpus=4, gpu_bytes=16 * GB, gbit_per_s=50)

_SETUPS: dict[str, tuple[tuple[int, _Node], ...]] = {
    "A1": ((16, _A),),
    "A2": ((11, _A),),
    "B1": ((2, _G3_16),),
    "B2": ((3, _G3_16),),
    "B3": ((4, _G3_16),),
    "B4": ((1, _G4DN_12),),
    "B5": ((2, _G4DN_12),),
    "B6": ((3, _G4DN_12),),
    "B7": ((4, _G4DN_12),),
    "B8": ((8, _G4DN_12),),
    "B9": ((1, _G3_4), (1, _G3_16)),
    "B10": ((1, _G3_16), (1, _G4DN_12)),
    "B11": ((2, _G3_16), (2, _G4DN_12)),
    "B12": ((1, _G4DN_2), (1, _G4DN_12)),
}

CLUSTERS: Mapping[str, Cluster] = MappingProxyType(
    {
        name: Cluster(
            name,
            tuple(node.host(index) for count, node in nodes for index in range(count)),
            source="assumed",
        )
        for name, nodes in _SETUPS.items()
    }
)
"""Name in Table 2 -> cluster, with the rates of the interfaces."""


def single_flow(name: str) -> Cluster:
    """A cluster of Table 2 in which two nodes share one connection, which AWS limits to 10 Gbit/s.

    Only links between pairs of nodes change: a node that serves several others still receives at
    the rate of its interface. Setups without such a limit, or without two nodes that could exceed
    it, are returned unchanged.
    """
    if name not in CLUSTERS:
        raise InvalidInput(
            f"the zoo's clusters are {', '.join(CLUSTERS)}, but {name!r} was asked for"
        )
    cluster = CLUSTERS[name]
    limited = all(node.single_flow for _, node in _SETUPS[name])
    links = tuple(
        PairLink(
            (one.name, other.name), SINGLE_FLOW_BYTES_PER_S, max(one.latency_s, other.latency_s)
        )
        for one, other in combinations(cluster.hosts, 2)
        if limited and min(one.link_bytes_per_s, other.link_bytes_per_s) > SINGLE_FLOW_BYTES_PER_S
    )
    return replace(cluster, name=f"{name}{SINGLE_FLOW}", pair_links=links) if links else cluster
