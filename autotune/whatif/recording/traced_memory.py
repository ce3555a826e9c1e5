"""The memory of a recorded step from the blocks in its trace (`profile_memory=True`).

The profiler states each block that torch's allocator hands out and takes back, with its address and
the bytes of all blocks. Segments are cut where a parameter is first read and where a gradient is
ready. What is alive for the whole step are parameters, the optimizer's state and buffers. A block
that outlives the step ends in the next one, at the same place of the ring.

symbol   meaning
S        segments of the step
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.errors import InvalidInput
from autotune.profiling.formats.rank_trace import MISSING, MemoryEvents, RankTrace, TracedStep
from autotune.recordings.memory_profile import (
    Lifetime,
    MemoryProfile,
    Phase,
    Segment,
    TensorRole,
    touched,
)
from autotune.whatif.base import Base
from autotune.whatif.question import Gradient
from autotune.whatif.recording.recorded import consecutive_steps

BLOCK_BYTES = 512
"""Allocators round sizes up to a multiple of this (CUDA; the host's to less)."""


@dataclass(frozen=True)
class _Block:
    """A block that is handed out in the step; `freed_s` is None if it is never given back."""

    size_bytes: int
    begun_s: float
    freed_s: float | None


def traced_memory(
    trace: RankTrace, base: Base, gradients: Sequence[Gradient] | None
) -> MemoryProfile | None:
    """The memory of the last recorded step that another one follows; None without blocks.

    Raises `InvalidInput` where the blocks do not show a whole step: without the gradients' sizes,
    or if the totals leave out what was allocated before the recording.
    """
    memory = trace.memory
    if not len(memory.at_s):
        return None
    if not gradients:
        raise InvalidInput(
            "the memory of a step needs the sizes of its gradients, but the trace does not state "
            "them; record with shapes (record_shapes=True), or pass --parameters FILE"
        )
    chosen = _device_events(memory, on_device=bool(base.on_device.any()))
    step, following = consecutive_steps(trace)[-1]
    ring, next_ring = (_Ring.of(trace, base, gradients, one) for one in (step, following))
    blocks = _blocks(memory, chosen, step)
    at_s, totals = memory.at_s[chosen], memory.total_bytes[chosen]
    if not base.on_device.any():  # the host's count also goes on from earlier recordings
        totals = totals - (totals[0] - memory.size_bytes[chosen][0])
    before = int(np.searchsorted(at_s, step.start_s)) - 1
    start_bytes = int(totals[before]) if before >= 0 else 0
    lifetimes = [ring.lifetime(block, next_ring, gradients) for block in blocks]
    crossing = sum(one.bytes for one in lifetimes if _crosses(one))
    parameter_bytes = sum(int(one.size_bytes) for one in gradients)
    always_bytes = start_bytes - crossing
    if always_bytes < parameter_bytes:
        raise InvalidInput(
            f"the recorded blocks must hold the model's {parameter_bytes} bytes of parameters, but "
            f"{always_bytes} bytes are alive for the whole step; on a CPU, torch's profiler leaves "
            "out what was allocated before it began: begin it before the model is built"
        )
    moving = [one for one in lifetimes if one.born is not None]
    live = ring.most_alive(at_s, totals, start_bytes)
    fixed = [
        Lifetime(int(one.size_bytes), TensorRole.PARAMETER, variable=one.name) for one in gradients
    ]
    fixed.append(Lifetime(always_bytes - parameter_bytes, TensorRole.OPTIMIZER))
    over = touched(moving, len(ring.ends_s)) + always_bytes - live
    missing = [
        Lifetime(int(-short), TensorRole.TEMPORARY, at, at)
        for at, short in enumerate(over)
        if short < 0
    ]
    segments = tuple(
        Segment(phase, seconds, max(int(relief), 0), reads, readies)
        for phase, seconds, relief, reads, readies in zip(
            ring.phases, ring.seconds, over, ring.reads, ring.readies, strict=True
        )
    )
    device = base.device or "cpu"
    return MemoryProfile("traced", device, segments, (*fixed, *moving, *missing))


def _device_events(memory: MemoryEvents, *, on_device: bool) -> BoolArray:
    """The blocks of the device with the most of them, or of the host's memory."""
    chosen: BoolArray = memory.device == MISSING
    if not on_device:
        return chosen
    devices, counts = np.unique(memory.device[memory.device != MISSING], return_counts=True)
    if not len(devices):
        raise InvalidInput(
            "the memory of a step needs the blocks of its device, but the trace has only those of "
            "the host; record with ProfilerActivity.CUDA and profile_memory=True"
        )
    chosen = memory.device == devices[np.argmax(counts)]
    return chosen


def _blocks(memory: MemoryEvents, chosen: BoolArray, step: TracedStep) -> list[_Block]:
    """The blocks that are handed out in the step, with the time of their end."""
    opened: dict[int, tuple[int, float]] = {}
    blocks: list[_Block] = []
    rows = zip(
        memory.at_s[chosen].tolist(),
        memory.address[chosen].tolist(),
        memory.size_bytes[chosen].tolist(),
        strict=True,
    )
    for at_s, address, size in rows:
        if size > 0:
            if at_s < step.end_s and address in opened:  # its end was not reported
                _end(blocks, opened, address, at_s)
            if step.start_s <= at_s < step.end_s:
                opened[address] = size, at_s
        elif address in opened:
            _end(blocks, opened, address, at_s)
    blocks += [_Block(size, begun_s, None) for size, begun_s in opened.values()]
    return blocks


def _end(
    blocks: list[_Block], opened: dict[int, tuple[int, float]], address: int, at_s: float
) -> None:
    size, begun_s = opened.pop(address)
    blocks.append(_Block(size, begun_s, at_s))


def _crosses(lifetime: Lifetime) -> bool:
    """Whether it is alive at the start of each step, but not always."""
    born, dies = lifetime.born, lifetime.dies
    return born is not None and dies is not None and born > dies


@dataclass(frozen=True)
class _Ring:
    """The S segments of a step: their ends, phases, and the variables that they read or ready."""

    step: TracedStep
    ends_s: tuple[float, ...]
    phases: tuple[Phase, ...]
    reads: tuple[tuple[str, ...], ...]
    readies: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(trace: RankTrace, base: Base, gradients: Sequence[Gradient], step: TracedStep) -> _Ring:
        """Cut the step at its reads and accumulations: those with the base's names and places."""
        marks: list[tuple[float, int, str]] = []
        for one in gradients:
            for number, op in enumerate((one.read, one.ready)):
                if (event := _same_event(trace, _event_of(base, op), step)) != MISSING:
                    at_s = float(trace.end_s[event] if number else trace.start_s[event])
                    marks.append((at_s, number, one.name))
        inside = sorted(mark for mark in marks if step.start_s < mark[0] < step.end_s)
        if not any(number for _, number, _ in inside):
            raise InvalidInput(
                "the memory of a step needs the operators that accumulate its gradients, but step "
                f"{step.number} of {trace.source} shows none"
            )
        ends_s = [at_s for at_s, _, _ in inside] + [step.end_s]
        readies = [(name,) if number else () for _, number, name in inside] + [()]
        reads = [(), *((name,) if not number else () for _, number, name in inside)]
        known = [at for at, names in enumerate(readies) if names]
        phases = tuple(
            Phase.FORWARD if at < known[0] else Phase.BACKWARD if at <= known[-1] else Phase.UPDATE
            for at in range(len(ends_s))
        )
        return _Ring(step, tuple(ends_s), phases, tuple(reads), tuple(readies))

    @property
    def seconds(self) -> list[float]:
        return [float(one) for one in np.diff([self.step.start_s, *self.ends_s])]

    def place(self, at_s: float) -> int:
        """The segment of an instant."""
        return min(bisect.bisect_right(self.ends_s, at_s), len(self.ends_s) - 1)

    def lifetime(self, block: _Block, following: _Ring, gradients: Sequence[Gradient]) -> Lifetime:
        """When a block is alive. One that outlives the following step is alive for ever."""
        born, freed_s = self.place(block.begun_s), block.freed_s
        if freed_s is None or freed_s >= following.step.end_s:
            return Lifetime(block.size_bytes, TensorRole.OPTIMIZER)
        crosses = freed_s >= self.step.end_s
        dies = (following if crosses else self).place(freed_s)
        if crosses and dies >= born:  # it meets its successor
            dies = max(born - 1, 0)
        last = max(at for at, phase in enumerate(self.phases) if phase is Phase.BACKWARD)
        backward = self.phases[born] is Phase.BACKWARD
        if backward and (crosses or dies > last):
            sizes = (int(one.size_bytes) for one in gradients)
            if any(0 <= block.size_bytes - size < BLOCK_BYTES for size in sizes):
                return Lifetime(block.size_bytes, TensorRole.GRADIENT, born, dies)
        role = TensorRole.TEMPORARY if born == dies else TensorRole.ACTIVATION
        return Lifetime(block.size_bytes, role, born, dies)

    def most_alive(self, at_s: FloatArray, totals: IntArray, start_bytes: int) -> IntArray:
        """(S,) the most bytes alive at once in each segment."""
        most, alive = [], start_bytes
        begin_s = self.step.start_s
        for end_s in self.ends_s:
            first, last = np.searchsorted(at_s, (begin_s, end_s))
            inside = totals[first:last]
            most.append(max(alive, int(inside.max(initial=0))))
            alive = int(inside[-1]) if len(inside) else alive
            begin_s = end_s
        return np.array(most, dtype=np.int64)


def _event_of(base: Base, op: int) -> int:
    """The host's event of an op of the base: its own, or that of its launch; MISSING if unknown."""
    if op < 0:
        return MISSING
    call = int(base.launch[op]) if base.on_device[op] else op
    return MISSING if call < 0 else int(base.event[call])


def _same_event(trace: RankTrace, event: int, step: TracedStep) -> int:
    """The event of another step with the name and the place among its name of `event`."""
    if event == MISSING:
        return MISSING
    same = np.flatnonzero((trace.name == trace.name[event]) & (trace.lane == trace.lane[event]))
    starts_s = trace.start_s[same]
    own = next(one for one in reversed(trace.steps) if one.start_s <= trace.start_s[event])
    place = int(np.searchsorted(same, event)) - int(np.searchsorted(starts_s, own.start_s))
    place_in_step = int(np.searchsorted(starts_s, step.start_s)) + place
    inside = place_in_step < len(same) and starts_s[place_in_step] < step.end_s
    return int(same[place_in_step]) if inside else MISSING
