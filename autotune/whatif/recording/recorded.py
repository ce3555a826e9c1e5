"""Cuts a recorded trace into the base of its what-ifs: one rank's step, linked to the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.profiling.formats.collective_args import element_bytes
from autotune.profiling.formats.flaws import unfollowed_launches
from autotune.profiling.formats.rank_trace import MISSING, Category, RankTrace, TracedStep
from autotune.profiling.graph.rank_ops import Cause, RankOps, TracedOp
from autotune.profiling.graph.step_ops import step_ops
from autotune.profiling.traces.collectives import TracedCollective
from autotune.profiling.traces.groups import process_groups
from autotune.profiling.traces.job import TraceJob
from autotune.whatif.base import Base, BaseNames
from autotune.whatif.recording.operators import operators_of

TWIN_DISTANCE = 1000
"""How far from the same place of its thread the op of the next step may be that does the same."""

LOADING = "enumerate(DataLoader)"
"""torch annotates the wait for the next batch with a name that begins so."""


_Edge = tuple[int, int, int]


def recorded_base(job: TraceJob, place: int) -> Base:
    """The base of rank `place` of a job: of two consecutive steps with the median distance.

    Collectives of a job with one rank send nothing, and are copies. Raises `InvalidInput` for
    a trace without two complete, consecutive steps.
    """
    trace, pairs = job.ranks[place], consecutive_steps(job.ranks[place])
    middle = median_place(step_distances_s(trace, pairs))
    waits_s = _waits_for_others(job, place)
    base = _Cut(trace, job.collectives[place], waits_s, *pairs[middle]).base()
    if trace.world_size == 1:
        kind = np.where(base.kind == Kind.COLLECTIVE, Kind.COPY, base.kind)
        base = replace(base, kind=kind.astype(np.int32))
    return base


def _waits_for_others(job: TraceJob, place: int) -> dict[int, float]:
    """Collective of the rank -> seconds that it waits for the last rank.

    All members of a mutual collective end together, so the member that came last has the shortest
    duration. This needs no common clock.
    """
    waits_s: dict[int, float] = {}
    for index, number in job.joint_of[place].items():
        joint = job.joints[number]
        if joint.mutual and joint.complete:
            members = [job.collectives[other][member] for other, member in joint.members]
            one = job.collectives[place][index]
            waits_s[index] = one.end_s - one.start_s - min(m.end_s - m.start_s for m in members)
    return waits_s


def consecutive_steps(trace: RankTrace) -> list[tuple[TracedStep, TracedStep]]:
    """Pairs of steps without a step in between. Raises `InvalidInput` if there is none."""
    launches, name = unfollowed_launches(trace)
    if launches:
        raise InvalidInput(
            f"a what-if needs the device's work, but {trace.source} has {launches} launches (the "
            f"first is {name!r}) and no kernel; record with ProfilerActivity.CUDA, and where the "
            "profiler may read the device's counters"
        )
    pairs = [(a, b) for a, b in pairwise(trace.steps) if b.number == a.number + 1]
    if not pairs:
        raise InvalidInput(
            "a what-if needs two complete, consecutive training steps, but "
            f"{trace.source} has {len(trace.steps)}; record with `prof.step()` after every step, "
            "and at least two of them active"
        )
    return pairs


def step_distances_s(
    trace: RankTrace, pairs: Sequence[tuple[TracedStep, TracedStep]]
) -> list[float]:
    """For each pair the seconds between the ends of the last op that both steps do.

    It is one that a call launches on a device, if there are any. NaN if they do not share one.
    """
    events, called_s = _by_call(trace)
    ends_s, keys = trace.end_s[events], trace.lane[events] * len(trace.names) + trace.name[events]
    lasts: dict[int, tuple[IntArray, IntArray]] = {}
    for step in {step.number: step for pair in pairs for step in pair}.values():
        first, last = np.searchsorted(called_s, (step.start_s, step.end_s))
        key, back = np.unique(keys[first:last][::-1], return_index=True)
        lasts[step.number] = key, last - 1 - back
    distances_s = []
    for before, step in pairs:
        (keys_before, at_before), (keys_in, at) = lasts[before.number], lasts[step.number]
        _, shared_before, shared = np.intersect1d(
            keys_before, keys_in, assume_unique=True, return_indices=True
        )
        if not len(shared):
            distances_s.append(float("nan"))
            continue
        latest = int(np.argmax(at[shared]))
        first, second = at_before[shared_before[latest]], at[shared[latest]]
        distances_s.append(float(ends_s[second] - ends_s[first]))
    return distances_s


def _by_call(trace: RankTrace) -> tuple[IntArray, FloatArray]:
    """Device events in the order of their calls, and when these began; without any, host events."""
    events = np.flatnonzero(trace.launch != MISSING)
    called_s = trace.start_s[trace.launch[events]]
    if not len(events):
        events = np.flatnonzero(np.isin(trace.category, (Category.HOST_OP, Category.RUNTIME)))
        called_s = trace.start_s[events]
    order = np.argsort(called_s, kind="stable")
    return events[order], called_s[order]


def median_place(values: Sequence[float]) -> int:
    """Place of the lower median; of 0 if no value is a number."""
    known = sorted((value, place) for place, value in enumerate(values) if value == value)
    return known[(len(known) - 1) // 2][1] if known else 0


@dataclass(eq=False)
class _Cut:
    """The ops of two steps, and where each ends: the first step's, then the base's."""

    trace: RankTrace
    collectives: Sequence[TracedCollective]
    waits_s: Mapping[int, float]
    before: TracedStep
    step: TracedStep

    def __post_init__(self) -> None:
        self.span = step_ops(self.trace, self.before.start_s, self.step.end_s, self.collectives)
        ops, lanes = self.span.ops, self.trace.lanes
        self.on_device = [lanes[op.lane].device for op in ops]
        self.launch = _launches(self.span, self.on_device)
        self.lasts = self._lasts()
        first, second = (ops[last] for last in self.lasts)
        self.measured_s = second.end_s - first.end_s

    def _lasts(self) -> tuple[int, int]:
        """The last ops that both steps do: of those launched on a device, if there are any.

        They are the same if name and queue are. They count in the order of the host.
        """
        ops = self.span.ops
        numbers: Sequence[int] = list(self.launch) or range(len(ops))
        shown: tuple[dict[tuple[str, int], int], ...] = ({}, {})
        for number in sorted(numbers, key=self.host_s):
            late = self.host_s(number) >= self.step.start_s
            shown[late][ops[number].name, ops[number].lane] = number
        both = [key for key in shown[1] if key in shown[0]]
        if not both:
            raise InvalidInput(
                f"two consecutive steps must do the same, but steps {self.before.number} and "
                f"{self.step.number} of {self.trace.source} have no op in common"
            )
        key = max(both, key=lambda one: self.host_s(shown[1][one]))
        return shown[0][key], shown[1][key]

    def host_s(self, number: int) -> float:
        """When the host came to the op, or to its launch; work without a launch: its start."""
        return self.span.ops[self.launch.get(number, number)].called_s

    def base(self) -> Base:
        """The base of the second step, which begins where the first one ends."""
        begin_s, end_s = (self.host_s(last) for last in self.lasts)
        at_s = np.array([self.host_s(number) for number in range(len(self.span.ops))])
        before, inside = at_s <= begin_s, (at_s > begin_s) & (at_s <= end_s)
        before[list(self.lasts)], inside[list(self.lasts)] = (True, False), (False, True)
        return _BaseBuild(self, np.flatnonzero(before), np.flatnonzero(inside)).base()


class _BaseBuild:
    """`before`, `inside`: ops of the first step and of the base, by their numbers in the span."""

    def __init__(self, cut: _Cut, before: IntArray, inside: IntArray) -> None:
        self.cut, self.ops = cut, cut.span.ops
        self.inside = inside.tolist()
        self.new = {number: place for place, number in enumerate(self.inside)}
        self.lanes_before = self._by_lane(before.tolist())
        self.lanes = self._by_lane(self.inside)
        self.place_before = {
            number: place
            for lane in self.lanes_before.values()
            for place, number in enumerate(lane)
        }

    def _by_lane(self, numbers: list[int]) -> dict[int, list[int]]:
        """Lane -> its ops in order; a device works in the order of its starts."""
        lanes: dict[int, list[int]] = {}
        for number in sorted(numbers, key=lambda one: (self.ops[one].called_s, one)):
            lanes.setdefault(self.ops[number].lane, []).append(number)
        return lanes

    def base(self) -> Base:
        cut, ops = self.cut, [self.ops[number] for number in self.inside]
        queues, layers = sorted(self.lanes), sorted({op.layer for op in ops} - {""})
        queue_of = {lane: number for number, lane in enumerate(queues)}
        layer_of = {layer: number for number, layer in enumerate(layers)}
        before_gaps = list(ops)  # the ops whose gaps count: of a lane's last op, the one before
        for lane, numbers in self.lanes.items():
            if lane in self.lanes_before:
                before_gaps[self.new[numbers[-1]]] = self.ops[self.lanes_before[lane][-1]]
        gap_s = np.array([op.gap_s for op in before_gaps])
        loading = loading_s(cut.trace, before_gaps)
        edges = self._edges()
        parent, child, later = (
            np.array([edge[k] for edge in edges], dtype=np.int64) for k in (0, 1, 2)
        )
        delay_s = np.array(list(edges.values()))
        unknown_gap_s, unknown_delay_s = self._unknown(edges)
        operator, operators = operators_of(cut.trace, [op.event for op in ops])
        launch = np.full(len(ops), NONE, dtype=np.int32)
        for number, launcher in cut.launch.items():
            if number in self.new and launcher in self.new:
                launch[self.new[number]] = self.new[launcher]
        duration_s = np.array([op.duration_s for op in ops])
        return Base(
            duration_s=duration_s,
            recorded_s=duration_s,
            gap_s=gap_s,
            size_bytes=np.array([op.size_bytes for op in ops]),
            queue=np.array([queue_of[op.lane] for op in ops], dtype=np.int32),
            kind=np.array([op.kind for op in ops], dtype=np.int32),
            layer=np.array([layer_of.get(op.layer, NONE) for op in ops], dtype=np.int32),
            on_device=np.array([cut.on_device[number] for number in self.inside]),
            launch=launch,
            operator=operator,
            launched=self._launched(),
            event=np.array([op.event for op in ops], dtype=np.int64),
            parent=parent,
            child=child,
            delay_s=delay_s,
            later=later,
            unknown_gap_s=np.minimum(unknown_gap_s, gap_s),
            unknown_delay_s=np.minimum(unknown_delay_s, delay_s),
            priority=np.zeros(len(ops), dtype=np.int32),
            by_priority=np.zeros(len(queues), dtype=np.bool_),
            loading_s=loading,
            between_s=np.maximum(_between_s(cut, before_gaps) - loading, 0.0),
            names=BaseNames(
                tuple(op.name for op in ops),
                tuple(cut.trace.lanes[lane].name for lane in queues),
                tuple(layers),
                operators,
            ),
            last=self.new[cut.lasts[1]],
            measured_s=cut.measured_s,
            device=cut.trace.info.get("device_name", "") if any(cut.on_device) else "",
            groups=process_groups(
                cut.collectives[op.collective] for op in ops if op.collective != MISSING
            ),
            world_size=cut.trace.world_size,
            element_bytes=self._element_bytes(ops),
            waits_s={
                number: min(cut.waits_s[op.collective], op.duration_s)
                for number, op in enumerate(ops)
                if cut.waits_s.get(op.collective, 0.0) > 0
            },
        )

    def _element_bytes(self, ops: Sequence[TracedOp]) -> dict[int, int]:
        messages = [(at, op.collective) for at, op in enumerate(ops) if op.collective != MISSING]
        sizes = {at: element_bytes(self.cut.collectives[one].comm.dtype) for at, one in messages}
        return {at: size for at, size in sizes.items() if size}

    def _launched(self) -> IntArray:
        numbers = [
            number
            for number, launcher in self.cut.launch.items()
            if number in self.new and launcher in self.new
        ]
        numbers.sort(key=lambda one: (self.cut.host_s(one), self.ops[one].start_s))
        return np.array([self.new[number] for number in numbers], dtype=np.int64)

    def _edges(self) -> dict[tuple[int, int, int], float]:
        """(parent, child, steps later) -> delay, by numbers of the base."""
        edges: dict[tuple[int, int, int], float] = {}
        for numbers in self.lanes.values():  # also where the lane did nothing before
            edges[self.new[numbers[-1]], self.new[numbers[0]], 1] = 0.0
        for (parent, child), delay_s in self.cut.span.edges.items():
            if child not in self.new:
                continue
            if parent in self.new:
                key = self.new[parent], self.new[child], 0
            elif (twin := self._twin(parent, child)) is not None:
                key = self.new[twin], self.new[child], 1
            else:
                continue
            edges[key] = max(edges.get(key, 0.0), delay_s)
        return edges

    def _twin(self, parent: int, child: int) -> int | None:
        """The op of the base that does what `parent` did in the step before.

        The one with its name at the nearest place of its lane, counted from the end.
        """
        lane = self.ops[parent].lane
        numbers = self.lanes.get(lane)
        if numbers is None or parent not in self.place_before:
            return None
        if lane == self.ops[child].lane:
            return numbers[-1]
        place = len(numbers) - len(self.lanes_before[lane]) + self.place_before[parent]
        for distance in range(TWIN_DISTANCE):
            for other in (place - distance, place + distance):
                if 0 <= other < len(numbers) and self._same(parent, numbers[other]):
                    return numbers[other]
        return None

    def _same(self, first: int, second: int) -> bool:
        return self.ops[first].name == self.ops[second].name

    def _unknown(
        self, edges: Mapping[tuple[int, int, int], float]
    ) -> tuple[FloatArray, FloatArray]:
        """(N,) and (E,): the parts of gaps and delays that are waits without a known cause."""
        gaps_s, delays_s = np.zeros(len(self.inside)), np.zeros(len(edges))
        into: dict[int, list[int]] = {}
        for number, (_, child, _) in enumerate(edges):
            into.setdefault(child, []).append(number)
        listed = list(edges.items())
        for wait in self.cut.span.waits:
            if wait.cause is not Cause.UNKNOWN or wait.op not in self.new:
                continue
            child = self.new[wait.op]
            delayed = [edge for edge in into.get(child, []) if listed[edge][1] >= wait.length_s]
            if delayed:
                delays_s[delayed[0]] = wait.length_s
                continue
            numbers = self.lanes[self.ops[wait.op].lane]
            previous = numbers[numbers.index(wait.op) - 1]  # of the first op: the last one's
            gaps_s[self.new[previous]] = wait.length_s
        return gaps_s, delays_s


def _launches(span: RankOps, on_device: Sequence[bool]) -> dict[int, int]:
    """Device op -> the host op that launches it."""
    return {
        child: parent for parent, child in span.edges if on_device[child] and not on_device[parent]
    }


def _between_s(cut: _Cut, ops: Sequence[TracedOp]) -> FloatArray:
    """(N,) the gap of the op after which the host ends one step and begins the next, else 0.

    Other threads idle then for longer, so it is the shortest gap around the turn.
    """
    result = np.zeros(len(ops))
    hosts = [at for at, op in enumerate(ops) if not cut.trace.lanes[op.lane].device]
    for turn_s in (cut.before.start_s, cut.step.start_s, cut.step.end_s):
        around = [at for at in hosts if ops[at].end_s <= turn_s <= ops[at].end_s + ops[at].gap_s]
        if around:
            shortest = min(around, key=lambda at: ops[at].gap_s)
            result[shortest] = ops[shortest].gap_s
    return result


def loading_s(trace: RankTrace, ops: Sequence[TracedOp]) -> FloatArray:
    """(N,) the part of each op's gap in which an annotation says that its thread loads data."""
    marks: dict[int, list[tuple[float, float]]] = {}
    names = np.array([name.startswith(LOADING) for name in trace.names], dtype=np.bool_)
    loads = (trace.category == Category.HOST_MARK) & names[trace.name]
    for event in np.flatnonzero(loads).tolist():
        span = float(trace.start_s[event]), float(trace.end_s[event])
        marks.setdefault(int(trace.lane[event]), []).append(span)
    result = np.zeros(len(ops))
    for number, op in enumerate(ops):
        for start_s, end_s in marks.get(op.lane, []) if op.gap_s > 0 else []:
            result[number] += max(min(op.end_s + op.gap_s, end_s) - max(op.end_s, start_s), 0.0)
    return result
