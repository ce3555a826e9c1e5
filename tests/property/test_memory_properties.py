"""Memory of random steps: sums, passes and choices against simple twins."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.memory.accumulation import accumulated
from autotune.memory.fitting import candidates, choose_runs
from autotune.memory.peak import MemoryEstimate, peak_memory
from autotune.memory.recomputation import Run, recomputed
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
from autotune.workload import Variable, Workload

SIZES = st.integers(0, 1000)


def alive(one: Lifetime, segments: int) -> set[int]:
    """The segments that a lifetime touches, one by one."""
    if one.born is None or one.dies is None:
        return set(range(segments))
    at, found = one.born, {one.born}
    while at != one.dies:
        at = (at + 1) % segments
        found.add(at)
    return found


@st.composite
def lifetimes(draw: st.DrawFn, segments: int) -> Lifetime:
    at = st.integers(0, segments - 1)
    return Lifetime(draw(SIZES), TensorRole.ACTIVATION, draw(at), draw(at))


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.lists(lifetimes(n), max_size=12)))
)
def test_touched_bytes_match_a_walk_along_each_lifetime(step: tuple[int, list[Lifetime]]) -> None:
    segments, held = step
    slow = [sum(one.bytes for one in held if at in alive(one, segments)) for at in range(segments)]
    assert touched(held, segments).tolist() == slow


@st.composite
def layered(draw: st.DrawFn) -> MemoryProfile:
    """A sequence of layers: forward, backward in the opposite order, update."""
    layers = draw(st.integers(1, 5))
    last = 2 * layers
    forward = [
        Segment(Phase.FORWARD, draw(st.integers(1, 9)) / 10, reads=(f"v{n}",))
        for n in range(layers)
    ]
    backward = [
        Segment(Phase.BACKWARD, draw(st.integers(1, 9)) / 10, readies=(f"v{n}",))
        for n in reversed(range(layers))
    ]
    held = [Lifetime(draw(SIZES), TensorRole.PARAMETER)]
    regions = []
    for n in range(layers):
        back = last - 1 - n
        held.append(Lifetime(draw(SIZES), TensorRole.ACTIVATION, n, back, region=n))
        if n + 1 < layers:
            held.append(
                Lifetime(draw(SIZES), TensorRole.ACTIVATION, n, back, region=n, returned=True)
            )
        held.append(Lifetime(draw(SIZES), TensorRole.GRADIENT, back, last, f"v{n}"))
        held.append(Lifetime(draw(SIZES), TensorRole.TEMPORARY, back, back))
        held.append(Lifetime(draw(SIZES), TensorRole.TEMPORARY, n, n))
        regions.append(Region(f"l{n}", (Pass(n, n, back),), chain="", position=n))
    model = Workload("L", tuple(Variable(f"v{n}", (1,)) for n in reversed(range(layers)))).id
    return MemoryProfile(
        model,
        "meta",
        (*forward, *backward, Segment(Phase.UPDATE, 0.1)),
        tuple(held),
        tuple(regions),
    )


def workload_of(profile: MemoryProfile) -> Workload:
    layers = len(profile.regions)
    return Workload("L", tuple(Variable(f"v{n}", (1,)) for n in reversed(range(layers))))


class HeldTensors:
    """The live tensors of a step, and their peak."""

    def __init__(self, profile: MemoryProfile) -> None:
        self.lifetimes = profile.lifetimes
        self.fixed = sum(one.bytes for one in profile.lifetimes if one.born is None)
        self.held: dict[int, int] = {}
        self.peak = 0

    def enter(self, at: int, again: Run | None = None) -> None:
        for number, one in enumerate(self.lifetimes):
            if one.born == at and (
                again is None or again.drops(one) or one.kind is TensorRole.TEMPORARY
            ):
                self.held[number] = one.bytes
        self.peak = max(self.peak, self.fixed + sum(self.held.values()))

    def leave(self, at: int) -> None:
        self.held = {
            number: size for number, size in self.held.items() if self.lifetimes[number].dies != at
        }

    def compute_again(self, run: Run) -> None:
        for at in range(run.first, run.last + 1):
            self.enter(at, run)
            self.leave(at)

    def drop(self, run: Run) -> None:
        self.held = {
            number: size
            for number, size in self.held.items()
            if not run.drops(self.lifetimes[number])
        }


def replayed(profile: MemoryProfile, runs: list[Run]) -> int:
    """The peak of a step with `runs` computed twice, by a walk with a set of live tensors."""
    layers = len(profile.regions)
    tensors = HeldTensors(profile)
    for at in range(2 * layers + 1):
        for run in runs:
            if at >= layers and 2 * layers - 1 - at == run.last:
                tensors.compute_again(run)
        tensors.enter(at)
        tensors.leave(at)
        for run in runs:
            if at == run.last:
                tensors.drop(run)
    return tensors.peak


def choices(profile: MemoryProfile) -> list[list[Run]]:
    """All sets of disjoint runs."""
    runs = candidates(profile)
    sets = chain.from_iterable(combinations(runs, size) for size in range(len(runs) + 1))
    spans = [
        (list(chosen), [n for run in chosen for n in range(run.first, run.last + 1)])
        for chosen in sets
    ]
    return [chosen for chosen, numbers in spans if len(set(numbers)) == len(numbers)]


def plain(profile: MemoryProfile, workload: Workload) -> MemoryEstimate:
    return peak_memory(profile)


@settings(max_examples=60, deadline=None)
@given(layered(), st.data())
def test_recomputed_peaks_match_a_walk_through_the_step(
    profile: MemoryProfile, data: st.DataObject
) -> None:
    runs: list[Run] = []
    at = 0
    while at < len(profile.regions):
        length = data.draw(st.integers(0, len(profile.regions) - at))
        if length:
            runs.append(Run(at, at + length - 1))
        at += max(1, length)
    assert peak_memory(recomputed(profile, runs)).peak_bytes == replayed(profile, runs)


@settings(max_examples=25, deadline=None)
@given(layered().filter(lambda profile: len(profile.regions) <= 4), st.floats(0.5, 1.0))
def test_the_chosen_runs_fit_at_the_least_cost(profile: MemoryProfile, share: float) -> None:
    workload = workload_of(profile)
    budget = int(peak_memory(profile).peak_bytes * share)
    seconds = {
        str(chosen): sum(
            profile.segments[n].seconds for run in chosen for n in range(run.first, run.last + 1)
        )
        for chosen in choices(profile)
    }
    fitting = [
        seconds[str(chosen)] for chosen in choices(profile) if replayed(profile, chosen) <= budget
    ]
    chosen = choose_runs(profile, workload, budget, plain)
    assert chosen.fits == bool(fitting)
    if fitting:
        assert peak_memory(recomputed(profile, chosen.runs)).peak_bytes <= budget
        assert abs(seconds[str(list(chosen.runs))] - min(fitting)) < 1e-9


@given(layered(), st.integers(1, 4))
def test_micro_batches_keep_the_time_and_the_constant_memory(
    profile: MemoryProfile, parts: int
) -> None:
    after = accumulated(profile, parts)
    assert abs(float(after.end_s[-1] - profile.end_s[-1])) < 1e-9
    assert after.always_bytes == profile.always_bytes
    assert after.live_bytes[-1] <= profile.live_bytes[-1]
    if parts == 1:
        assert after.live_bytes.tolist() == profile.live_bytes.tolist()


@given(layered(), SIZES)
def test_more_bytes_anywhere_never_lower_the_peak(profile: MemoryProfile, size: int) -> None:
    more = replace(
        profile,
        lifetimes=(
            *profile.lifetimes,
            Lifetime(size, TensorRole.ACTIVATION, 0, len(profile.segments) - 1),
        ),
    )
    assert peak_memory(more).peak_bytes == peak_memory(profile).peak_bytes + size
