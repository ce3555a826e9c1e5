"""Recomputation: the step with less memory and more time, as a profile and a workload.

A run of regions drops its activations and computes them again, with its own forward pass, right
before its backward pass (Chen et al., arXiv 1604.06174).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.errors import InvalidInput
from autotune.memory.segments import last_backward, ready_segments
from autotune.recordings.memory_profile import (
    Lifetime,
    MemoryProfile,
    Pass,
    Phase,
    Region,
    Segment,
    TensorRole,
)
from autotune.workload import Variable, Workload

STASH_BYTES = {"cpu": 5056}
"""State of the random generator, by device: torch's checkpoint keeps it from a forward pass to its
repetition (`torch.get_rng_state()`). The state of a GPU's generator is not in the GPU's memory."""


@dataclass(frozen=True)
class Run:
    """Regions `first` to `last`, neighbours in one sequence, that are computed again together."""

    first: int
    last: int

    def passes(self, regions: Sequence[Region]) -> list[Pass]:
        pairs = zip(regions[self.first].passes, regions[self.last].passes, strict=True)
        return [Pass(start.first, stop.last, stop.backward) for start, stop in pairs]

    def drops(self, lifetime: Lifetime) -> bool:
        """Whether the run drops the tensor: any activation but the one that the run returns."""
        region = lifetime.region
        if region is None or not self.first <= region <= self.last:
            return False
        return not (lifetime.returned and region == self.last)

    def input_until(self, lifetime: Lifetime, regions: Sequence[Region]) -> int | None:
        """The segment up to which the run holds a tensor that would end earlier: its input.

        torch's checkpoint keeps what it is called with until its backward pass has ended. None for
        a tensor that the region in front of the run does not return, or that ends no earlier.
        """
        born, dies, before = lifetime.born, lifetime.dies, self.first - 1
        if born is None or dies is None or not lifetime.returned or lifetime.region != before:
            return None
        if not neighbours(regions[before], regions[self.first]):
            return None
        for used, entered in zip(regions[before].passes, regions[self.first].passes, strict=True):
            if used.first <= born <= used.last and born <= dies < entered.backward:
                return entered.backward
        return None


def recomputation_error(region: Region) -> str | None:
    """Why a region may not be computed twice; None if it may."""
    if region.why_not is None and not region.passes:
        return "it is not used"
    return region.why_not


def neighbours(region: Region, following: Region) -> bool:
    """Whether only `following` reads what `region` returns."""
    in_chain = region.chain is not None and region.chain == following.chain
    adjacent = region.position + 1 == following.position
    return in_chain and adjacent and len(region.passes) == len(following.passes)


def recomputed(profile: MemoryProfile, runs: Sequence[Run]) -> MemoryProfile:
    """The profile with `runs` computed twice. Raises `InvalidInput` if a run is not allowed."""
    _check(profile, runs)
    regions = profile.regions
    repeats = sorted(
        (used.backward, used.first, used.last) for run in runs for used in run.passes(regions)
    )
    order: list[tuple[int, bool]] = []  # (segment of the profile, whether it is a repetition)
    for at in range(len(profile.segments)):
        for backward, first, last in repeats:
            if backward == at:
                order.extend((repeated, True) for repeated in range(first, last + 1))
        order.append((at, False))
    step = _NewStep(
        moved={at: new for new, (at, again) in enumerate(order) if not again},
        repeated={at: new for new, (at, again) in enumerate(order) if again},
        repeating={
            at: (run, used)
            for run in runs
            for used in run.passes(regions)
            for at in range(used.first, used.last + 1)
        },
        entered={run.first - 1: run for run in runs},
        regions=regions,
    )
    lost_bytes, lost_again_bytes = step.lost_relief_bytes(profile.lifetimes)
    segments = tuple(
        _repetition(profile.segments[at], lost_again_bytes[at])
        if again
        else _relieved_less(profile.segments[at], lost_bytes[at])
        for at, again in order
    )
    lifetimes = [one for before in profile.lifetimes for one in step.lifetimes(before)]
    if stash_bytes := STASH_BYTES.get(profile.device, 0):
        lifetimes += [
            Lifetime(
                stash_bytes, TensorRole.ACTIVATION, step.moved[first], step.moved[backward] - 1
            )
            for backward, first, _ in repeats
        ]
    new_regions = tuple(
        replace(region, passes=tuple(_moved(used, step.moved) for used in region.passes))
        for region in regions
    )
    return replace(profile, segments=segments, lifetimes=tuple(lifetimes), regions=new_regions)


def recomputed_workload(
    workload: Workload, profile: MemoryProfile, runs: Sequence[Run]
) -> Workload:
    """The workload of `recomputed(profile, runs)`: repetitions delay the gradients behind them."""
    ready_at = ready_segments(profile)
    last = last_backward(profile)
    end_s = profile.end_s
    repeats = [
        (used.backward, float(end_s[used.last] - (end_s[used.first - 1] if used.first else 0.0)))
        for run in runs
        for used in run.passes(profile.regions)
    ]

    def delayed(variable: Variable) -> Variable:
        if variable.ready_s is None:
            return variable
        at = ready_at.get(variable.name, last)
        delay_s = sum(seconds for start, seconds in repeats if start <= at)
        return replace(variable, ready_s=variable.ready_s + delay_s)

    backward_s = workload.backward_s + sum(seconds for _, seconds in repeats)
    variables = tuple(map(delayed, workload.variables))
    return replace(workload, variables=variables, backward_s=backward_s)


def _check(profile: MemoryProfile, runs: Sequence[Run]) -> None:
    regions = profile.regions
    taken: set[int] = set()
    for run in runs:
        numbers = range(run.first, run.last + 1)
        if not 0 <= run.first <= run.last < len(regions) or not taken.isdisjoint(numbers):
            raise InvalidInput(
                f"runs must be disjoint and of regions 0 to {len(regions) - 1}, but one is {run}"
            )
        taken.update(numbers)
        for number in numbers:
            name = regions[number].name
            reason = recomputation_error(regions[number])
            if reason is not None:
                raise InvalidInput(f"region {name!r} cannot be computed twice: {reason}")
            if number > run.first and not neighbours(regions[number - 1], regions[number]):
                raise InvalidInput(
                    "the regions of a run must follow each other in one sequence, "
                    f"but {name!r} does not"
                )


@dataclass(frozen=True)
class _NewStep:
    """A step with repetitions. Keys are segments of the step without them.

    - `moved`, `repeated`: the new numbers of a segment and of its repetition.
    - `repeating`: the run and the pass that repeat the segment.
    - `entered`: region -> the run behind it, if the region is the run's neighbour.
    """

    moved: Mapping[int, int]
    repeated: Mapping[int, int]
    repeating: Mapping[int, tuple[Run, Pass]]
    entered: Mapping[int, Run]
    regions: Sequence[Region]

    def lifetimes(self, lifetime: Lifetime) -> Iterator[Lifetime]:
        """One lifetime in the new segments: moved, cut in two, or repeated with its segments."""
        born, dies = lifetime.born, lifetime.dies
        if born is None or dies is None:
            yield lifetime
            return
        run, used = self.repeating.get(born, (None, None))
        if run is not None and used is not None and run.drops(lifetime) and dies >= used.backward:
            yield replace(lifetime, born=self.moved[born], dies=self.moved[used.last])
            yield replace(lifetime, born=self.repeated[born], dies=self.moved[dies])
            return
        until = self._input_until(lifetime)
        end = dies if until is None else until
        yield replace(lifetime, born=self.moved[born], dies=self.moved[end])
        if self._repeats(born, dies):
            yield replace(lifetime, born=self.repeated[born], dies=self.repeated[dies])

    def lost_relief_bytes(self, lifetimes: Sequence[Lifetime]) -> tuple[Counter[int], Counter[int]]:
        """Segment -> bytes that no longer end in it, and that do not end in its repetition.

        A segment's relief may be due to them.
        """
        lost: Counter[int] = Counter()
        lost_again: Counter[int] = Counter()
        for one in lifetimes:
            if one.born is None or one.dies is None:
                continue
            if self._input_until(one) is not None:
                lost[one.dies] += one.bytes
            if one.dies in self.repeated and not self._repeats(one.born, one.dies):
                lost_again[one.dies] += one.bytes
        return lost, lost_again

    def _input_until(self, lifetime: Lifetime) -> int | None:
        run = None if lifetime.region is None else self.entered.get(lifetime.region)
        return None if run is None else run.input_until(lifetime, self.regions)

    def _repeats(self, born: int, dies: int) -> bool:
        """Whether one repetition creates and frees a tensor, as the first pass does."""
        again = self.repeating.get(born)
        return again is not None and again == self.repeating.get(dies) and born <= dies


def _repetition(segment: Segment, lost_bytes: int) -> Segment:
    again = replace(segment, phase=Phase.RECOMPUTE, reads=(), readies=())
    return _relieved_less(again, lost_bytes)


def _relieved_less(segment: Segment, lost_bytes: int) -> Segment:
    if not lost_bytes:
        return segment
    return replace(segment, relief_bytes=max(0, segment.relief_bytes - lost_bytes))


def _moved(used: Pass, moved: Mapping[int, int]) -> Pass:
    return Pass(moved[used.first], moved[used.last], moved[used.backward])
