"""The bundles of a placement group: the ranks of each node, and whether a cluster has room."""

from __future__ import annotations

from typing import Any

_PINNED = 0.001
"""Amount of a node's own resource `node:ADDRESS` (1 on that node) that pins a bundle to the
node."""
Room = tuple[int, str]
"""A number of ranks on one node, and the node's address ("": any node)."""


def with_known_addresses(rooms: tuple[Room, ...], nodes: list[dict[str, Any]]) -> tuple[Room, ...]:
    """The rooms without addresses that no node has, such as addresses of another network."""
    known = {node["NodeManagerAddress"] for node in nodes}
    return tuple((ranks, address if address in known else "") for ranks, address in rooms)


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
