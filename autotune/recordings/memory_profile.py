"""What one replica holds in memory during a training step, and when: tensors with lifetimes over the segments of the step.

A step is a ring of segments, cut where a variable is first read (forward), where a gradient is ready (backward), and around the
regions that could be computed twice. What is alive when a segment begins, or is made in it, touches it.

    touched_i = always + sum of the bytes whose lifetime holds i          live_i = touched_i - relief_i

`relief_i` is what a recorder saw: tensors that end in a segment are often gone before those that are made in it. So `live_i` is the
highest number of bytes that were alive at once in segment i, exactly as recorded.

| symbol | meaning | unit |
|---|---|---|
| S | segments of a step, in order; the first follows the last | - |
| born, dies | first and last segment that a tensor touches; born > dies: it lives on into the next step | - |
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
from autotune.parsing import parse, refuse_newer

SCHEMA = 1
MAX_SEGMENTS = 1_000_000
MAX_TENSORS = 4_000_000


class Phase(StrEnum):
    """What a segment computes. A segment between the end of the forward pass and the first gradient counts as forward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"  # all that comes between the last gradient and the next forward pass
    RECOMPUTE = "recompute"  # a forward region once more, inside the backward pass


class Held(StrEnum):
    """What a tensor is for."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    BUFFER = "buffer"
    ACTIVATION = (
        "activation"  # made in a forward pass, or on the way back, and used in another segment
    )
    TEMPORARY = "temporary"  # made and dropped within one segment; also what nothing above explains
    COMMUNICATION = "communication"
    LIBRARY = "library"  # what libraries keep between calls (cuBLAS)


@dataclass(frozen=True)
class Segment:
    """`reads`: variables that are first read at its start. `readies`: variables whose gradient is ready at its end."""

    __pydantic_config__ = {"extra": "forbid"}

    phase: Phase
    seconds: float = 0.0
    relief_bytes: int = 0
    reads: tuple[str, ...] = ()
    readies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lifetime:
    """`bytes` of memory (one tensor, or several that live alike); aliases of one memory are counted once.

    Both segments None: always alive. `variable`: whose parameter, gradient or state it is. `region`: the region whose forward pass made
    it for the way back, and would make it again. `returned`: it is what the region returns.
    """

    __pydantic_config__ = {"extra": "forbid"}

    bytes: int
    kind: Held
    born: int | None = None
    dies: int | None = None
    variable: str | None = None
    region: int | None = None
    returned: bool = False


@dataclass(frozen=True)
class Pass:
    """One use of a region in the step: segments `first` to `last` are its forward pass, `backward` is the first one on the way back."""

    __pydantic_config__ = {"extra": "forbid"}

    first: int
    last: int
    backward: int


@dataclass(frozen=True)
class Region:
    """A module whose activations may be dropped after its forward pass and computed again.

    `chain`, `position`: the sequence that it is a part of, and its place there; the parts of a sequence are computed one after the
    other and hand on nothing but what they return, so neighbours may be computed again together. `random`: it draws random numbers,
    which have to be drawn alike again. `why_not`: why computing it twice would change the training, in words; None: it would not.
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
    """Of one training step of one replica. `model` is `Workload.id`. `sparse_bytes`: by variable with a sparse gradient, its different rows
    with their numbers (the gradient itself may hold a row several times).

    Raises `InvalidInput` where a number, a segment or a region is wrong.
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
                f"a memory profile needs 1 to {MAX_SEGMENTS} segments and at most {MAX_TENSORS} lifetimes, but has {count} and "
                f"{len(self.lifetimes)}"
            )
        for segment in self.segments:
            if not (0 <= segment.seconds < float("inf")) or segment.relief_bytes < 0:
                raise InvalidInput(
                    f"a segment needs seconds and relief_bytes of at least 0, but has {segment.seconds}, {segment.relief_bytes}"
                )
        if any(size < 0 for _, size in self.sparse_bytes):
            raise InvalidInput("sparse_bytes must be at least 0")
        for one in self.lifetimes:
            self._check_lifetime(one, count)
        for region in self.regions:
            self._check_region(region, count)
        if np.any(self.live_bytes < 0):
            raise InvalidInput(
                "relief_bytes of a segment may not be more than the bytes that touch it"
            )

    def _check_lifetime(self, one: Lifetime, count: int) -> None:
        if one.bytes < 0 or (one.born is None) != (one.dies is None):
            raise InvalidInput(
                f"a lifetime needs bytes of at least 0 and both segments or none, but one is {one}"
            )
        if (
            one.born is not None
            and one.dies is not None
            and not (0 <= one.born < count and 0 <= one.dies < count)
        ):
            raise InvalidInput(
                f"a lifetime must lie in segments 0 to {count - 1}, but one is {one.born} to {one.dies}"
            )
        if one.region is not None and not 0 <= one.region < len(self.regions):
            raise InvalidInput(
                f"a lifetime must name one of {len(self.regions)} regions, but names {one.region}"
            )

    @staticmethod
    def _check_region(region: Region, count: int) -> None:
        for one in region.passes:
            if not 0 <= one.first <= one.last < one.backward < count:
                raise InvalidInput(
                    f"a pass of region {region.name!r} must go forward before it goes back, below {count}, but is {one}"
                )

    @cached_property
    def always_bytes(self) -> int:
        """Of what is alive during the whole step."""
        return sum(one.bytes for one in self.lifetimes if one.born is None)

    @cached_property
    def touched_bytes(self) -> IntArray:
        """Shape (S,)."""
        return (
            touched([one for one in self.lifetimes if one.born is not None], len(self.segments))
            + self.always_bytes
        )

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
        """When every segment ends, from the start of the step, shape (S,)."""
        return np.cumsum([segment.seconds for segment in self.segments])

    def bytes_of(self, kind: Held) -> int:
        """Of all lifetimes of this kind, whenever they are."""
        return sum(one.bytes for one in self.lifetimes if one.kind is kind)

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = to_data(self)
        return data

    @staticmethod
    def from_data(data: Any, where: str = "memory profile") -> MemoryProfile:
        refuse_newer(data, SCHEMA, "memory profile", where)
        return parse(MemoryProfile, data, where)


def touched(lifetimes: list[Lifetime], segments: int) -> IntArray:
    """Bytes whose lifetime holds each segment, shape (segments,). All lifetimes have segments."""
    change = np.zeros(segments + 1, dtype=np.int64)
    if lifetimes:
        born, dies, size = (
            np.array(column, dtype=np.int64)
            for column in zip(*((one.born, one.dies, one.bytes) for one in lifetimes), strict=True)
        )
        np.add.at(change, born, size)
        np.add.at(change, dies + 1, -size)
        change[0] += int(size[born > dies].sum())  # those that come over from the step before
    result: IntArray = np.cumsum(change)[:-1]
    return result


@dataclass(frozen=True)
class FixedShare:
    """Of the time of a forward and of a backward pass: what does not shrink with the batch, 0 to 1. Raises `InvalidInput` outside."""

    __pydantic_config__ = {"extra": "forbid"}

    forward: float = 0.0
    backward: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.forward <= 1 and 0 <= self.backward <= 1):
            raise InvalidInput(
                f"a share of time must be 0 to 1, but they are {self.forward} and {self.backward}"
            )

    def left(self, parts: int) -> tuple[float, float]:
        """Of the two passes' times, what one of `parts` parts takes."""
        return self.forward + (1 - self.forward) / parts, self.backward + (
            1 - self.backward
        ) / parts


PROPORTIONAL = FixedShare()


@dataclass(frozen=True)
class Replica:
    """Who synchronizes, on which rank. `ddp`: the module is wrapped in a DDP, whose own reducer keeps its buckets beside a plan's.

    `bucket_view`: DDP's `gradient_as_bucket_view`. `host_of_rank`: needed for hierarchical messages, `Cluster.host_of_rank`.
    `sparse_bytes`: of the different rows of sparse gradients, by variable. `device`: where tensors are; only on a CPU gloo makes copies.
    """

    rank: int = 0
    ddp: bool = True
    bucket_view: bool = False
    host_of_rank: tuple[int, ...] = ()
    sparse_bytes: Mapping[str, int] | None = None
    buffer_bytes: int = 0
    device: str = "cpu"
