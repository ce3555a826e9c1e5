"""Memory of random steps: sums, passes and choices against simple twins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_cluster import cluster

from autotune.cluster import Cluster
from autotune.memory.accumulation import accumulated
from autotune.memory.fitting import candidates, choose_runs
from autotune.memory.peak import highest_peak, peak_memory
from autotune.memory.process_groups import ProcessGroups
from autotune.memory.recomputation import Run, recomputed
from autotune.recordings.memory_file import RecordedMemory
from autotune.recordings.memory_profile import (
    Lifetime,
    MemoryProfile,
    Pass,
    Phase,
    Region,
    Replica,
    Segment,
    TensorRole,
    touched,
)
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.shares import Shares, normal_shares
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Variable, Workload

SIZES = st.integers(0, 1000)


def alive(one: Lifetime, segments: int) -> set[int]:
    """The segments that a lifetime touches, one by one."""
    if one.born is None or one.dies is None:
        return set(range(segments))
    at, touched_at = one.born, {one.born}
    while at != one.dies:
        at = (at + 1) % segments
        touched_at.add(at)
    return touched_at


@st.composite
def lifetimes(draw: st.DrawFn) -> tuple[int, list[Lifetime]]:
    """The number of segments, and the lifetimes."""
    segments = draw(st.integers(1, 9))
    at = st.integers(0, segments - 1)
    one = st.builds(Lifetime, SIZES, st.just(TensorRole.ACTIVATION), at, at)
    return segments, draw(st.lists(one, max_size=12))


@given(lifetimes())
def test_touched_bytes_match_a_walk_along_each_lifetime(step) -> None:
    segments, held = step
    slow = [sum(one.bytes for one in held if at in alive(one, segments)) for at in range(segments)]
    assert touched(held, segments).tolist() == slow


def workload(layers: int) -> Workload:
    return Workload("L", tuple(Variable(f"v{n}", (1,)) for n in reversed(range(layers))))


@st.composite
def layered(draw: st.DrawFn, most: int = 5) -> MemoryProfile:
    """A sequence of layers: forward, backward in the opposite order, update."""
    layers = draw(st.integers(1, most))
    last = 2 * layers
    seconds = st.integers(1, 9).map(lambda tenths: tenths / 10)
    forward = [Segment(Phase.FORWARD, draw(seconds), reads=(f"v{n}",)) for n in range(layers)]
    backward = [
        Segment(Phase.BACKWARD, draw(seconds), readies=(f"v{n}",)) for n in reversed(range(layers))
    ]
    held = [Lifetime(draw(SIZES), TensorRole.PARAMETER)]
    regions = []
    for n in range(layers):
        back = last - 1 - n
        activation = (TensorRole.ACTIVATION, n, back)
        held.append(Lifetime(draw(SIZES), *activation, region=n))
        if n + 1 < layers:
            dies = draw(st.sampled_from((n + 1, back)))  # the next layer keeps it or not
            result = Lifetime(draw(SIZES), TensorRole.ACTIVATION, n, dies, region=n, returned=True)
            held.append(result)
        held.append(Lifetime(draw(SIZES), TensorRole.GRADIENT, back, last, f"v{n}"))
        held.append(Lifetime(draw(SIZES), TensorRole.TEMPORARY, back, back))
        held.append(Lifetime(draw(SIZES), TensorRole.TEMPORARY, n, n))
        regions.append(Region(f"l{n}", (Pass(n, n, back),), chain="", position=n))
    segments = (*forward, *backward, Segment(Phase.UPDATE, 0.1))
    return MemoryProfile(workload(layers).id, "meta", segments, tuple(held), tuple(regions))


class HeldTensors:
    """The live tensors of a step, and their peak. `runs` hold their inputs."""

    def __init__(self, profile: MemoryProfile, runs: Sequence[Run]) -> None:
        self.lifetimes = profile.lifetimes
        self.fixed = sum(one.bytes for one in profile.lifetimes if one.born is None)
        self.dies = [one.dies for one in profile.lifetimes]
        for number, one in enumerate(profile.lifetimes):
            for run in runs:
                if one.returned and one.region == run.first - 1 and one.dies is not None:
                    held_until = 2 * len(profile.regions) - 1 - run.first
                    self.dies[number] = max(one.dies, held_until)
        self.held: dict[int, int] = {}
        self.peak = 0

    def enter(self, at: int, again: Run | None = None) -> None:
        for number, one in enumerate(self.lifetimes):
            repeated = not again or again.drops(one) or one.kind is TensorRole.TEMPORARY
            if one.born == at and repeated:
                self.held[number] = one.bytes
        self.peak = max(self.peak, self.fixed + sum(self.held.values()))

    def leave(self, at: int) -> None:
        self.held = {n: size for n, size in self.held.items() if self.dies[n] != at}

    def compute_again(self, run: Run) -> None:
        for at in range(run.first, run.last + 1):
            self.enter(at, run)
            self.leave(at)

    def drop(self, run: Run) -> None:
        self.held = {n: size for n, size in self.held.items() if not run.drops(self.lifetimes[n])}


def replayed(profile: MemoryProfile, runs: Sequence[Run]) -> int:
    """The peak of a step with `runs` computed twice, by a walk with a set of live tensors."""
    layers = len(profile.regions)
    tensors = HeldTensors(profile, runs)
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


def numbers(runs: Iterable[Run]) -> list[int]:
    return [n for run in runs for n in range(run.first, run.last + 1)]


def choices(profile: MemoryProfile) -> Iterator[tuple[Run, ...]]:
    """All sets of disjoint runs."""
    runs = candidates(profile)
    sets = chain.from_iterable(combinations(runs, size) for size in range(len(runs) + 1))
    return (runs for runs in sets if len(set(numbers(runs))) == len(numbers(runs)))


@settings(max_examples=60, deadline=None)
@given(layered(), st.data())
def test_recomputed_peaks_match_a_walk_through_the_step(profile, data: st.DataObject) -> None:
    runs: list[Run] = []
    at = 0
    while at < len(profile.regions):
        length = data.draw(st.integers(0, len(profile.regions) - at))
        if length:
            runs.append(Run(at, at + length - 1))
        at += max(1, length)
    assert peak_memory(recomputed(profile, runs)).peak_bytes == replayed(profile, runs)


@settings(max_examples=25, deadline=None)
@given(layered(most=4), st.floats(0.5, 1.0))
def test_the_chosen_runs_fit_at_the_least_cost(profile: MemoryProfile, share: float) -> None:
    budget = int(peak_memory(profile).peak_bytes * share)
    seconds = {
        runs: sum(profile.segments[n].seconds for n in numbers(runs)) for runs in choices(profile)
    }
    fitting = [cost for runs, cost in seconds.items() if replayed(profile, runs) <= budget]
    trained = workload(len(profile.regions))
    chosen = choose_runs(profile, trained, budget, lambda profile, _: peak_memory(profile))
    assert chosen.fits == bool(fitting)
    if fitting:
        assert peak_memory(recomputed(profile, chosen.runs)).peak_bytes <= budget
        assert abs(seconds[chosen.runs] - min(fitting)) < 1e-9


@given(layered(), st.integers(1, 4))
def test_micro_batches_keep_the_time_and_the_constant_memory(profile, parts: int) -> None:
    after = accumulated(profile, parts)
    assert abs(float(after.end_s[-1] - profile.end_s[-1])) < 1e-9
    assert after.always_bytes == profile.always_bytes
    assert after.live_bytes[-1] <= profile.live_bytes[-1]
    if parts == 1:
        assert after.live_bytes.tolist() == profile.live_bytes.tolist()


@given(layered(), SIZES)
def test_more_bytes_anywhere_never_lower_the_peak(profile: MemoryProfile, size: int) -> None:
    whole_step = Lifetime(size, TensorRole.ACTIVATION, 0, len(profile.segments) - 1)
    more = replace(profile, lifetimes=(*profile.lifetimes, whole_step))
    assert peak_memory(more).peak_bytes == peak_memory(profile).peak_bytes + size


ELEMENTS = 1000


@st.composite
def owned_plans(draw: st.DrawFn) -> tuple[Cluster, Plan]:
    """Messages of direct exchanges or of servers, flat or hierarchical, on hosts of 1 to 3 ranks.

    The hosts take turns, so that the ranks of one host do not follow each other.
    """
    devices = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    on = cluster(*((count, 8000) for count in devices))
    world = on.world_size
    direct = draw(st.booleans())
    how = Synchronizer.DIRECT_EXCHANGE if direct else Synchronizer.PARAMETER_SERVER
    messages = []
    for number in range(draw(st.integers(1, 4))):
        shares = draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
        total = sum(shares)
        messages.append(
            Message(
                (TensorSlice(f"v{number}", ELEMENTS, rows=1),),
                how,
                Compressor.NONE,
                "float32",
                owner=None if direct else draw(st.integers(0, world - 1)),
                hierarchical=draw(st.booleans()),
                shares=normal_shares([one / total for one in shares]) if direct and total else None,
            )
        )
    order = tuple(draw(st.permutations(range(world)))) if draw(st.booleans()) else None
    return on, Plan("model", world, tuple(messages), ring_order=order)


def slow_group(on: Cluster, plan: Plan, message: Message) -> list[int]:
    hosts = on.host_of_rank
    along = plan.ring_order or range(plan.world_size)
    if not message.hierarchical or len(set(hosts)) in (1, len(hosts)):
        return list(along)
    leaders = [min(rank for rank in along if hosts[rank] == host) for host in set(hosts)]
    if message.owner is not None:
        leaders = [rank for rank in leaders if hosts[rank] != hosts[message.owner]]
        leaders.append(message.owner)
    return [rank for rank in along if rank in leaders]


def slow_shares(on: Cluster, message: Message, group: Sequence[int]) -> Shares | None:
    hosts, shares = on.host_of_rank, message.shares
    if shares is None or len(group) == len(hosts):
        return shares
    together = [0.0] * len(shares)
    for leader in group:
        together[leader] = sum(
            share for share, host in zip(shares, hosts, strict=True) if host == hosts[leader]
        )
    return tuple(together)


@given(owned_plans(), st.data())
def test_groups_and_shares_of_messages_match_a_search_for_each(world, data: st.DataObject) -> None:
    on, plan = world
    rank = data.draw(st.integers(0, on.world_size - 1))
    groups = ProcessGroups(plan, Replica(rank, host_of_rank=on.host_of_rank))
    for message in (*plan.messages, *plan.messages):
        group, slow = groups.of(message), slow_group(on, plan, message)
        assert list(group.ranks) == slow
        assert group.place == (slow.index(rank) if rank in slow else None)
        fast_shares, shares = groups.shares(message), slow_shares(on, message, slow)
        assert (fast_shares is None) == (shares is None)
        for one, other in zip(fast_shares or (), shares or (), strict=True):
            assert abs(one - other) < 1e-12


@settings(deadline=None)
@given(owned_plans(), layered())
def test_no_rank_needs_more_memory_than_the_highest_peak(world, profile: MemoryProfile) -> None:
    """Up to the rounding of the elements that ranks own."""
    on, plan = world
    names = sorted({*profile_names(profile), *(one.slices[0].variable for one in plan.messages)})
    trained = Workload("L", tuple(Variable(name, (ELEMENTS,)) for name in names))
    profile = replace(profile, model=trained.id)
    plan = replace(plan, workload_id=trained.id)
    memory = RecordedMemory(profile, ddp=False)
    peaks = [
        peak_memory(
            profile, trained, plan, on, replica=memory.replica(rank, on.host_of_rank)
        ).peak_bytes
        for rank in range(on.world_size)
    ]
    rounded_bytes = 4 * len(plan.messages) * on.world_size
    assert highest_peak(memory, profile, trained, plan, on).peak_bytes >= max(peaks) - rounded_bytes


def profile_names(profile: MemoryProfile) -> set[str]:
    return {name for segment in profile.segments for name in (*segment.reads, *segment.readies)}
