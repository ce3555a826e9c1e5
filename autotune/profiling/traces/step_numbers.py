"""Numbers inferred steps so that a number means the same iteration on every rank.

Inferred steps count from 0 on each rank, though the recordings may begin at different iterations.
A collective with a transaction or sequence number is the same one on all its ranks. So the most
frequent difference between the numbers of its steps is the shift of a rank. Where nothing states
such numbers, the shift is the one whose steps start nearest on the wall clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.profiling.formats.rank_trace import (
    ANNOTATED,
    INFERRED,
    MISSING,
    Comm,
    RankTrace,
    Repair,
)
from autotune.profiling.traces.collectives import TracedCollective
from autotune.profiling.traces.groups import GroupNumbers
from autotune.profiling.traces.matching import POINT_TO_POINT

DOUBTFUL = 2.0
"""Another shift may also be right if its steps start at most this many times as far apart."""
_TRIED = 8
"""Shifts that are compared on the wall clock, those of the most steps first."""
_BY_NUMBERS = "by the transaction and sequence numbers of collectives"
_BY_CLOCK = "by the nearest starts on the wall clock"

_Key = tuple[object, ...]


def with_common_numbers(
    traces: Sequence[RankTrace], collectives: Sequence[Sequence[TracedCollective]]
) -> tuple[list[RankTrace], list[Repair]]:
    """Return the traces with inferred steps renumbered, and a repair for each shift and guess.

    `collectives` (R,) of each trace. Stated numbers of steps stay as they are.
    """
    sources = [{step.source for step in trace.steps} for trace in traces]
    stated = [place for place, source in enumerate(sources) if ANNOTATED in source]
    inferred = [place for place, source in enumerate(sources) if INFERRED in source]
    anchors, waiting = (stated, inferred) if stated else (inferred[:1], inferred[1:])
    if not waiting:
        return list(traces), []
    numbering = _Numbering(traces, collectives)
    for place in anchors:
        numbering.settle(place, _Shift(0))
    numbering.settle_all(waiting)
    lowest = 0 if stated else min(numbering.first_number(place) for place in inferred)
    renumbered = list(traces)
    repairs: list[Repair] = []
    for place in inferred:
        trace, shift = traces[place], numbering.shifts[place]
        steps = (replace(step, number=step.number + shift.by - lowest) for step in trace.steps)
        renumbered[place] = replace(trace, steps=tuple(steps))
        if text := shift.text(traces[anchors[0]].rank or 0):
            repairs.append(Repair(text, rank=trace.rank))
    return renumbered, repairs


@dataclass(frozen=True)
class _Shift:
    """A shift of a rank's step numbers, and another one that fits nearly as well."""

    by: int
    how: str = _BY_NUMBERS
    other: int | None = None

    def text(self, anchor: int) -> str:
        """Describe the shift against rank `anchor`; "" for none that was found without a guess."""
        if self == _Shift(0):
            return ""
        doubt = "" if self.other is None else f"; {self.other:+d} fits nearly as well, so check it"
        return (
            f"inferred steps are matched with those of rank {anchor} {self.how}, which moves "
            f"their numbers by {self.by:+d}{doubt}"
        )


