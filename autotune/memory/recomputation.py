"""Recomputation: the step with less memory and more time, as a profile and a workload.

A run of regions drops its activations and computes them again, with its own forward pass, right
before its backward pass (Chen et al., arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    repeats = sorted(
        (used.backward, used.first, used.last)
        for run in runs
        for used in run.passes(profile.regions)
    )
    order: list[tuple[int, bool]] = []  # (segment of the profile, whether it is a repetition)
    for at in range(len(profile.segments)):
        for backward, first, last in repeats:
            if backward == at:
                order.extend((repeated, True) for repeated in range(first, last + 1))
        order.append((at, False))
    moved = {at: new for new, (at, again) in enumerate(order) if not again}
    repeated = {at: new for new, (at, again) in enumerate(order) if again}
    segments = tuple(
        _repetition(profile.segments[at]) if again else profile.segments[at] for at, again in order
    )
    lifetimes = [
        lifetime
        for before in profile.lifetimes
        for lifetime in _recomputed(before, profile.regions, runs, moved, repeated)
    ]
    if stash_bytes := STASH_BYTES.get(profile.device, 0):
        lifetimes += [
            Lifetime(stash_bytes, TensorRole.ACTIVATION, moved[first], moved[backward] - 1)
            for backward, first, _ in repeats
        ]
    regions = tuple(
        replace(region, passes=tuple(_moved(used, moved) for used in region.passes))
        for region in profile.regions
    )
    return replace(profile, segments=segments, lifetimes=tuple(lifetimes), regions=regions)


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


def _repetition(segment: Segment) -> Segment:
    return replace(segment, phase=Phase.RECOMPUTE, reads=(), readies=())


def _moved(used: Pass, moved: dict[int, int]) -> Pass:
    return Pass(moved[used.first], moved[used.last], moved[used.backward])


def _recomputed(
    lifetime: Lifetime,
    regions: Sequence[Region],
    runs: Sequence[Run],
    moved: dict[int, int],
    repeated: dict[int, int],
) -> Iterator[Lifetime]:
    """One lifetime in the new segments: moved, cut in two, or repeated with its segments."""
    born, dies = lifetime.born, lifetime.dies
    if born is None or dies is None:
        yield lifetime
        return
    for run in runs:
        if run.drops(lifetime):
            for used in run.passes(regions):
                if used.first <= born <= used.last and dies >= used.backward:
                    yield replace(lifetime, born=moved[born], dies=moved[used.last])
                    yield replace(lifetime, born=repeated[born], dies=moved[dies])
                    return
    yield replace(lifetime, born=moved[born], dies=moved[dies])
    if born in repeated and dies in repeated and born <= dies:
        yield replace(lifetime, born=repeated[born], dies=repeated[dies])
