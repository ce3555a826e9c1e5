"""One rank's trace as flat arrays, whatever profiler and version wrote it.

| symbol | meaning |
|---|---|
| N | events, in order of start, of those that start at once the longer (enclosing) first |
| origin | time of the first event, ns since the epoch of the rank's clock; all seconds count from it |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from autotune.arrays import FloatArray, Int32Array, IntArray

MISSING = -1


class Category(IntEnum):
    """What an event is; `CATEGORY_NAMES` says what profilers call it."""

    HOST_OP = 0
    RUNTIME = 1  # a call into the driver: launches, copies, synchronization
    HOST_MARK = 2  # an annotation on a host thread
    KERNEL = 3
    MEMCPY = 4
    MEMSET = 5
    DEVICE_MARK = 6  # the shadow of an annotation on a stream
    DEVICE_SYNC = 7  # what a stream or the host waited for
    MODULE = 8  # a Python frame of an nn.Module


DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)

CATEGORY_NAMES: Mapping[str, Category] = {
    "cpu_op": Category.HOST_OP,
    "operator": Category.HOST_OP,  # until 2021
    "cuda_runtime": Category.RUNTIME,
    "runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "hip_runtime": Category.RUNTIME,
    "xpu_runtime": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "privateuse1_driver": Category.RUNTIME,
    "user_annotation": Category.HOST_MARK,
    "cpu_user_annotation": Category.HOST_MARK,
    "gpu_user_annotation": Category.DEVICE_MARK,
    "kernel": Category.KERNEL,
    "concurrent_kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "memset": Category.MEMSET,
    "cuda_sync": Category.DEVICE_SYNC,
}


@dataclass(frozen=True)
class Repair:
    """Something that was missing or wrong and what was done about it. `rank` is None where it concerns the job."""

    what: str
    count: int = 1
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}{self.what}" + (f" ({self.count} times)" if self.count > 1 else "")


def told(repairs: Iterable[Repair]) -> list[str]:
    """A line for each; those that differ in the rank only are one line."""
    ranks: dict[tuple[str, int], list[int]] = {}
    for repair in repairs:
        own = ranks.setdefault((repair.what, repair.count), [])
        if repair.rank is not None:
            own.append(repair.rank)
    return [
        f"ranks {number_ranges(own)}: {Repair(what, count)}"
        if len(own) > 1
        else str(Repair(what, count, own[0] if own else None))
        for (what, count), own in ranks.items()
    ]


def number_ranges(numbers: Iterable[int]) -> str:
    """`0-3, 8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@dataclass(frozen=True)
class Lane:
    """A host thread, or a stream of a device."""

    process: str
    thread: str
    device: bool

    @property
    def name(self) -> str:
        return (
            f"device {self.process} stream {self.thread}"
            if self.device
            else f"host thread {self.thread}"
        )


@dataclass(frozen=True)
class Comm:
    """What an event says about the collective it belongs to. `sequence` counts within the group, MISSING where not told.

    `queued_s`: between its issue and the event's start, 0 where not told.
    """

    name: str
    size_bytes: float = 0.0
    dtype: str = ""
    group: str = ""
    group_ranks: tuple[int, ...] = ()
    sequence: int = MISSING
    root: int = MISSING
    transaction: str = ""
    peer: int = MISSING
    queued_s: float = 0.0


@dataclass(frozen=True)
class SyncWait:
    """What a synchronization event says: its kind, on which stream, and for which event record of which stream."""

    kind: str
    stream: str
    wait_on_stream: str
    record_correlation: int


@dataclass(frozen=True)
class Flow:
    """An arrow from a forward op to the backward op of it: the lanes and starts of both."""

    from_lane: int
    from_s: float
    to_lane: int
    to_s: float


@dataclass(frozen=True)
class Step:
    """One training step of a rank. `end_s` is where the next one begins, or where the annotation ends. `found` is how it was found."""

    number: int
    start_s: float
    end_s: float
    found: str = "annotation"


@dataclass(frozen=True, eq=False)
class RankTrace:
    """All arrays have shape (N,). `correlation`, `external`, `function`, `sequence`, `comm`, `sync` hold MISSING where the event has none.

    `external` ("External id") leads from a device op to the host op that launched it, `function` ("Record function id") from a host op
    to its node in an execution trace.

    `host` is "" where the trace does not tell; `groups` maps a process group's name to its ranks.
    """

    source: str
    rank: int | None
    world_size: int | None
    host: str
    origin_ns: int
    start_s: FloatArray
    duration_s: FloatArray
    category: NDArray[np.int8]
    lane: Int32Array
    name: Int32Array
    correlation: IntArray
    external: IntArray
    function: IntArray
    sequence: IntArray
    size_bytes: FloatArray
    comm: Int32Array
    sync: Int32Array
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    comms: tuple[Comm, ...]
    syncs: tuple[SyncWait, ...]
    flows: tuple[Flow, ...]
    groups: Mapping[str, tuple[int, ...]]
    repairs: tuple[Repair, ...] = ()
    steps: tuple[Step, ...] = ()
    info: Mapping[str, str] = field(default_factory=dict)

    @property
    def events(self) -> int:
        return len(self.start_s)

    @property
    def end_s(self) -> FloatArray:
        ends: FloatArray = self.start_s + self.duration_s
        return ends

    @property
    def has_device(self) -> bool:
        return bool(np.isin(self.category, DEVICE_WORK).any())

    def name_of(self, event: int) -> str:
        return self.names[int(self.name[event])]
