"""Clusters and runtime costs that fit into one line of a test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

from autotune.cluster import Cluster, Host, PairLink
from autotune.lowering.costs import Constant, RuntimeCosts


def cluster(
    *hosts: tuple[int, float],
    latency_s: float = 5e-5,
    inner_bytes_per_s: float = 1e10,
    inner_latency_s: float = 5e-6,
    pairs: Iterable[PairLink] = (),
) -> Cluster:
    """A cluster of the hosts h0, h1 and so on, each given as (devices, Mbit/s of its link)."""
    inner = (inner_bytes_per_s, inner_latency_s)
    built = (Host(f"h{i}", n, mbit * 125e3, latency_s, *inner) for i, (n, mbit) in enumerate(hosts))
    return Cluster("test", tuple(built), tuple(pairs))


def costs(base: RuntimeCosts | None = None, **values: float) -> RuntimeCosts:
    """The costs `base`, by default those of the product, with other values."""
    constants = {name: Constant(value, "test") for name, value in values.items()}
    return replace(base or RuntimeCosts(), **constants)


COST_NAMES = {field.name for field in fields(RuntimeCosts)} - {
    "threads",
    "star_threads",
    "star_turns",
    "star_order",
    "payload",
    "collective_s",
}
FREE = costs(None, **{**dict.fromkeys(COST_NAMES, 0.0), "early_update": 1.0})
"""A runtime that costs nothing besides the network. Updates pass before the forward pass, as in the
closed form."""
