"""What a user asks: the situation in which a change is predicted, and how sure its amounts are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from autotune.cluster import Cluster
from autotune.costs.row_traffic import summed_share
from autotune.errors import InvalidInput
from autotune.whatif.memory import ReplicaMemory


class Reading(Enum):
    """Which end of every uncertain amount a prediction takes."""

    OPTIMISTIC = "optimistic"
    EXPECTED = "expected"
    PESSIMISTIC = "pessimistic"


@dataclass(frozen=True)
class Factor:
    """A factor on durations with the range that its source supports; a smaller one is faster.

    Raises `InvalidInput` unless 0 <= optimistic <= expected <= pessimistic.
    """

    expected: float
    optimistic: float
    pessimistic: float
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.optimistic <= self.expected <= self.pessimistic < float("inf"):
            raise InvalidInput(
                "a factor needs 0 <= optimistic <= expected <= pessimistic, but it is "
                f"{self.optimistic}, {self.expected}, {self.pessimistic}"
            )

    def at(self, reading: Reading) -> float:
        return {
            Reading.OPTIMISTIC: self.optimistic,
            Reading.EXPECTED: self.expected,
            Reading.PESSIMISTIC: self.pessimistic,
        }[reading]


@dataclass(frozen=True)
class TouchedRows:
    """The rows of a table that a step of one worker touches: their number, and that of all rows.

    `size_bytes`: of the touched rows with their numbers.
    """

    count: float
    table: int
    size_bytes: float

    def of_all(self, workers: int) -> Factor:
        """How many times as many rows all workers touch together.

        Expected: each row is as likely in every batch, independent of the others. No more can be
        expected of independent batches; those with the same popular rows touch fewer.
        """
        share = min(self.count / self.table, 1.0) if self.table else 0.0
        if share <= 0:
            return Factor(1.0, 1.0, 1.0, "no rows")
        together = summed_share(share, workers) / share
        most = min(float(workers), 1.0 / share)
        return Factor(max(together, 1.0), 1.0, max(most, together, 1.0), "independent batches")


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient. Ops are numbers of the base; what-ifs keep the numbers of ops.

    - `ready`: the op that completes it in the backward pass; `update`: the first op of the
      optimizer that reads it, NONE if it is unknown; `read`: the first op of the next forward pass
      that reads the parameter, NONE if it is unknown. `dtype`: as torch names it.
    - `shape`: of the parameter, () if it is unknown.
    - `touched`: the rows of a sparse gradient that one step touches; None for a dense gradient.
    - `updates_before`: how often the step updates parameters before this gradient's backward pass.
    """

    name: str
    size_bytes: float
    layer: str
    ready: int
    update: int
    read: int
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    touched: TouchedRows | None = None
    updates_before: int = 0

    @property
    def rows_bytes(self) -> float | None:
        """The touched rows with their numbers; None for a dense gradient."""
        return None if self.touched is None else self.touched.size_bytes


@dataclass(frozen=True)
class Question:
    """The situation that what-ifs are asked for.

    - `cluster`, `workers`: where training would be distributed to; None if it would not be.
    - `gradients`: in the order of the backward pass; None if the trace does not state their sizes.
    - `amounts`: an amount for each what-if that takes one, such as {"faster_network": 2.0}.
    - `files`: the file for each what-if that takes one, such as {"metaflow": "policy.yaml"}.
    - `memory`: of a replica; None if the trace does not state it.
    """

    reading: Reading = Reading.EXPECTED
    cluster: Cluster | None = None
    workers: int | None = None
    gradients: tuple[Gradient, ...] | None = None
    amounts: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    memory: ReplicaMemory | None = None

    def known_cluster(self) -> Cluster:
        """The cluster. Raises `InvalidInput` without one."""
        if self.cluster is None:
            raise InvalidInput("a distributed what-if needs a cluster; name one with --cluster")
        return self.cluster

    def known_gradients(self) -> tuple[Gradient, ...]:
        """The gradients. Raises `InvalidInput` if their sizes are unknown."""
        if self.gradients is None:
            raise InvalidInput(
                "a distributed what-if needs the sizes of the gradients, but the trace does not "
                "state them; record with shapes (record_shapes=True), or pass --parameters FILE"
            )
        return self.gradients
