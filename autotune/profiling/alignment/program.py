"""The convex program that finds the offsets (dPRO, sec. 4.2), in CVXPY.

Durations of receiving are clipped by the latest start: d_e = end_e + theta_p - m_k with m_k = max over the members of
start_j + theta_j. Their variance over the steps (dPRO's O1) is not convex in theta, since -m_k is concave; and an epigraph
m_k >= start_j + theta_j is no way out, because then a larger m_k makes every duration what the program wants it to be. So the clipping is
iterated: the member that begins last at the present offsets is taken to be the one that clips, which makes d_e linear and its variance a
convex quadratic; the program is solved, and again with the members that begin last then, until they stay the same. The offsets with the
least true objective are kept, so that an iteration can only improve it.

O1 says nothing where the same rank clips in every step. What collectives add to the paper's point-to-point messages is that all
members end together but for one hop of the ring: O3 is the deviation of their ends from a time of the collective's own, under Huber's
loss, for a rank that is descheduled ends late without its clock being late.

    minimize    sum_e huber((end_e + theta_p - t_k) / sigma_e)                 O3
              + sum_e ((d_e - mean_(family, p)) / sigma_d)^2                    O1
              + sum_p ((theta_p - clock_h) / sigma_h)^2, p on a known host h    O2
              + rho sum_k slack_k
    subject to  start_e + theta_p <= m_k <= end_e + theta_p + slack_k,   theta_0 = 0

Constraints are entered for those collectives only that the offsets found without them would break, until none is broken: nearly all of
them are far from tight, and what is optimal under a part of the constraints and breaks none is optimal under all.

The weights are one over the squared noise of what each term measures: sigma_e and sigma_d are estimated from the traces, sigma_h is what
profilers of one host disagree by. The penalty on the slack is exact: no constraint is broken while offsets exist that break none.
All times in units of sigma_e, each collective's counted from its own middle, or the numbers are badly scaled.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import cvxpy as cp
import numpy as np
import scipy.sparse as sp

from autotune.errors import InvalidInput
from autotune.profiling.alignment.observations import FloatArray, IntArray, Observations

HOST_NOISE_S = 1e-6
LEAST_NOISE_S = 1e-6
"""Traces of before 2024 hold whole microseconds."""
SLACK_PRICE = 1e3
"""Per sigma_e of slack and member, far above what any offset gains."""
EASED = (1.0, 30.0, 1000.0)
"""Times that contradict each other by far more than their noise are too badly scaled for the solver: then with more noise."""
ROUNDS = 4
TOLERANCE_S = 1e-8
"""The solver's own: an order broken by less is not broken."""


@dataclass(frozen=True)
class Noise:
    """Standard deviations, s: of ends within a collective, and of clipped durations within a family."""

    end_s: float
    duration_s: float


def first_guess(seen: Observations) -> FloatArray:
    """(R,) offsets that make ends agree with the reference's: from rank to rank over the collectives they share, by medians."""
    offset = np.zeros(seen.ranks)
    known = np.zeros(seen.ranks, dtype=np.bool_)
    known[0] = True
    for _ in range(seen.ranks):
        has = known[seen.rank]
        total = np.bincount(seen.of[has], weights=(seen.end_s + offset[seen.rank])[has], minlength=seen.collectives)
        count = np.bincount(seen.of[has], minlength=seen.collectives)
        usable = ~has & (count[seen.of] > 0)
        if not usable.any():
            break
        late = total[seen.of[usable]] / count[seen.of[usable]] - seen.end_s[usable]
        ranks = seen.rank[usable]
        order = np.argsort(ranks, kind="stable")
        cuts = np.flatnonzero(np.diff(ranks[order])) + 1
        for part in np.split(order, cuts):
            offset[ranks[part[0]]] = np.median(late[part])
            known[ranks[part[0]]] = True
    return offset


def noise_of(seen: Observations, offset_s: FloatArray) -> Noise:
    """From the medians at these offsets; 1.4826 makes a median of deviations a standard deviation."""
    end = float(np.median(seen.end_spread_s(offset_s))) if seen.collectives else 0.0
    durations = seen.end_s + offset_s[seen.rank] - seen.latest_start_s(offset_s)[seen.of]
    groups = _family_groups(seen)
    mean = np.bincount(groups, weights=durations) / np.maximum(np.bincount(groups), 1)
    spread = 1.4826 * float(np.median(np.abs(durations - mean[groups]))) if seen.members else 0.0
    return Noise(max(end, LEAST_NOISE_S), max(spread, LEAST_NOISE_S))


def _family_groups(seen: Observations) -> IntArray:
    """(E,) number of the (family, rank) of each member."""
    _, groups = np.unique(seen.family[seen.of] * seen.ranks + seen.rank, return_inverse=True)
    numbered: IntArray = groups.astype(np.int64)
    return numbered


