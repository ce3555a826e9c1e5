"""From the allocations and marks of two steps to the lifetimes of a `MemoryProfile`."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.dfg.memory_profile import Held, Lifetime, MemoryProfile, Pass, Phase, Region, Segment, touched
from runtime_rewriter.pytorch.allocations import Allocation
from runtime_rewriter.pytorch.memory_marks import At, Mark, RegionFacts


@dataclass(frozen=True)
class Kept:
    """Memory that is there between two steps."""

    address: int
    bytes: int
    kind: str
    variable: str | None


@dataclass(frozen=True)
class RecordedStep:
    """Two steps of alike marks; `events` of both in order, marks by number from 0; `seconds` of every segment."""

    first: Sequence[Mark]
    second: Sequence[Mark]
    events: Sequence[Allocation | int]
    seconds: Sequence[float]
    facts: Sequence[RegionFacts]


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
    always = [Lifetime(one.bytes, Held(one.kind), variable=one.variable) for one in kept if one.address not in outliving]
    moving = [one for block in blocks if block.born < segments for one in _lifetimes(block, segments, regions)]
    fixed = sum(one.bytes for one in always)
    unexplained = peaks - touched([one for one in moving if one.born is not None], segments)
    unexplained -= sum(one.bytes for one in moving if one.born is None)
    temporary = [Lifetime(int(size), Held.TEMPORARY, at, at) for at, size in enumerate(unexplained) if size > 0]
    relief = [max(0, -int(size)) for size in unexplained]
    assert fixed >= 0
    return MemoryProfile(model, device, _segments(step, relief), tuple([*_merged([*always, *moving]), *temporary]), regions)


def _blocks(step: RecordedStep, segments: int) -> tuple[list[_Block], NDArray[np.int64]]:
    """Every allocation of both steps, and the most bytes of them alive at once in each segment of the second step, shape (segments,)."""
    marks = [*step.first, *step.second]
    live: dict[int, _Block] = {}
    blocks: list[_Block] = []
    peaks = np.zeros(2 * segments, dtype=np.int64)
    now, total = -1, 0
    for event in step.events:
        if isinstance(event, int):
            if event >= 2 * segments:
                break  # the end of the last step
            now = event
            _name(marks[now], live)
        elif now < 0:
            continue
        elif event.bytes > 0:
            block = _Block(event.address, event.bytes, now)
            live[event.address] = block
            blocks.append(block)
            total += event.bytes
        elif (gone := live.pop(event.address, None)) is not None:
            gone.dies = now
            total -= gone.bytes
        if now >= 0:
            peaks[now] = max(peaks[now], total)
    return blocks, peaks[segments:]


def _name(mark: Mark, live: Mapping[int, _Block]) -> None:
    """What the mark tells of memory that is alive."""
    for address in mark.memories:
        block = live.get(address)
        if block is not None and mark.at is At.READY:
            block.variable = mark.names[0]
        elif block is not None:
            block.returned = True


def _lifetimes(block: _Block, segments: int, regions: Sequence[Region]) -> Iterator[Lifetime]:
    """Of a block of the first step, over the ring of segments."""
    kind = Held.ACTIVATION if block.variable is None else Held.GRADIENT
    dies = block.born + segments - 1 if block.dies is None else block.dies  # for ever grows; here it counts one step's worth
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
        found.append(Region(fact.name, tuple(passes), fact.random, why_not, fact.chain, fact.position))
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
    sums: Counter[tuple[Held, int | None, int | None, str | None, int | None, bool]] = Counter()
    for one in lifetimes:
        sums[one.kind, one.born, one.dies, one.variable, one.region, one.returned] += one.bytes
    return [Lifetime(size, *key) for key, size in sums.items()]
