"""From the allocations and marks of two steps to the lifetimes of a `MemoryProfile`."""

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
from runtime_rewriter.recording.memory.allocations import Allocation, Apart, Noted
from runtime_rewriter.recording.memory.marks import At, Mark, RegionFacts


@dataclass(frozen=True)
class Kept:
    """Memory that is there between two steps."""

    address: int
    bytes: int
    kind: str
    variable: str | None


@dataclass(frozen=True)
class RecordedStep:
    """Two steps of alike marks; `events` of both in order, marks by number from 0; `seconds` of every segment.

    `gradients_after`: by number of the note `Apart`, where each variable's gradient lies at the end of what was somebody else's.
    """

    first: Sequence[Mark]
    second: Sequence[Mark]
    events: Sequence[Noted]
    seconds: Sequence[float]
    facts: Sequence[RegionFacts]
    gradients_after: Mapping[int, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)


@dataclass
class _Block:
    """One allocation. Segments count on through both steps; `dies` None: it outlived them."""

    address: int
    bytes: int
    born: int
    dies: int | None = None
    variable: str | None = None  # whose gradient it is
    returned: bool = False  # by a region


def profile_of(step: RecordedStep, kept: Sequence[Kept], model: str, device: str) -> MemoryProfile:
    """The profile. What the second step has alive at once in each segment is what the profile's `live_bytes` say."""
    segments = len(step.first)
    blocks, peaks = _blocks(step, segments)
    regions = _regions(step.first, step.facts)
    # What was made in these steps and is still there is a gradient that a later step drops, or was counted below, by its address.
    outliving = {block.address for block in blocks if block.dies is None}
    always = [
        Lifetime(one.bytes, TensorRole(one.kind), variable=one.variable)
        for one in kept
        if one.address not in outliving
    ]
    moving = [
        one
        for block in blocks
        if block.born < segments
        for one in _lifetimes(block, segments, regions)
    ]
    fixed = sum(one.bytes for one in always)
    unexplained = peaks - touched([one for one in moving if one.born is not None], segments)
    unexplained -= sum(one.bytes for one in moving if one.born is None)
    temporary = [
        Lifetime(int(size), TensorRole.TEMPORARY, at, at)
        for at, size in enumerate(unexplained)
        if size > 0
    ]
    relief = [max(0, -int(size)) for size in unexplained]
    assert fixed >= 0
    return MemoryProfile(
        model,
        device,
        _segments(step, relief),
        tuple([*_merged([*always, *moving]), *temporary]),
        regions,
    )


def _blocks(step: RecordedStep, segments: int) -> tuple[list[_Block], IntArray]:
    """Every allocation of both steps, and the most bytes of them alive at once in each segment of the second step, shape (segments,)."""
    marks = [*step.first, *step.second]
    account = _Account(np.zeros(2 * segments, dtype=np.int64))
    for event in step.events:
        if isinstance(event, int):
            if event >= 2 * segments:
                break  # the end of the last step
            account.mark(event, marks[event])
        elif account.now < 0:
            continue
        elif isinstance(event, Apart):
            account.apart(event, step.gradients_after.get(event.number, {}))
        else:
            account.take(event)
    return account.blocks, account.peaks[segments:]


