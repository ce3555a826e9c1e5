"""Computes the lifetimes of a `MemoryProfile` from the allocations and marks of two steps."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.arrays import IntArray
from autotune.recordings.memory_profile import (
    Lifetime,
    MemoryProfile,
    Pass,
    Phase,
    Region,
    Segment,
    TensorRole,
    touched,
)
from runtime_rewriter.recording.memory.allocations import Allocation, Apart, MemoryEvent
from runtime_rewriter.recording.memory.marks import At, Mark, RegionFacts


@dataclass(frozen=True)
class PersistentBlock:
    """Memory that exists between two steps."""

    address: int
    bytes: int
    role: TensorRole
    variable: str | None


@dataclass(frozen=True)
class RecordedSteps:
    """Two steps with equal marks.

    - `events` of both in order, with marks by number from 0; `seconds` of every segment.
    - `gradients_after`: number of an `Apart` note -> where each variable's gradient lies at the end
      of the other owner's work.
    """

    first: Sequence[Mark]
    second: Sequence[Mark]
    events: Sequence[MemoryEvent]
    seconds: Sequence[float]
    facts: Sequence[RegionFacts]
    gradients_after: Mapping[int, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)


@dataclass
class _Block:
    """One allocation. Segments count on through both steps.

    - `dies`: None if the block outlives both steps. `variable`: the one whose gradient it is.
    - `returned`: whether a region returns it.
    """

    address: int
    bytes: int
    born: int
    dies: int | None = None
    variable: str | None = None
    returned: bool = False


def profile_of(
    steps: RecordedSteps, persistent: Sequence[PersistentBlock], model: str, device: str
) -> MemoryProfile:
    """The profile; its `live_bytes` are the second step's peak in each segment."""
    segments = len(steps.first)
    blocks, peaks = _blocks(steps, segments)
    regions = _regions(steps.first, steps.facts)
    # A block of these steps that still exists is a gradient that a later step drops, or is among
    # the persistent blocks by its address.
    outliving = {block.address for block in blocks if block.dies is None}
    always = [
        Lifetime(one.bytes, one.role, variable=one.variable)
        for one in persistent
        if one.address not in outliving
    ]
    moving = [
        lifetime
        for block in blocks
        if block.born < segments
        for lifetime in _lifetimes(block, segments, regions)
    ]
    unexplained = peaks - touched([one for one in moving if one.born is not None], segments)
    unexplained -= sum(one.bytes for one in moving if one.born is None)
    temporary = [
        Lifetime(size, TensorRole.TEMPORARY, at, at)
        for at, size in enumerate(unexplained.tolist())
        if size > 0
    ]
    relief = np.maximum(-unexplained, 0).tolist()
    lifetimes = (*_merged([*always, *moving]), *temporary)
    return MemoryProfile(model, device, _segments(steps, relief), lifetimes, regions)


def _blocks(steps: RecordedSteps, segments: int) -> tuple[list[_Block], IntArray]:
    """All allocations, and the peak bytes in each segment of the second step, shape (segments,)."""
    marks = [*steps.first, *steps.second]
    account = _Account(np.zeros(2 * segments, dtype=np.int64))
    for event in steps.events:
        if isinstance(event, int):
            if event >= 2 * segments:
                break  # the end of the last step
            account.mark(event, marks[event])
        elif account.now < 0:
            continue
        elif isinstance(event, Apart):
            account.apart(event, steps.gradients_after.get(event.number, {}))
        else:
            account.take(event)
    return account.blocks, account.peaks[segments:]


