"""The distributed graph of a plan: what a session runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tensorflow.core.framework.graph_pb2 import GraphDef

from autotune.errors import InvalidInput
from autotune.strategy_space.plan import Plan
from runtime_rewriter.tensorflow.gate_tensors import GateTensors
from runtime_rewriter.tensorflow.kept_state import KeptTensor


@dataclass(frozen=True)
class PlacedVariable:
    """A variable of the training graph, or a part of one, on a rank.

    The part is rows `start:stop` along `axis`; the whole variable if `axis` is None. `handle`: its
    VarHandleOp. To set it, feed the tensor `placeholder` and run the node `assign`; the tensor
    `value` reads it. `replica_seed`: a number that is added to the first element of what is set,
    so that replicas draw different random numbers. `authoritative`: checkpoints read it.
    """

    variable: str
    rank: int
    handle: str
    placeholder: str
    assign: str
    value: str
    authoritative: bool
    axis: int | None = None
    start: int = 0
    stop: int = 0
    replica_seed: int = 0

    def part_of(self, whole: np.ndarray) -> np.ndarray:
        """Return what this variable holds of the value `whole`."""
        if self.axis is not None:
            whole = np.take(whole, range(self.start, self.stop), axis=self.axis)
        if self.replica_seed:
            whole = np.array(whole)
            whole.reshape(-1)[0] += self.replica_seed
        return whole


@dataclass(frozen=True)
class ReplicatedFeed:
    """A feed of the training graph and its placeholder of each replica."""

    name: str
    placeholders: tuple[str, ...]
    split: bool


@dataclass(frozen=True)
class DistributedGraph:
    """A plan's graph for all ranks, driven by one client.

    `devices`: one per rank. A step runs the nodes `targets` with the `feeds` and may fetch the
    tensors `fetches`, which are those of the first replica. `notes`: decisions of the plan that are
    enacted in another way, in one sentence each. `kept`: what ranks keep from step to step beside
    the variables; a session must set it before the first step (see `checkpoints`). `gate`: what a
    step may fetch to check the averaged gradients, if the graph has a numerics gate. A process may
    run another graph on the same servers if its collective keys start at `next_key`.
    """

    graph_def: GraphDef = field(repr=False)
    plan: Plan
    devices: tuple[str, ...]
    variables: tuple[PlacedVariable, ...]
    feeds: tuple[ReplicatedFeed, ...]
    targets: tuple[str, ...]
    fetches: Mapping[str, str]
    initial: Mapping[str, np.ndarray]
    next_key: int
    notes: tuple[str, ...] = ()
    kept: tuple[KeptTensor, ...] = ()
    gate: GateTensors | None = field(default=None, repr=False)

    def feed_dict(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Give each placeholder its part of the global batch, or a copy of the value."""
        names = {feed.name for feed in self.feeds}
        if names != set(values):
            raise InvalidInput(
                f"a step needs a value for each of {sorted(names)}, but got {sorted(values)}"
            )
        fed: dict[str, np.ndarray] = {}
        for feed in self.feeds:
            parts = _parts(feed, np.asarray(values[feed.name]))
            fed.update(zip(feed.placeholders, parts, strict=True))
        return fed


def _parts(feed: ReplicatedFeed, value: np.ndarray) -> Sequence[np.ndarray]:
    replicas = len(feed.placeholders)
    if not feed.split:
        return [value] * replicas
    if len(value) % replicas:
        raise InvalidInput(
            f"the batch of {feed.name!r} must divide into {replicas} equal parts, "
            f"but has {len(value)} rows"
        )
    return np.split(value, replicas)
