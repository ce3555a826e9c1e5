"""The bundles of a placement group: the ranks of each node, and whether a cluster has room."""

from __future__ import annotations

from typing import Any

from autotune.cluster import MAX_NAMED
from autotune.errors import LaunchError

_PINNED = 0.001
"""Amount of a node's own resource `node:ADDRESS` (1 on that node) that pins a bundle to the
node."""
Room = tuple[int, str]
"""A number of ranks on one node, and the node's address ("": any node)."""


def refuse_unknown_addresses(rooms: tuple[Room, ...], nodes: list[dict[str, Any]]) -> None:
    """Raise `LaunchError` if a room has an address that none of the live nodes has."""
    known = sorted(str(node["NodeManagerAddress"]) for node in nodes)
    unknown = [address for _, address in rooms if address and address not in known]
    if unknown:
        raise LaunchError(
            "the address of each host must be that of a live Ray node, but no node is at "
            f"{_listed(unknown)}; the nodes are at {_listed(known)}; "
            "correct `address` in the cluster file, or start Ray there with --node-ip-address"
        )


def _listed(addresses: list[str]) -> str:
    more = f" and {len(addresses) - MAX_NAMED} more" if len(addresses) > MAX_NAMED else ""
    return ", ".join(addresses[:MAX_NAMED]) + more


def fits(rooms: tuple[Room, ...], nodes: list[dict[str, Any]], resource: str, spread: bool) -> bool:
    """Whether idle nodes have one `resource` per rank; with `spread`, one node per room."""
    free = [
        (float(node["Resources"].get(resource, 0)), node["NodeManagerAddress"]) for node in nodes
    ]
    if not spread:
        return sum(int(amount) for amount, _ in free) >= len(rooms)
    free.sort()
    for ranks, address in sorted(rooms, key=lambda room: (not room[1], -room[0])):
        chosen = max((entry for entry in free if address in ("", entry[1])), default=(0.0, ""))
        if chosen[0] < ranks:
            return False
        free.remove(chosen)
    return True


def bundle_of(room: Room, gpus: bool) -> dict[str, float]:
    ranks, address = room
    bundle = {"CPU": float(ranks)}
    if gpus:
        bundle["GPU"] = float(ranks)
    if address:
        bundle[f"node:{address}"] = _PINNED
    return bundle