@dataclass
class _Numbering:
    """The shifts found so far, by place, and the steps of the collectives that they number."""

    traces: Sequence[RankTrace]
    collectives: Sequence[Sequence[TracedCollective]]
    shifts: dict[int, _Shift] = field(default_factory=dict)
    step_of: dict[_Key, int] = field(default_factory=dict)
    groups: GroupNumbers = field(default_factory=GroupNumbers)
    keys: dict[int, dict[_Key, int]] = field(default_factory=dict)

    def settle(self, place: int, shift: _Shift) -> None:
        self.shifts[place] = shift
        for key, number in self._keys(place).items():
            self.step_of.setdefault(key, number + shift.by)
        del self.keys[place]

    def settle_all(self, waiting: Sequence[int]) -> None:
        """Settle the ranks by the numbers of collectives, and those without any by the clock."""
        for place in waiting:
            if not self._keys(place):
                self.settle(place, self._by_clock(place))
        waiting = [place for place in waiting if place not in self.shifts]
        while waiting:
            for place in waiting:
                votes = self._votes(place)
                if votes:
                    self.settle(place, self._by_votes(place, votes))
            left = [place for place in waiting if place not in self.shifts]
            if len(left) == len(waiting):
                self.settle(left[0], self._by_clock(left[0]))
            waiting = [place for place in left if place not in self.shifts]

    def first_number(self, place: int) -> int:
        return self.traces[place].steps[0].number + self.shifts[place].by

    def _keys(self, place: int) -> dict[_Key, int]:
        """Identity of a collective that occurs once on the rank -> number of its step."""
        if place not in self.keys:
            numbers = [step.number for step in self.traces[place].steps]
            keys = [_key(one.comm, self.groups) for one in self.collectives[place]]
            times = Counter(keys)
            self.keys[place] = {
                key: numbers[one.step]
                for key, one in zip(keys, self.collectives[place], strict=True)
                if key and one.step != MISSING and times[key] == 1
            }
        return self.keys[place]

    def _votes(self, place: int) -> Counter[int]:
        """Shift -> how many collectives it brings into the step that other ranks have them in."""
        return Counter(
            self.step_of[key] - number
            for key, number in self._keys(place).items()
            if key in self.step_of
        )

    def _by_votes(self, place: int, votes: Mapping[int, int]) -> _Shift:
        most = max(votes.values())
        tied = [shift for shift, count in votes.items() if count == most]
        tied.sort(key=lambda shift: self._apart_s(place, shift))
        return _Shift(tied[0], other=tied[1] if len(tied) > 1 else None)

    def _by_clock(self, place: int) -> _Shift:
        """The shift whose steps start nearest to those of the first rank with settled numbers."""
        numbers, starts_s = self._starts(self._anchor)
        after = np.searchsorted(starts_s, self._starts(place)[1])
        tried: Counter[int] = Counter()
        for at in (after - 1, after):
            nearest = np.clip(at, 0, len(starts_s) - 1)
            tried.update((numbers[nearest] - self._starts(place)[0]).tolist())
        shifts = [shift for shift, _ in tried.most_common(_TRIED)]
        apart_s = {shift: self._apart_s(place, shift) for shift in shifts}
        best, *others = sorted(shifts, key=lambda shift: apart_s[shift])
        doubtful = bool(others) and apart_s[others[0]] <= DOUBTFUL * apart_s[best]
        return _Shift(best, _BY_CLOCK, others[0] if doubtful else None)

    @property
    def _anchor(self) -> int:
        return next(iter(self.shifts))

    def _apart_s(self, place: int, shift: int) -> float:
        """Median distance of the starts of steps that `shift` gives the same number; else inf."""
        anchor_numbers, anchor_s = self._starts(self._anchor)
        start_s = dict(zip(anchor_numbers.tolist(), anchor_s.tolist(), strict=True))
        numbers, starts_s = self._starts(place)
        apart_s = [
            abs(start_s[number + shift] - at_s)
            for number, at_s in zip(numbers.tolist(), starts_s.tolist(), strict=True)
            if number + shift in start_s
        ]
        return float(np.median(apart_s)) if apart_s else float("inf")

    def _starts(self, place: int) -> tuple[IntArray, FloatArray]:
        """Numbers of a rank's steps, and their starts on the wall clock of the first rank."""
        trace = self.traces[place]
        since_s = (trace.origin_ns - self.traces[0].origin_ns) * 1e-9
        numbers = np.array([step.number for step in trace.steps], dtype=np.int64)
        return numbers, np.array([step.start_s for step in trace.steps]) + since_s


def _key(comm: Comm, groups: GroupNumbers) -> _Key:
    """The identity of a collective over all steps; () where the trace states none.

    Sequence numbers of sends and receives count for each pair of ranks.
    """
    if comm.transaction:
        return ("transaction", comm.transaction)
    if comm.sequence == MISSING or comm.name in POINT_TO_POINT:
        return ()
    group = (comm.group, groups.number(comm.group_ranks))
    return ("sequence", *group, comm.name, comm.sequence)
