"""The memory of one replica during a training step: tensors with lifetimes over segments.

A step is a ring of segments. Segments are cut where a variable is first read (forward), where a
gradient becomes ready (backward), and around regions that could be computed twice. A tensor
touches a segment if it is alive at the segment's start or is created in it.

    touched_i = always + sum of the bytes whose lifetime holds i
    live_i = touched_i - relief_i

The recorder measures `relief_i`: tensors that end in a segment are often freed before others are
created in it. So `live_i` is the recorded maximum of bytes alive at once in segment i.

| symbol | meaning | unit |
|---|---|---|
| S | segments of a step, in order; the first follows the last | - |
| born, dies | first and last segment that a tensor touches; born > dies: it crosses the step | - |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.canonical import to_data
from autotune.errors import InvalidInput
from autotune.limits import MAX_BYTES, check_range, check_seconds
from autotune.parsing import parse, refuse_newer

SCHEMA = 1
MAX_SEGMENTS = 1_000_000
MAX_TENSORS = 4_000_000


class Phase(StrEnum):
    """The work of a segment. Segments from the forward pass to the first gradient are forward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"  # from the last gradient to the next forward pass
    RECOMPUTE = "recompute"  # a forward region again, within the backward pass


class TensorRole(StrEnum):
    """The purpose of a tensor."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    BUFFER = "buffer"
    ACTIVATION = "activation"  # created in a pass and used in another segment
    TEMPORARY = "temporary"  # created and freed within one segment, or not explained by any role
    COMMUNICATION = "communication"
    LIBRARY = "library"  # kept by libraries between calls (cuBLAS)


@dataclass(frozen=True)
class Segment:
    """`reads`: variables first read at its start. `readies`: gradients ready at its end."""

    __pydantic_config__ = {"extra": "forbid"}

    phase: Phase
    seconds: float = 0.0
    relief_bytes: int = 0
    reads: tuple[str, ...] = ()
    readies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lifetime:
    """Memory of one tensor, or of several with equal lifetimes; aliases are counted once.

    `born`, `dies`: segments, both None if it is always alive. `variable`: the variable of the
    parameter, gradient or state. `region`: the region whose forward pass creates it for the
    backward pass. `returned`: the region returns it.
    """

    __pydantic_config__ = {"extra": "forbid"}

    bytes: int
    kind: TensorRole
    born: int | None = None
    dies: int | None = None
    variable: str | None = None
    region: int | None = None
    returned: bool = False


@dataclass(frozen=True)
class Pass:
    """One use of a region: segments `first` to `last` forward, and the first one backward."""

    __pydantic_config__ = {"extra": "forbid"}

    first: int
    last: int
    backward: int


@dataclass(frozen=True)
class Region:
    """A module whose activations may be dropped after its forward pass and computed again.

    `chain`, `position`: its sequence, and its place there. The parts of a sequence run one after
    the other and pass on only their results, so neighbours may be computed again together.
    `random`: it draws random numbers; a repetition must draw the same. `why_not`: why computing it
    twice would change the training; None if it would not.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    passes: tuple[Pass, ...]
    random: bool = False
    why_not: str | None = None
    chain: str | None = None
    position: int = 0