@dataclass
class _Account:
    """What is alive now, in segment `now`. `hidden`: what somebody else has made, while their work goes on, by address."""

    peaks: IntArray
    now: int = -1
    blocks: list[_Block] = field(default_factory=list)
    _live: dict[int, list[_Block]] = field(default_factory=dict)
    _total: int = 0
    _hidden: dict[int, int] | None = None
    _replaced: list[_Block] = field(default_factory=list)

    def mark(self, number: int, mark: Mark) -> None:
        """A segment begins; the mark tells of memory that is alive."""
        self.now = number
        for address in mark.memories:
            for block in self._live.get(address, ()):
                if mark.at is At.READY:
                    block.variable = mark.names[0]
                else:
                    block.returned = True
        self._look()

    def take(self, event: Allocation) -> None:
        hidden = self._hidden
        if event.bytes > 0:
            if hidden is None:
                self._make(event.address, event.bytes)
            else:
                hidden[event.address] = event.bytes
            return
        if hidden is not None and event.address in hidden:
            del hidden[event.address]
            return
        for block in self._live.pop(event.address, ()):
            if hidden is not None and block.variable is not None:
                self._replaced.append(block)  # perhaps by its average
            else:
                self._end(block)

    def apart(self, event: Apart, gradients: Mapping[str, tuple[int, ...]]) -> None:
        """Somebody else's work begins or ends. What they leave behind counts from now on, but a gradient that they put in another's place
        is taken for that one: without them it would lie there as long."""
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
            self._end(block)
        self._replaced = []
        for address, size in left.items():
            self._make(address, size)

    def _make(self, address: int, size: int) -> None:
        block = _Block(address, size, self.now)
        self._live[address] = [block]
        self.blocks.append(block)
        self._total += size
        self._look()

    def _end(self, block: _Block) -> None:
        block.dies = self.now
        self._total -= block.bytes

    def _look(self) -> None:
        self.peaks[self.now] = max(self.peaks[self.now], self._total)


def _lifetimes(block: _Block, segments: int, regions: Sequence[Region]) -> Iterator[Lifetime]:
    """Of a block of the first step, over the ring of segments."""
    kind = TensorRole.ACTIVATION if block.variable is None else TensorRole.GRADIENT
    dies = (
        block.born + segments - 1 if block.dies is None else block.dies
    )  # for ever grows; here it counts one step's worth
    if dies == block.born:
        return  # a temporary, which the peak of its segment holds
    if dies - block.born >= segments:  # a new one is made before it goes
        yield Lifetime(block.bytes, kind, variable=block.variable)
        dies -= segments
        if dies < block.born:
            return
    region = None if block.variable is not None else _region_of(block.born, dies, regions)
    returned = region is not None and block.returned
    yield Lifetime(block.bytes, kind, block.born, dies % segments, block.variable, region, returned)


def _region_of(born: int, dies: int, regions: Sequence[Region]) -> int | None:
    """The region in whose forward pass it was made, if it outlives that."""
    for number, region in enumerate(regions):
        if any(one.first <= born <= one.last < dies for one in region.passes):
            return number
    return None


def _regions(marks: Sequence[Mark], facts: Sequence[RegionFacts]) -> tuple[Region, ...]:
    """Each with its passes; backward passes go over the calls of a region from the last to the first."""
    found = []
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
        why_not = fact.changes if passes else "no gradient comes back to it"
        found.append(
            Region(fact.name, tuple(passes), fact.random, why_not, fact.chain, fact.position)
        )
    return tuple(found)


def _segments(step: RecordedStep, relief: Sequence[int]) -> tuple[Segment, ...]:
    """Segment i lies between mark i and the next one."""
    made = []
    phase, back = Phase.FORWARD, False
    for at, mark in enumerate(step.first):
        back = (back or mark.at in (At.START, At.BACK, At.READY)) and mark.at is not At.END
        if mark.at is At.END:
            phase = Phase.UPDATE
        elif back:
            phase = Phase.RECOMPUTE if mark.at is At.READ else Phase.BACKWARD
        elif mark.at in (At.READ, At.ENTER, At.STEP):
            phase = Phase.FORWARD
        following = step.first[at + 1] if at + 1 < len(step.first) else None
        readies = following.names if following is not None and following.at is At.READY else ()
        reads = mark.names if mark.at is At.READ and not back else ()
        made.append(Segment(phase, max(0.0, step.seconds[at]), relief[at], reads, readies))
    return tuple(made)


def _merged(lifetimes: Sequence[Lifetime]) -> list[Lifetime]:
    """Those that live alike as one."""
    sums: Counter[tuple[TensorRole, int | None, int | None, str | None, int | None, bool]] = (
        Counter()
    )
    for one in lifetimes:
        sums[one.kind, one.born, one.dies, one.variable, one.region, one.returned] += one.bytes
    return [Lifetime(size, *key) for key, size in sums.items()]