class Program:
    """The program for one set of observations; solved again for other clipping members and other weights of the collectives."""

    def __init__(self, seen: Observations, noise: Noise, base_s: FloatArray) -> None:
        """`base_s` (R,): offsets near the ones to be found; the program's variables count from them."""
        self.seen, self.noise, self.base_s = seen, noise, base_s
        starts_s, ends_s = seen.start_s + base_s[seen.rank], seen.end_s + base_s[seen.rank]
        middle_s = np.add.reduceat(ends_s, seen.first[:-1]) / np.diff(seen.first)
        self.start = starts_s - middle_s[seen.of]
        self.end = ends_s - middle_s[seen.of]
        self.pick_rank = _picking(seen.rank, seen.ranks)
        self.pick_collective = _picking(seen.of, seen.collectives)
        self.groups = _family_groups(seen)
        self.bound: IntArray = np.empty(0, dtype=np.int64)
        self.repeated = np.bincount(self.groups)[self.groups] > 1

    def solve(self, offset_s: FloatArray, weights: FloatArray | None = None, rounds: int = ROUNDS) -> FloatArray:
        """(R,) offsets, s, found from `offset_s`; `weights` (K,) say how often each collective counts. Raises `InvalidInput`."""
        weight = np.ones(self.seen.collectives) if weights is None else weights
        best, best_value = offset_s, np.inf
        clipping: IntArray | None = None
        for _ in range(rounds):
            last = self.seen.last_starter(offset_s)
            if clipping is not None and np.array_equal(last, clipping):
                break
            clipping = last
            offset_s = self._solved(clipping, weight)
            value = self.objective(offset_s, weight)
            if value < best_value:
                best, best_value = offset_s, value
        return best

    def _solved(self, clipping: IntArray, weight: FloatArray) -> FloatArray:
        bound = self.bound
        while True:
            found = (self._solved_within(clipping, weight, bound, eased) for eased in EASED)
            offset_s = next((offsets for offsets in found if offsets is not None), None)
            if offset_s is None:
                raise InvalidInput("the ranks' clocks could not be aligned: no solution was found; are the traces of one job?")
            broken = np.flatnonzero(self.seen.violation_s(offset_s) > TOLERANCE_S)
            if not len(np.setdiff1d(broken, bound)):
                self.bound = bound
                return offset_s
            bound = np.union1d(bound, broken)

    def _solved_within(self, clipping: IntArray, weight: FloatArray, bound: IntArray, eased: float) -> FloatArray | None:
        """(R,) with the constraints of the collectives `bound` only, None where the solver fails; `eased` multiplies the noise."""
        seen, noise = self.seen, Noise(eased * self.noise.end_s, eased * self.noise.duration_s)
        start, end = self.start / noise.end_s, self.end / noise.end_s
        theta, together = cp.Variable(seen.ranks), cp.Variable(seen.collectives)
        own = self.pick_rank @ theta
        root = np.sqrt(weight[seen.of])
        cost = cp.sum(cp.multiply(weight[seen.of], cp.huber(end + own - self.pick_collective @ together)))
        members = np.flatnonzero(self.repeated)
        if len(members):
            clipper = clipping[seen.of[members]]
            durations = end[members] - start[clipper] + (self.pick_rank[members] - _picking(seen.rank[clipper], seen.ranks)) @ theta
            numbers, groups = np.unique(self.groups[members], return_inverse=True)
            mean = cp.Variable(len(numbers))
            off = cp.multiply(root[members], durations - _picking(groups, len(numbers)) @ mean)
            cost += cp.sum_squares(off * (noise.end_s / noise.duration_s))
        known = np.flatnonzero(seen.hosts >= 0)
        if len(known):
            clock = cp.Variable(int(seen.hosts.max()) + 1)
            same = (
                _picking(known, seen.ranks) @ theta
                + self.base_s[known] / noise.end_s
                - _picking(seen.hosts[known], int(seen.hosts.max()) + 1) @ clock
            )
            cost += cp.sum_squares(same * (noise.end_s / (eased * HOST_NOISE_S)))
        rules = [theta[0] == 0]
        if len(bound):
            latest, slack = cp.Variable(len(bound)), cp.Variable(len(bound), nonneg=True)
            within = np.flatnonzero(np.isin(seen.of, bound))
            collective = _picking(np.searchsorted(bound, seen.of[within]), len(bound))
            at = self.pick_rank[within] @ theta
            rules += [start[within] + at <= collective @ latest, collective @ (latest - slack) <= end[within] + at]
            cost += SLACK_PRICE * cp.sum(slack)
        problem = cp.Problem(cp.Minimize(cost), rules)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "may be inaccurate": some nanoseconds; what is broken is reported as slack
            try:
                problem.solve(solver=cp.CLARABEL)
            except cp.error.SolverError:
                return None
        if theta.value is None:
            return None
        found: FloatArray = self.base_s + (theta.value - theta.value[0]) * noise.end_s
        found -= found[0]
        return found

    def objective(self, offset_s: FloatArray, weight: FloatArray) -> float:
        """The true objective, with the clipping that these offsets have."""
        seen, noise = self.seen, self.noise
        ends = seen.end_s + offset_s[seen.rank]
        counts = np.diff(seen.first)
        middle = np.array([np.median(ends[a:b]) for a, b in zip(seen.first[:-1], seen.first[1:], strict=True)]) if len(counts) else counts
        off = np.abs(ends - middle[seen.of]) / noise.end_s
        value = float(np.sum(weight[seen.of] * np.where(off <= 1, off**2, 2 * off - 1)))
        value += SLACK_PRICE * float(np.sum(seen.violation_s(offset_s))) / noise.end_s
        durations = ends - seen.latest_start_s(offset_s)[seen.of]
        total = np.bincount(self.groups, weights=weight[seen.of])
        mean = np.bincount(self.groups, weights=weight[seen.of] * durations) / np.maximum(total, 1e-12)
        value += float(np.sum(weight[seen.of] * ((durations - mean[self.groups]) / noise.duration_s) ** 2))
        for host in np.unique(seen.hosts[seen.hosts >= 0]):
            own = offset_s[seen.hosts == host]
            value += float(np.sum((own - own.mean()) ** 2)) / HOST_NOISE_S**2
        return value


def _picking(columns: IntArray, width: int) -> sp.csr_matrix:
    """(len(columns), width) with a one per row."""
    return sp.csr_matrix((np.ones(len(columns)), (np.arange(len(columns)), columns)), shape=(len(columns), width))
