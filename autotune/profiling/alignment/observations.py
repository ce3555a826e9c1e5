"""What collectives tell about clocks, as flat arrays.

| symbol | meaning | shape |
|---|---|---|
| R, K, E | ranks, collectives, members of collectives | - |
| start, end | of a member, on its rank's clock | (E,) s |
| of, rank | the collective and the rank's place of a member | (E,) |
| family, step | of a collective; members of a family are the same collective in different steps | (K,) |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.profiling.traces.job import TraceJob


@dataclass(frozen=True, eq=False)
class Observations:
    """Of mutual collectives only. Members stand by collective: those of k are `first[k]` to `first[k + 1]`. `hosts` (R,): -1 if unknown."""

    ranks: int
    start_s: FloatArray
    end_s: FloatArray
    of: IntArray
    rank: IntArray
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

    def latest_start_s(self, offset_s: FloatArray) -> FloatArray:
        """(K,) when the last member had begun, with these offsets (R,)."""
        if not self.members:
            return np.empty(0)
        latest: FloatArray = np.maximum.reduceat(
            self.start_s + offset_s[self.rank], self.first[:-1]
        )
        return latest

    def last_starter(self, offset_s: FloatArray) -> IntArray:
        """(K,) the member (index into the E) that begins last; of equal ones the first."""
        starts = self.start_s + offset_s[self.rank]
        is_last = np.flatnonzero(starts == self.latest_start_s(offset_s)[self.of])
        _, places = np.unique(self.of[is_last], return_index=True)
        found: IntArray = is_last[places]
        return found

    def violation_s(self, offset_s: FloatArray) -> FloatArray:
        """(K,) by how much the first end comes before the last start."""
        if not self.members:
            return np.empty(0)
        earliest = np.minimum.reduceat(self.end_s + offset_s[self.rank], self.first[:-1])
        late: FloatArray = np.maximum(self.latest_start_s(offset_s) - earliest, 0.0)
        return late

    def end_spread_s(self, offset_s: FloatArray) -> FloatArray:
        """(K,) standard deviation of the members' ends."""
        ends = self.end_s + offset_s[self.rank]
        counts = np.diff(self.first)
        mean = np.add.reduceat(ends, self.first[:-1]) / counts
        spread: FloatArray = np.sqrt(
            np.add.reduceat((ends - mean[self.of]) ** 2, self.first[:-1]) / counts
        )
        return spread

    def drifted(self, drift: FloatArray, middle_s: FloatArray) -> Observations:
        """The same with the drift (R,) of the ranks' clocks undone, which adds nothing at `middle_s` (R,)."""
        rate, middle = drift[self.rank], middle_s[self.rank]
        return replace(
            self,
            start_s=self.start_s + rate * (self.start_s - middle),
            end_s=self.end_s + rate * (self.end_s - middle),
        )

    def chosen(self, keep: IntArray) -> Observations:
        """Only the collectives of those numbers (ascending)."""
        mask = np.zeros(self.collectives, dtype=np.bool_)
        mask[keep] = True
        members = mask[self.of]
        counts = np.diff(self.first)[keep]
        return Observations(
            self.ranks,
            self.start_s[members],
            self.end_s[members],
            np.repeat(np.arange(len(keep)), counts),
            self.rank[members],
            np.concatenate([[0], np.cumsum(counts)]),
            self.family[keep],
            self.step[keep],
            tuple(self.transactions[k] for k in keep.tolist()),
            self.hosts,
        )


def observe(job: TraceJob) -> Observations:
    """The job's mutual collectives, with times on the ranks' own clocks counted from one common number."""
    starts, ends, ranks, counts, families, steps, names = [], [], [], [], [], [], []
    known: dict[str, int] = {}
    for joint in job.joints:
        if not joint.mutual:
            continue
        for place, index in joint.members:
            one = job.collectives[place][index]
            starts.append(one.start_s + job.shift_s[place])
            ends.append(one.end_s + job.shift_s[place])
            ranks.append(place)
        counts.append(len(joint.members))
        families.append(known.setdefault(joint.family, len(known)))
        steps.append(joint.step)
        names.append(joint.transaction)
    hosts: dict[str, int] = {}
    numbers = [hosts.setdefault(host, len(hosts)) if host else -1 for host in job.hosts.names]
    return Observations(
        len(job.ranks),
        np.array(starts, dtype=np.float64),
        np.array(ends, dtype=np.float64),
        np.repeat(np.arange(len(counts)), counts),
        np.array(ranks, dtype=np.int64),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.array(families, dtype=np.int64),
        np.array(steps, dtype=np.int64),
        tuple(names),
        np.array(numbers, dtype=np.int64),
    )
