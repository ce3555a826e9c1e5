"""Recomputation and gradient accumulation: the same training step with less memory and more time, as another profile and workload.

Recomputation (Chen et al., arXiv 1604.06174): a run of regions drops what it made for the way back, and makes it again, by its own forward
pass, right before its backward pass. Gradient accumulation: the batch is cut into parts of equal size, whose gradients add up; only the
last part's backward pass synchronizes.

What depends on the batch is taken to shrink with it: activations, temporaries outside of the update, and the time of forward and backward
pass but a fixed share of it (`FixedShare`), which every part pays again. A profile and a workload that were recorded with the smaller batch
(`small`) are better where they can be had.

| symbol | meaning |
|---|---|
| S | segments of the step before the pass |
| k | parts of the batch |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.errors import InvalidInput
from autotune.memory.peak import last_backward, ready_segments
from autotune.recordings.memory_profile import (
    PROPORTIONAL,
    FixedShare,
    Held,
    Lifetime,
    MemoryProfile,
    Pass,
    Phase,
    Region,
    Segment,
)
from autotune.workload import Variable, Workload

STASH_BYTES = {"cpu": 5056}
"""The state of the random generator, which torch's checkpoint keeps from a forward pass to its repetition (`torch.get_rng_state()`). That
of a GPU's generator is not in the GPU's memory."""


@dataclass(frozen=True)
class Run:
    """Regions `first` to `last` of a profile, neighbours in one sequence, that are computed again together."""

    first: int
    last: int

    def passes(self, regions: Sequence[Region]) -> list[Pass]:
        pairs = zip(regions[self.first].passes, regions[self.last].passes, strict=True)
        return [Pass(start.first, stop.last, stop.backward) for start, stop in pairs]

    def drops(self, one: Lifetime) -> bool:
        """Whether the tensor is dropped: all that is made inside for the way back but what the run itself returns."""
        if one.region is None or not self.first <= one.region <= self.last:
            return False
        return not (one.returned and one.region == self.last)


def why_not_recomputed(region: Region, random: bool = True) -> str | None:
    """Why a region may not be computed twice, or None. `random`: whoever does it draws the same random numbers again."""
    if region.why_not is None and not region.passes:
        return "it is not used"
    return (
        "it draws random numbers"
        if region.why_not is None and region.random and not random
        else region.why_not
    )


def neighbours(one: Region, other: Region) -> bool:
    """`other` is computed on what `one` returns, and nothing else looks at that."""
    alike = (
        one.chain is not None and one.chain == other.chain and one.position + 1 == other.position
    )
    return alike and len(one.passes) == len(other.passes)


def recomputed(profile: MemoryProfile, runs: Sequence[Run]) -> MemoryProfile:
    """The profile in which `runs` are computed twice. Raises `InvalidInput` where one may not be, or two overlap."""
    _check(profile, runs)
    inserted = sorted(
        (one.backward, one.first, one.last) for run in runs for one in run.passes(profile.regions)
    )
    order: list[tuple[int, bool]] = []  # segment of the profile, and whether it is computed again
    for at in range(len(profile.segments)):
        order.extend(
            (again, True)
            for backward, first, last in inserted
            if backward == at
            for again in range(first, last + 1)
        )
        order.append((at, False))
    moved = {at: new for new, (at, again) in enumerate(order) if not again}
    repeated = {at: new for new, (at, again) in enumerate(order) if again}
    segments = tuple(
        _again(profile.segments[at]) if again else profile.segments[at] for at, again in order
    )
    lifetimes = tuple(
        one
        for before in profile.lifetimes
        for one in _recomputed(before, profile.regions, runs, moved, repeated)
    )
    stash = STASH_BYTES.get(profile.device, 0)
    lifetimes += tuple(
        Lifetime(stash, Held.ACTIVATION, moved[first], moved[backward] - 1)
        for backward, first, _ in inserted
        if stash
    )
    regions = tuple(
        replace(
            region,
            passes=tuple(
                Pass(moved[one.first], moved[one.last], moved[one.backward])
                for one in region.passes
            ),
        )
        for region in profile.regions
    )
    return replace(profile, segments=segments, lifetimes=lifetimes, regions=regions)


def _check(profile: MemoryProfile, runs: Sequence[Run]) -> None:
    taken: set[int] = set()
    for run in runs:
        numbers = range(run.first, run.last + 1)
        if not 0 <= run.first <= run.last < len(profile.regions) or not taken.isdisjoint(numbers):
            raise InvalidInput(
                f"runs must be disjoint and of regions 0 to {len(profile.regions) - 1}, but one is {run}"
            )
        taken.update(numbers)
        for number in numbers:
            region = profile.regions[number]
            reason = why_not_recomputed(region)
            if reason is not None:
                raise InvalidInput(f"region {region.name!r} cannot be computed twice: {reason}")
            if number > run.first and not neighbours(profile.regions[number - 1], region):
                raise InvalidInput(
                    f"the regions of a run must follow each other in one sequence, but {region.name!r} does not"
                )


def _again(segment: Segment) -> Segment:
    return replace(segment, phase=Phase.RECOMPUTE, reads=(), readies=())


def _recomputed(
    one: Lifetime,
    regions: Sequence[Region],
    runs: Sequence[Run],
    moved: dict[int, int],
    repeated: dict[int, int],
) -> Iterator[Lifetime]:
    """One lifetime in the new segments: moved, cut in two, or, of what is made and dropped at once, twice."""
    if one.born is None or one.dies is None:
        yield one
        return
    for run in runs:
        if run.drops(one):
            for used in run.passes(regions):
                if used.first <= one.born <= used.last and one.dies >= used.backward:
                    yield replace(one, born=moved[one.born], dies=moved[used.last])
                    yield replace(one, born=repeated[one.born], dies=moved[one.dies])
                    return
    yield replace(one, born=moved[one.born], dies=moved[one.dies])
    if one.born in repeated and one.dies in repeated and one.born <= one.dies:
        yield replace(one, born=repeated[one.born], dies=repeated[one.dies])


def recomputed_workload(
    workload: Workload, profile: MemoryProfile, runs: Sequence[Run]
) -> Workload:
    """Every gradient is ready later by the regions that were computed again before it. `profile` is that before the pass."""
    ready_at, end_s = ready_segments(profile), profile.end_s
    starts = [
        (used.backward, float(end_s[used.last] - (end_s[used.first - 1] if used.first else 0.0)))
        for run in runs
        for used in run.passes(profile.regions)
    ]

    def later(variable: Variable) -> Variable:
        at = ready_at.get(variable.name, last_backward(profile))
        return replace(
            variable,
            ready_s=None
            if variable.ready_s is None
            else variable.ready_s + sum(s for start, s in starts if start <= at),
        )

    added_s = sum(seconds for _, seconds in starts)
    return replace(
        workload,
        variables=tuple(map(later, workload.variables)),
        backward_s=workload.backward_s + added_s,
    )


def accumulated(
    profile: MemoryProfile,
    parts: int,
    small: MemoryProfile | None = None,
    fixed: FixedShare = PROPORTIONAL,
) -> MemoryProfile:
    """The profile of a step over `parts` micro-batches. `small`: one that was recorded with a micro-batch; otherwise `fixed` counts.

    From the second part on a new gradient is there while it is added to the sum. Raises `InvalidInput` below one part, or where
    `small` is of another model or has other segments.
    """
    if parts < 1:
        raise InvalidInput(f"a batch has at least one part, but is to have {parts}")
    if small is not None and (small.model, len(small.segments)) != (
        profile.model,
        len(profile.segments),
    ):
        raise InvalidInput(
            "the profile of a micro-batch must be of the same model with the same segments; record both alike"
        )
    source, share = (profile, 1 / parts) if small is None else (small, 1.0)
    forward, backward = fixed.left(parts) if small is None else (1.0, 1.0)
    computed = last_backward(source) + 1
    update = source.segments[computed:]
    shrunk = [
        replace(
            segment,
            seconds=segment.seconds * (forward if segment.phase is Phase.FORWARD else backward),
            relief_bytes=int(segment.relief_bytes * share),
        )
        for segment in source.segments[:computed]
    ]
    lifetimes = [
        one
        for before in source.lifetimes
        for one in _accumulated(before, parts, share, computed, len(source.segments))
    ]
    regions = tuple(
        replace(
            region,
            passes=tuple(
                Pass(*(at + part * computed for at in (one.first, one.last, one.backward)))
                for part in range(parts)
                for one in region.passes
            ),
        )
        for region in source.regions
    )
    return replace(
        source, segments=(*(shrunk * parts), *update), lifetimes=tuple(lifetimes), regions=regions
    )


def _accumulated(
    one: Lifetime, parts: int, share: float, computed: int, segments: int
) -> Iterator[Lifetime]:
    """One lifetime over the parts: `computed` segments each, then the update."""
    if one.born is None or one.dies is None:
        yield one
        return
    behind = (parts - 1) * computed

    def last(at: int) -> int:
        return at + behind

    wraps = one.dies < one.born
    if one.born >= computed:  # made in the update
        yield replace(
            one,
            born=last(one.born),
            dies=one.dies if wraps and one.dies < computed else last(one.dies),
        )
    elif one.kind is Held.GRADIENT:
        yield replace(one, dies=one.dies if wraps or one.dies < computed else last(one.dies))
        for part in range(1, parts):
            yield replace(one, born=one.born + part * computed, dies=one.born + part * computed)
    else:
        size = int(np.ceil(one.bytes * share))
        for part in range(parts):
            born = one.born + part * computed
            if not wraps and one.dies < computed:
                yield replace(one, bytes=size, born=born, dies=one.dies + part * computed)
            elif part + 1 < parts:  # until the next part makes its own
                yield replace(one, bytes=size, born=born, dies=born + computed)
            else:
                yield replace(
                    one, bytes=size, born=born, dies=one.dies if wraps else last(one.dies)
                )
    assert segments >= computed


def accumulated_workload(
    workload: Workload, parts: int, small: Workload | None = None, fixed: FixedShare = PROPORTIONAL
) -> Workload:
    """All that comes before the last part's backward pass counts as the forward pass, as a profile of such a step says it.

    `small`: measured with a micro-batch; without it times shrink with the batch but for `fixed`, and the workload's source is "assumed".
    """
    micro = small or _scaled(
        workload, *fixed.left(parts), source="assumed" if parts > 1 else workload.source
    )
    before_s = parts * micro.forward_s + (parts - 1) * micro.backward_s
    return replace(micro, forward_s=before_s, update_s=workload.update_s)


def _scaled(workload: Workload, forward: float, backward: float, source: str) -> Workload:
    def scaled(variable: Variable) -> Variable:
        ready_s = None if variable.ready_s is None else variable.ready_s * backward
        return replace(
            variable,
            ready_s=ready_s,
            needed_s=None if variable.needed_s is None else variable.needed_s * forward,
        )

    forward_s, backward_s = workload.forward_s * forward, workload.backward_s * backward
    return replace(
        workload,
        variables=tuple(map(scaled, workload.variables)),
        forward_s=forward_s,
        backward_s=backward_s,
        source=source,
    )
