"""The times of collectives on their ranks' clocks, as flat arrays.

| symbol | meaning | shape |
|---|---|---|
| R, K, E | ranks, collectives, members of collectives | - |
| start, end | of a member, on its rank's clock | (E,) s |
| of, rank | a member's collective, and its rank's place | (E,) |
| waits | whether a member cannot end before all have begun | (E,) |
| family, step | of a collective; a family is the same collective in different steps | (K,) |

A send and its receive count as a collective of two, in which only the receive waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.profiling.traces.job import TraceJob


@dataclass(frozen=True, eq=False)
class Observations:
    """Mutual collectives and pairs; the members of k are `first[k]` to `first[k + 1]`.

    `hosts` (R,): number of each rank's host, -1 if unknown.
    """

    ranks: int
    start_s: FloatArray
    end_s: FloatArray
    of: IntArray
    rank: IntArray
    waits: BoolArray
    first: IntArray
    family: IntArray
    step: IntArray
    transactions: tuple[str, ...]
    hosts: IntArray

    @property
    def collectives(self) -> int:
        return len(self.family)

    @property
    def members(self) -> int:
        return len(self.start_s)

    @cached_property
    def is_pair(self) -> BoolArray:
        """(K,) whether it is a send and its receive, which need not end together."""
        return np.bincount(self.of[~self.waits], minlength=self.collectives) > 0

    def latest_start_s(self, offset_s: FloatArray) -> FloatArray:
        """(K,) when the last member had begun, with these offsets (R,)."""
        if not self.members:
            return np.empty(0)
        latest: FloatArray = np.maximum.reduceat(
            self.start_s + offset_s[self.rank], self.first[:-1]
        )
        return latest

    def last_starter(self, offset_s: FloatArray) -> IntArray:
        """(K,) index of the member that begins last, the first of equal ones."""
        starts = self.start_s + offset_s[self.rank]
        is_last = np.flatnonzero(starts == self.latest_start_s(offset_s)[self.of])
        _, places = np.unique(self.of[is_last], return_index=True)
        last: IntArray = is_last[places]
        return last

    def violation_s(self, offset_s: FloatArray) -> FloatArray:
        """(K,) seconds by which the first end of those that wait precedes the last start."""
        if not self.members:
            return np.empty(0)
        ends = np.where(self.waits, self.end_s + offset_s[self.rank], np.inf)
        earliest = np.minimum.reduceat(ends, self.first[:-1])
        late: FloatArray = np.maximum(self.latest_start_s(offset_s) - earliest, 0.0)
        return late

    def end_spread_s(self, offset_s: FloatArray) -> FloatArray:
        """Standard deviation of the members' ends in each collective that is no pair."""
        ends = self.end_s + offset_s[self.rank]
        counts = np.diff(self.first)
        mean = np.add.reduceat(ends, self.first[:-1]) / counts
        spread: FloatArray = np.sqrt(
            np.add.reduceat((ends - mean[self.of]) ** 2, self.first[:-1]) / counts
        )
        return spread[~self.is_pair]

    def drifted(self, drift: FloatArray, middle_s: FloatArray) -> Observations:
        """Undo the drift (R,) of the ranks' clocks, which is nothing at `middle_s` (R,)."""
        rate, middle = drift[self.rank], middle_s[self.rank]
        return replace(
            self,
            start_s=self.start_s + rate * (self.start_s - middle),
            end_s=self.end_s + rate * (self.end_s - middle),
        )

    def chosen(self, keep: IntArray) -> Observations:
        """Only the collectives with these numbers (ascending)."""
        mask = np.zeros(self.collectives, dtype=np.bool_)
        mask[keep] = True
        members = mask[self.of]
        counts = np.diff(self.first)[keep]
        return Observations(
            ranks=self.ranks,
            start_s=self.start_s[members],
            end_s=self.end_s[members],
            of=np.repeat(np.arange(len(keep)), counts),
            rank=self.rank[members],
            waits=self.waits[members],
            first=np.concatenate([[0], np.cumsum(counts)]),
            family=self.family[keep],
            step=self.step[keep],
            transactions=tuple(self.transactions[k] for k in keep.tolist()),
            hosts=self.hosts,
        )


def observe(job: TraceJob) -> Observations:
    """The job's mutual collectives, and its pairs of a send and a receive.

    Their times are on the ranks' own clocks from one common origin.
    """
    joints = [joint for joint in job.joints if joint.aligns]
    members = [member for joint in joints for member in joint.members]
    counts = [len(joint.members) for joint in joints]
    spans = [job.collectives[place][index] for place, index in members]
    rank = np.array([place for place, _ in members], dtype=np.int64)
    shift_s = job.shift_s[rank]
    families: dict[str, int] = {}
    hosts: dict[str, int] = {}
    return Observations(
        ranks=len(job.ranks),
        start_s=np.array([span.start_s for span in spans], dtype=np.float64) + shift_s,
        end_s=np.array([span.end_s for span in spans], dtype=np.float64) + shift_s,
        of=np.repeat(np.arange(len(counts)), counts),
        rank=rank,
        waits=np.array(
            [one.mutual or place != one.root for one in joints for place, _ in one.members],
            dtype=np.bool_,
        ),
        first=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        family=_integers(families.setdefault(one.family, len(families)) for one in joints),
        step=_integers(joint.step for joint in joints),
        transactions=tuple(joint.transaction for joint in joints),
        hosts=_integers(hosts.setdefault(h, len(hosts)) if h else -1 for h in job.hosts.names),
    )


def _integers(values: Iterable[int]) -> IntArray:
    return np.array(list(values), dtype=np.int64)