@dataclass(frozen=True)
class MemoryProfile:
    """One training step of one replica. `model` is `Workload.id`.

    `sparse_bytes`: (variable, bytes of the distinct rows and their indices) of each sparse
    gradient; the gradient itself may repeat rows. Raises `InvalidInput` for an invalid number,
    segment or region.
    """

    __pydantic_config__ = {"extra": "forbid"}

    model: str
    device: str
    segments: tuple[Segment, ...]
    lifetimes: tuple[Lifetime, ...]
    regions: tuple[Region, ...] = ()
    sparse_bytes: tuple[tuple[str, int], ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        count = len(self.segments)
        if not 0 < count <= MAX_SEGMENTS or len(self.lifetimes) > MAX_TENSORS:
            raise InvalidInput(
                f"a memory profile needs 1 to {MAX_SEGMENTS} segments and at most {MAX_TENSORS} "
                f"lifetimes, but has {count} and {len(self.lifetimes)}"
            )
        for segment in self.segments:
            check_seconds(segment.seconds, "seconds of a segment")
            check_range(segment.relief_bytes, 0, MAX_BYTES, "relief_bytes of a segment")
        for _, size in self.sparse_bytes:
            check_range(size, 0, MAX_BYTES, "sparse_bytes")
        for lifetime in self.lifetimes:
            self._check_lifetime(lifetime)
        total = sum(lifetime.bytes for lifetime in self.lifetimes)
        check_range(total, 0, MAX_BYTES, "bytes of all lifetimes")
        for region in self.regions:
            for used in region.passes:
                if not 0 <= used.first <= used.last < used.backward < count:
                    raise InvalidInput(
                        f"a pass of region {region.name!r} must go forward before it goes back, "
                        f"below {count}, but is {used}"
                    )
        if np.any(self.live_bytes < 0):
            raise InvalidInput("a segment's relief_bytes may not exceed the bytes that touch it")

    def _check_lifetime(self, lifetime: Lifetime) -> None:
        count = len(self.segments)
        born, dies, region = lifetime.born, lifetime.dies, lifetime.region
        if lifetime.bytes < 0 or (born is None) != (dies is None):
            raise InvalidInput(
                "a lifetime needs bytes of at least 0 and both segments or none, "
                f"but one is {lifetime}"
            )
        if born is not None and dies is not None and not (0 <= born < count and 0 <= dies < count):
            raise InvalidInput(
                f"a lifetime must lie in segments 0 to {count - 1}, but one is {born} to {dies}"
            )
        if region is not None and not 0 <= region < len(self.regions):
            raise InvalidInput(
                f"a lifetime must name one of {len(self.regions)} regions, but names {region}"
            )

    @cached_property
    def always_bytes(self) -> int:
        """Bytes of the tensors that are alive during the whole step."""
        return sum(lifetime.bytes for lifetime in self.lifetimes if lifetime.born is None)

    @cached_property
    def touched_bytes(self) -> IntArray:
        """Shape (S,)."""
        moving = [lifetime for lifetime in self.lifetimes if lifetime.born is not None]
        return touched(moving, len(self.segments)) + self.always_bytes

    @cached_property
    def relief_bytes(self) -> IntArray:
        """Shape (S,)."""
        return np.array([segment.relief_bytes for segment in self.segments], dtype=np.int64)

    @cached_property
    def live_bytes(self) -> IntArray:
        """Most bytes alive at once in every segment, shape (S,)."""
        result: IntArray = self.touched_bytes - self.relief_bytes
        return result

    @cached_property
    def end_s(self) -> FloatArray:
        """When each segment ends, from the start of the step, shape (S,)."""
        return np.cumsum([segment.seconds for segment in self.segments])

    def bytes_of(self, role: TensorRole) -> int:
        """Bytes of all lifetimes with this role."""
        return sum(lifetime.bytes for lifetime in self.lifetimes if lifetime.kind is role)

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = to_data(self)
        return data

    @staticmethod
    def from_data(data: Any, where: str = "memory profile") -> MemoryProfile:
        refuse_newer(data, SCHEMA, "memory profile", where)
        return parse(MemoryProfile, data, where)


def touched(lifetimes: list[Lifetime], segments: int) -> IntArray:
    """Bytes alive in or touching each segment, shape (segments,). All lifetimes have segments."""
    change = np.zeros(segments + 1, dtype=np.int64)
    if lifetimes:
        born, dies, size = (
            np.array(column, dtype=np.int64)
            for column in zip(*((one.born, one.dies, one.bytes) for one in lifetimes), strict=True)
        )
        np.add.at(change, born, size)
        np.add.at(change, dies + 1, -size)
        change[0] += int(size[born > dies].sum())  # those that cross over from the step before
    result: IntArray = np.cumsum(change)[:-1]
    return result


@dataclass(frozen=True)
class FixedShare:
    """Shares of the two passes' times that do not shrink with the batch.

    Raises `InvalidInput` outside 0 to 1.
    """

    __pydantic_config__ = {"extra": "forbid"}

    forward: float = 0.0
    backward: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.forward <= 1 and 0 <= self.backward <= 1):
            raise InvalidInput(
                f"a share of time must be 0 to 1, but they are {self.forward} and {self.backward}"
            )

    def left(self, parts: int) -> tuple[float, float]:
        """Shares of the (forward, backward) times that one of `parts` parts takes."""
        forward = self.forward + (1 - self.forward) / parts
        backward = self.backward + (1 - self.backward) / parts
        return forward, backward


PROPORTIONAL = FixedShare()


@dataclass(frozen=True)
class Replica:
    """The rank of a replica, and the backend that synchronizes it.

    `ddp`: the module is wrapped in a DDP, whose reducer keeps its buckets even under a plan.
    `bucket_view`: DDP's `gradient_as_bucket_view`. `host_of_rank`: `Cluster.host_of_rank`,
    needed for hierarchical messages. `sparse_bytes`: as in `MemoryProfile`, by variable.
    `device`: gloo copies tensors only on a CPU.
    """

    rank: int = 0
    ddp: bool = True
    bucket_view: bool = False
    host_of_rank: tuple[int, ...] = ()
    sparse_bytes: Mapping[str, int] | None = None
    buffer_bytes: int = 0
    device: str = "cpu"
