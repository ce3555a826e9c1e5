"""Rooms of ranks on the nodes of a Ray cluster."""

from __future__ import annotations

import pytest

from autotune.errors import LaunchError
from runtime_rewriter.world.ray_bundles import Room, refuse_unknown_addresses

NODES = [{"NodeManagerAddress": f"10.0.0.{number}"} for number in (2, 1)]


def test_an_address_without_a_node_is_refused_with_the_addresses_of_the_nodes() -> None:
    rooms: tuple[Room, ...] = ((4, "10.0.0.1"), (4, "10.0.0.7"), (1, ""))
    rule = "the address of each host must be that of a live Ray node"
    value = r"no node is at 10\.0\.0\.7; the nodes are at 10\.0\.0\.1, 10\.0\.0\.2"
    with pytest.raises(LaunchError, match=f"{rule}, but {value}; correct `address`"):
        refuse_unknown_addresses(rooms, NODES)
    refuse_unknown_addresses(((4, "10.0.0.2"), (4, "")), NODES)


def test_a_refusal_lists_the_first_addresses_of_many() -> None:
    nodes = [{"NodeManagerAddress": f"10.0.1.{number}"} for number in range(50)]
    with pytest.raises(LaunchError, match=r"and 30 more; correct"):
        refuse_unknown_addresses(((1, "10.0.0.7"),), nodes)