@dataclass
class _Account:
    """The blocks that are alive in segment `now`.

    `_hidden`: address -> bytes of the other owner's blocks, while its work goes on. `_replaced`:
    gradients that it freed.
    """

    peaks: IntArray
    now: int = -1
    blocks: list[_Block] = field(default_factory=list)
    _live: dict[int, list[_Block]] = field(default_factory=dict)
    _total: int = 0
    _hidden: dict[int, int] | None = None
    _replaced: list[_Block] = field(default_factory=list)

    def mark(self, number: int, mark: Mark) -> None:
        """Begin a segment; the mark names memory that is alive."""
        self.now = number
        for address in mark.memories:
            for block in self._live.get(address, ()):
                if mark.at is At.READY:
                    block.variable = mark.names[0]
                else:
                    block.returned = True
        self._update_peak()

    def take(self, event: Allocation) -> None:
        """Account for an allocation or a free."""
        hidden = self._hidden
        if event.bytes > 0:
            if hidden is None:
                self._allocate(event.address, event.bytes)
            else:
                hidden[event.address] = event.bytes
        elif hidden is not None and event.address in hidden:
            del hidden[event.address]
        else:
            for block in self._live.pop(event.address, ()):
                if hidden is not None and block.variable is not None:
                    self._replaced.append(block)  # perhaps by its average
                else:
                    self._free(block)

    def apart(self, event: Apart, gradients: Mapping[str, tuple[int, ...]]) -> None:
        """Begin or end the work of another owner.

        Blocks that it leaves count from now on. A gradient that it puts in another's place counts
        as that one, which would lie there as long without the other owner.
        """
        if event.begins or self._hidden is None:
            self._hidden = {} if event.begins else None
            return
        left, self._hidden = self._hidden, None
        for variable, addresses in gradients.items():
            before = [block for block in self._replaced if block.variable == variable]
            new = [address for address in addresses if left.pop(address, None) is not None]
            for number, block in enumerate(before if new else ()):
                block.address = new[min(number, len(new) - 1)]
                self._live.setdefault(block.address, []).append(block)
                self._replaced.remove(block)
        for block in self._replaced:
            self._free(block)
        self._replaced = []
        for address, size in left.items():
            self._allocate(address, size)

    def _allocate(self, address: int, size: int) -> None:
        block = _Block(address, size, self.now)
        self._live[address] = [block]
        self.blocks.append(block)
        self._total += size
        self._update_peak()

    def _free(self, block: _Block) -> None:
        block.dies = self.now
        self._total -= block.bytes

    def _update_peak(self) -> None:
        self.peaks[self.now] = max(self.peaks[self.now], self._total)


def _lifetimes(block: _Block, segments: int, regions: Sequence[Region]) -> Iterator[Lifetime]:
    """The lifetimes of a block of the first step, over the ring of segments."""
    born, variable = block.born, block.variable
    role = TensorRole.ACTIVATION if variable is None else TensorRole.GRADIENT
    # a block that never dies would grow for ever; it counts as one step's worth
    dies = born + segments - 1 if block.dies is None else block.dies
    if dies == born:
        return  # a temporary, which the peak of its segment contains
    if dies - born >= segments:  # the next one is allocated before this one is freed
        yield Lifetime(block.bytes, role, variable=variable)
        dies -= segments
        if dies < born:
            return
    region = None if variable is not None else _region_of(born, dies, regions)
    returned = region is not None and block.returned
    yield Lifetime(block.bytes, role, born, dies % segments, variable, region, returned)


def _region_of(born: int, dies: int, regions: Sequence[Region]) -> int | None:
    """The region whose forward pass allocates the block, if the block outlives that pass."""
    for number, region in enumerate(regions):
        if any(one.first <= born <= one.last < dies for one in region.passes):
            return number
    return None


def _regions(marks: Sequence[Mark], facts: Sequence[RegionFacts]) -> tuple[Region, ...]:
    """The regions with their passes; backward passes visit a region's calls last to first."""
    regions = []
    for number, fact in enumerate(facts):
        passes: list[Pass] = []
        calls: list[tuple[int, int]] = []
        entered = 0
        for at, mark in enumerate(marks):
            if mark.region != number:
                continue
            if mark.at is At.ENTER:
                entered = at
            elif mark.at is At.EXIT:
                calls.append((entered, at - 1))
            elif mark.at is At.BACK and calls:
                passes.append(Pass(*calls.pop(), at))
        obstacle = fact.changes if passes else "no gradient comes back to it"
        position = (fact.chain, fact.position)
        regions.append(Region(fact.name, tuple(passes), fact.random, obstacle, *position))
    return tuple(regions)


def _segments(steps: RecordedSteps, relief: Sequence[int]) -> tuple[Segment, ...]:
    """The segments; number i lies between mark i and the next one."""
    segments = []
    phase, back = Phase.FORWARD, False
    for at, mark in enumerate(steps.first):
        back = (back or mark.at in (At.START, At.BACK, At.READY)) and mark.at is not At.END
        if mark.at is At.END:
            phase = Phase.UPDATE
        elif back:
            phase = Phase.RECOMPUTE if mark.at is At.READ else Phase.BACKWARD
        elif mark.at in (At.READ, At.ENTER, At.STEP):
            phase = Phase.FORWARD
        next_mark = steps.first[at + 1] if at + 1 < len(steps.first) else None
        readies = next_mark.names if next_mark is not None and next_mark.at is At.READY else ()
        reads = mark.names if mark.at is At.READ and not back else ()
        segments.append(Segment(phase, max(0.0, steps.seconds[at]), relief[at], reads, readies))
    return tuple(segments)


def _merged(lifetimes: Sequence[Lifetime]) -> list[Lifetime]:
    """Merge equal lifetimes."""
    sizes: Counter[tuple[TensorRole, int | None, int | None, str | None, int | None, bool]]
    sizes = Counter()
    for one in lifetimes:
        key = (one.kind, one.born, one.dies, one.variable, one.region, one.returned)
        sizes[key] += one.bytes
    return [Lifetime(size, *key) for key, size in sizes.items()]
