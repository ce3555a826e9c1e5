"""One rank's trace as flat arrays, whatever profiler and version wrote it.

| symbol | meaning |
|---|---|
| N | events in order of start; of those that start at once, the longer (enclosing) one first |
| origin | time of the first event, ns since the epoch of the rank's clock; seconds count from it |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autotune.arrays import FloatArray, Int32Array, IntArray
from autotune.profiling.formats.op_inputs import OpInputs

MISSING = -1


class Category(IntEnum):
    """The kind of an event; `CATEGORY_NAMES` maps the profilers' names to it."""

    HOST_OP = 0
    RUNTIME = 1  # a call into the driver: launches, copies, synchronization
    HOST_MARK = 2  # an annotation on a host thread
    KERNEL = 3
    MEMCPY = 4
    MEMSET = 5
    DEVICE_MARK = 6  # the shadow of an annotation on a stream
    DEVICE_SYNC = 7  # what a stream or the host waited for
    MODULE = 8  # a Python frame of an nn.Module


HOST_WORK = (Category.HOST_OP, Category.RUNTIME, Category.HOST_MARK, Category.MODULE)
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
    """A flaw of the traces and how it was repaired. `rank` is None where it concerns the job."""

    what: str
    count: int = 1
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}{self.what}" + (f" ({self.count} times)" if self.count > 1 else "")


def repair_lines(repairs: Iterable[Repair]) -> list[str]:
    """One line per repair; repairs that differ only in the rank share a line."""
    ranks_of: dict[tuple[str, int], list[int]] = {}
    for repair in repairs:
        ranks = ranks_of.setdefault((repair.what, repair.count), [])
        if repair.rank is not None:
            ranks.append(repair.rank)
    lines = []
    for (what, count), ranks in ranks_of.items():
        if len(ranks) > 1:
            lines.append(f"ranks {number_ranges(ranks)}: {Repair(what, count)}")
        else:
            lines.append(str(Repair(what, count, ranks[0] if ranks else None)))
    return lines


def number_ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers as `0-3, 8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def listed_numbers(numbers: Iterable[int], most: int = 10) -> str:
    """The first numbers, and ` ...` for the rest."""
    listed = list(numbers)
    return ", ".join(map(str, listed[:most])) + (" ..." if len(listed) > most else "")


@dataclass(frozen=True)
class TraceLane:
    """A host thread, or a stream of a device."""

    process: str
    thread: str
    device: bool

    @property
    def name(self) -> str:
        if self.device:
            return f"device {self.process} stream {self.thread}"
        return f"host thread {self.thread}"


@dataclass(frozen=True)
class Comm:
    """The collective that an event describes.

    `sequence` counts within the group, MISSING where not stated. `queued_s`: time between the issue
    of the collective and the event's start, 0 where not stated.
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
    """A synchronization event: its kind, its stream, and the event record that it waits for.

    Both streams are of `device`, "" where not stated. Streams of different devices share numbers.
    """

    kind: str
    stream: str
    wait_on_stream: str
    record_correlation: int
    device: str = ""


@dataclass(frozen=True)
class Flow:
    """An arrow from a forward op to its backward op: the lanes and starts of both."""

    from_lane: int
    from_s: float
    to_lane: int
    to_s: float


ANNOTATED, INFERRED, WHOLE = "annotation", "inferred", "whole trace"
"""Sources of a step: its own annotation, one that repeats once per step, or nothing."""


@dataclass(frozen=True)
class TracedStep:
    """One training step of a rank; `source` states how it was found.

    `end_s` is where the next step begins, or where the annotation ends.
    """

    number: int
    start_s: float
    end_s: float
    source: str = ANNOTATED


@dataclass(frozen=True, eq=False)
class MemoryEvents:
    """Blocks that an allocator handed out and took back, in order of time; shape (M,).

    `size_bytes` is below 0 for a block that is given back. `total_bytes`: all blocks of the device
    afterwards. `device`: number of the device, MISSING for the host's memory.
    """

    at_s: FloatArray
    address: IntArray
    size_bytes: IntArray
    total_bytes: IntArray
    device: IntArray

    @staticmethod
    def none() -> MemoryEvents:
        nothing = np.zeros(0, dtype=np.int64)
        return MemoryEvents(np.zeros(0), nothing, nothing, nothing, nothing)


@dataclass(frozen=True, eq=False)
class RankTrace:
    """The events of one rank. All arrays have shape (N,); MISSING means that an event has no value.

    - `external` ("External id") leads from a device op to the host op that launched it.
    - `function` ("Record function id") leads from a host op to its node in an execution trace.
    - `inputs` numbers the `op_inputs` of a host op.
    - `host` is "" where the trace does not name it; `groups`: process group -> its ranks.
    - `dropped`: category -> how many events of it are not read.
    - `memory`: empty without `profile_memory=True`, and without totals (before torch 1.10).
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
    inputs: Int32Array
    names: tuple[str, ...]
    lanes: tuple[TraceLane, ...]
    comms: tuple[Comm, ...]
    syncs: tuple[SyncWait, ...]
    op_inputs: tuple[OpInputs, ...]
    flows: tuple[Flow, ...]
    groups: Mapping[str, tuple[int, ...]]
    repairs: tuple[Repair, ...] = ()
    steps: tuple[TracedStep, ...] = ()
    info: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    memory: MemoryEvents = field(default_factory=MemoryEvents.none)

    @property
    def events(self) -> int:
        return len(self.start_s)

    @property
    def end_s(self) -> FloatArray:
        ends: FloatArray = self.start_s + self.duration_s
        return ends

    @cached_property
    def launch(self) -> Int32Array:
        """(N,) the driver call that launches a device event, MISSING without one.

        If several calls have one correlation id, it is the last one that began before the event.
        """
        calls = np.flatnonzero((self.category == Category.RUNTIME) & (self.correlation >= 0))
        calls = calls[np.argsort(self.correlation[calls], kind="stable")]
        events = np.flatnonzero(np.isin(self.category, DEVICE_WORK) & (self.correlation >= 0))
        launch = np.full(self.events, MISSING, dtype=np.int32)
        ids, wanted = self.correlation[calls], self.correlation[events]
        first, after = np.searchsorted(ids, wanted), np.searchsorted(ids, wanted, side="right")
        launch[events[after > first]] = calls[after[after > first] - 1]
        for place in np.flatnonzero(after - first > 1).tolist():
            same, event = calls[first[place] : after[place]], events[place]
            before = np.searchsorted(self.start_s[same], self.start_s[event], side="right")
            launch[event] = same[max(int(before), 1) - 1]
        return launch

    @cached_property
    def working_devices(self) -> frozenset[str]:
        """The devices that kernels and copies ran on."""
        lanes = np.unique(self.lane[np.isin(self.category, DEVICE_WORK)])
        return frozenset(self.lanes[lane].process for lane in lanes.tolist())

    def name_of(self, event: int) -> str:
        return self.names[int(self.name[event])]
