"""Moves the values of variables between numpy, by original name, and a distributed graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.errors import InvalidInput
from runtime_rewriter.tensorflow.distributed_graph import DistributedGraph, PlacedVariable


def scatter(session: Any, graph: DistributedGraph, values: Mapping[str, np.ndarray]) -> None:
    """Set every variable of the distributed graph from the values of a single-device program."""
    missing = sorted({one.variable for one in graph.variables} - set(values))
    if missing:
        raise InvalidInput(f"a checkpoint needs every variable, but lacks {missing[0]!r}")
    fed = {one.placeholder: one.part_of(values[one.variable]) for one in graph.variables}
    session.run([one.assign for one in graph.variables], fed)


def gather(session: Any, graph: DistributedGraph) -> dict[str, np.ndarray]:
    """Return the values of a single-device program that continues from here.

    Statistics and seeds that replicas keep for themselves are those of the first.
    """
    held = [one for one in graph.variables if one.authoritative]
    parts: dict[str, list[tuple[PlacedVariable, np.ndarray]]] = defaultdict(list)
    for one, value in zip(held, session.run([one.value for one in held]), strict=True):
        parts[one.variable].append((one, value))
    return {name: _joined(found) for name, found in parts.items()}


def _joined(parts: list[tuple[PlacedVariable, np.ndarray]]) -> np.ndarray:
    placed, value = parts[0]
    if placed.axis is None:
        return value
    in_order = sorted(parts, key=lambda part: part[0].start)
    return np.concatenate([value for _, value in in_order], axis=placed.axis)
