"""The convex program that finds the offsets (dPRO, sec. 4.2), in CVXPY.

Durations of receiving are clipped by the latest start: d_e = end_e + theta_p - m_k. Here m_k is the
maximum of start_j + theta_j over the members. Their variance over the steps (dPRO's O1) is not
convex in theta, since -m_k is concave. An epigraph m_k >= start_j + theta_j does not help: a larger
m_k makes every duration what the program wants. So the clipping is iterated. The member that begins
last at the present offsets is taken as the one that clips. This makes d_e linear and its variance a
convex quadratic. The program is solved, and again with the members that then begin last, until they
stay the same. The offsets with the least true objective are kept, so iterations only improve it.

O1 states nothing where the same rank clips in every step. Collectives add to the paper's
point-to-point messages that all members end together, up to one hop of the ring. O3 is the
deviation of their ends from a time of the collective's own, under Huber's loss: a descheduled rank
ends late though its clock is not late. A send and its receive have no common end, so no O3. Only
the receive has a duration, and only its end must follow both starts. Where only such pairs lead to
a rank, and the same side clips in all of them, all offsets that keep the order are equally good. O4
then takes the middle.

    minimize    sum_e huber((end_e + theta_p - t_k) / sigma_e)                 O3
              + sum_e ((d_e - mean_(family, p)) / sigma_d)^2                    O1
              + sum_p ((theta_p - clock_h) / sigma_h)^2, p on a known host h    O2
              + sum_p ((theta_p - guess_p) / error_p)^2, p guessed by messages  O4
              + rho sum_k slack_k, only where no theta satisfies the order without slack
    subject to  start_e + theta_p <= m_k <= end_e + theta_p + slack_k,   theta_0 = 0

Where clocks drift (`drift`), theta_p becomes theta_p + delta_m (t - middle_m) at the time t of each
start and end. There is one bounded delta_m per machine, counted from the rough drift that the
observations are already freed of. All terms stay linear in the variables.

Only collectives whose constraints the offsets found without them would break enter the program,
until none is broken. Nearly all are far from tight. A solution that is optimal under some of the
constraints and breaks none is optimal under all.

The weights are one over the squared noise of each term's measurement: sigma_e and sigma_d are
estimated from the traces, sigma_h is the disagreement of profilers on one host, and error_p comes
with the guess (`guess`). Slack is 0 wherever offsets satisfy the order of all events: no price
outweighs the pull of many collectives. It has the price rho only where the order is infeasible.
Times are in units of sigma_e, each collective's counted from its own middle; otherwise the numbers
are badly scaled.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import cvxpy as cp
import numpy as np
import scipy.sparse as sp

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.errors import InvalidInput
from autotune.profiling.alignment.drift import MOST_DRIFT
from autotune.profiling.alignment.guess import Guess
from autotune.profiling.alignment.observations import Observations

HOST_NOISE_S = 1e-6
LEAST_NOISE_S = 1e-6
"""Traces from before 2024 hold whole microseconds."""
SLACK_PRICE = 1e3
"""Per sigma_e of a collective's slack, where no offsets satisfy the order."""
CERTAIN = 1e-12
"""The solver's tolerance of a proof that nothing is feasible. Its own, 1e-8, takes the pull of some
hundred collectives for such a proof."""
EASED = (1.0, 30.0, 1000.0)
"""Factors on the noise: times that contradict each other far beyond it are badly scaled."""
ROUNDS = 4
TOLERANCE_S = 1e-8
"""The solver's own tolerance: an order broken by less is not broken."""


@dataclass(frozen=True)
class Noise:
    """Standard deviations of ends in a collective and of clipped durations in a family, s.

    Where there are only pairs, both are that of durations.
    """

    end_s: float
    duration_s: float


def noise_of(observed: Observations, offset_s: FloatArray) -> Noise:
    """Noise from medians at these offsets; 1.4826 converts a median deviation to a standard one."""
    durations = (
        observed.end_s + offset_s[observed.rank] - observed.latest_start_s(offset_s)[observed.of]
    )[observed.waits]
    groups = _family_groups(observed)[observed.waits]
    mean = np.bincount(groups, weights=durations) / np.maximum(np.bincount(groups), 1)
    spread = 1.4826 * float(np.median(np.abs(durations - mean[groups]))) if len(groups) else 0.0
    ends = observed.end_spread_s(offset_s)
    end = float(np.median(ends)) if len(ends) else spread
    return Noise(max(end, LEAST_NOISE_S), max(spread, LEAST_NOISE_S))


def _family_groups(observed: Observations) -> IntArray:
    """(E,) number of the (family, rank) of each member."""
    _, groups = np.unique(
        observed.family[observed.of] * observed.ranks + observed.rank, return_inverse=True
    )
    numbered: IntArray = groups.astype(np.int64)
    return numbered


@dataclass(frozen=True, eq=False)
class Drifts:
    """The clocks whose drift is searched for.

    `machine`, `middle_s`, `rough` (R,) as in `drift`; `free` (R,), equal within a machine.
    """

    machine: IntArray
    middle_s: FloatArray
    rough: FloatArray
    free: BoolArray


class Program:
    """The program for one set of observations, solved for several clipping members and weights.

    Clocks are arrays (2, R): the offsets in s, and the drifts beyond the rough ones in s per s.
    """

    def __init__(self, observed: Observations, noise: Noise, guess: Guess, drifts: Drifts) -> None:
        """`observed` is freed of the rough drift.

        The program's variables count from the offsets of `guess`.
        """
        self.observed, self.noise, self.drifts = observed, noise, drifts
        self.base_s = base_s = guess.offset_s
        self.guessed = np.flatnonzero(np.isfinite(guess.error_s))
        self.error_s = np.maximum(guess.error_s[self.guessed], LEAST_NOISE_S)
        starts_s, ends_s = (
            observed.start_s + base_s[observed.rank],
            observed.end_s + base_s[observed.rank],
        )
        middle_s = np.add.reduceat(ends_s, observed.first[:-1]) / np.diff(observed.first)
        self.start = starts_s - middle_s[observed.of]
        self.end = ends_s - middle_s[observed.of]
        self.pick_rank = _picking(observed.rank, observed.ranks)
        self.ended = np.flatnonzero(~observed.is_pair[observed.of])
        together = np.cumsum(~observed.is_pair) - 1
        self.pick_collective = _picking(
            together[observed.of[self.ended]], int((~observed.is_pair).sum())
        )
        self.groups = _family_groups(observed)
        self.bound: IntArray = np.empty(0, dtype=np.int64)
        self.contradictory = False  # no offsets satisfy the order of the collectives `bound`
        self.repeated = observed.waits & (np.bincount(self.groups)[self.groups] > 1)
        self.free_machines, first_ranks = np.unique(drifts.machine[drifts.free], return_index=True)
        self.rough = drifts.rough[drifts.free][first_ranks]
        apart_s = np.abs(observed.end_s - drifts.middle_s[observed.rank])
        self.half_s = max(float(apart_s.max(initial=0.0)), LEAST_NOISE_S)
        self.lean_start, self.lean_end = (
            self._leaning(observed.start_s),
            self._leaning(observed.end_s),
        )

    def _leaning(self, at_s: FloatArray) -> sp.csr_matrix:
        """(E, free machines) distance from the machine's middle, in half the recording's length."""
        machine = self.drifts.machine[self.observed.rank]
        rows = np.flatnonzero(np.isin(machine, self.free_machines))
        columns = np.searchsorted(self.free_machines, machine[rows])
        leaning = (at_s - self.drifts.middle_s[self.observed.rank])[rows] / self.half_s
        return sp.csr_matrix((leaning, (rows, columns)), shape=(len(at_s), len(self.free_machines)))

    def _moved(self, clocks: FloatArray) -> Observations:
        return (
            self.observed.drifted(clocks[1], self.drifts.middle_s)
            if len(self.free_machines)
            else self.observed
        )

    def solve(
        self, clocks: FloatArray, weights: FloatArray | None = None, rounds: int = ROUNDS
    ) -> FloatArray:
        """Find the clocks, starting at `clocks`.

        `weights` (K,): how often each collective counts. Raises `InvalidInput`.
        """
        weight = np.ones(self.observed.collectives) if weights is None else weights
        best, best_value = clocks, np.inf
        clipping: IntArray | None = None
        for _ in range(rounds):
            last = self._moved(clocks).last_starter(clocks[0])
            if clipping is not None and np.array_equal(last, clipping):
                break
            clipping = last
            clocks = self._solved(clipping, weight)
            value = self.objective(clocks, weight)
            if value < best_value:
                best, best_value = clocks, value
        return best

    def _solved(self, clipping: IntArray, weight: FloatArray) -> FloatArray:
        bound = self.bound
        while True:
            clocks = self._solved_under(clipping, weight, bound)
            if clocks is None:
                raise InvalidInput(
                    "the ranks' clocks could not be aligned: no solution was found; are the traces "
                    "of one job?"
                )
            broken = np.flatnonzero(self._moved(clocks).violation_s(clocks[0]) > TOLERANCE_S)
            if not len(np.setdiff1d(broken, bound)):
                self.bound = bound
                return clocks
            bound = np.union1d(bound, broken)

    def _solved_under(
        self, clipping: IntArray, weight: FloatArray, bound: IntArray
    ) -> FloatArray | None:
        """Clocks that keep the order of the collectives `bound`, else those with priced slack."""
        if not self.contradictory:
            for eased in EASED:
                clocks = self._solved_within(clipping, weight, bound, eased, slack=False)
                if clocks is not None:
                    return clocks
                if self.contradictory:
                    break
        if not len(bound):
            return None
        tries = (self._solved_within(clipping, weight, bound, eased, slack=True) for eased in EASED)
        return next((solution for solution in tries if solution is not None), None)

    def _solved_within(
        self, clipping: IntArray, weight: FloatArray, bound: IntArray, eased: float, *, slack: bool
    ) -> FloatArray | None:
        """Clocks under the constraints of the collectives `bound` only.

        None where the solver fails; `eased` multiplies the noise. With `slack` the order may be
        broken at a price.
        """
        observed = self.observed
        noise = Noise(eased * self.noise.end_s, eased * self.noise.duration_s)
        start, end = self.start / noise.end_s, self.end / noise.end_s
        theta = cp.Variable(observed.ranks)
        own_start = own_end = self.pick_rank @ theta
        rules = [theta[0] == 0]
        if len(self.free_machines):
            delta = cp.Variable(len(self.free_machines))  # of the clock over half the recording
            own_start = own_start + self.lean_start @ delta
            own_end = own_end + self.lean_end @ delta
            rules += [cp.abs(delta * (noise.end_s / self.half_s) + self.rough) <= MOST_DRIFT]
        root = np.sqrt(weight[observed.of])
        cost: cp.Expression = cp.Constant(0.0)
        if len(ended := self.ended):
            together = cp.Variable(self.pick_collective.shape[1])
            apart = end[ended] + own_end[ended] - self.pick_collective @ together
            cost += cp.sum(cp.multiply(weight[observed.of[ended]], cp.huber(apart)))
        members = np.flatnonzero(self.repeated)
        if len(members):
            clipper = clipping[observed.of[members]]
            durations = end[members] - start[clipper] + own_end[members] - own_start[clipper]
            numbers, groups = np.unique(self.groups[members], return_inverse=True)
            mean = cp.Variable(len(numbers))
            off = cp.multiply(root[members], durations - _picking(groups, len(numbers)) @ mean)
            cost += cp.sum_squares(off * (noise.end_s / noise.duration_s))
        for pull in self._pulls(theta, noise.end_s, eased):
            cost += pull
        if len(bound):
            latest, late = cp.Variable(len(bound)), cp.Variable(len(bound), nonneg=True)
            within = np.flatnonzero(np.isin(observed.of, bound))
            collective = _picking(np.searchsorted(bound, observed.of[within]), len(bound))
            rules += [start[within] + own_start[within] <= collective @ latest]
            waits = observed.waits[within]
            waiting = within[waits]
            earliest = latest - late if slack else latest
            rules += [collective[waits] @ earliest <= end[waiting] + own_end[waiting]]
            cost += SLACK_PRICE * cp.sum(late) if slack else 0.0
        problem = cp.Problem(cp.Minimize(cost), rules)
        if not _solver_ends(problem):
            return None
        infeasible = problem.status in (cp.INFEASIBLE, cp.INFEASIBLE_INACCURATE)
        self.contradictory = self.contradictory or infeasible
        if theta.value is None:
            return None
        clocks = np.zeros((2, observed.ranks))
        clocks[0] = self.base_s + (theta.value - theta.value[0]) * noise.end_s
        clocks[0] -= clocks[0][0]
        if len(self.free_machines):
            of_rank = np.searchsorted(self.free_machines, self.drifts.machine[self.drifts.free])
            clocks[1, self.drifts.free] = (delta.value * noise.end_s / self.half_s)[of_rank]
        return clocks

    def _pulls(self, theta: cp.Variable, end_s: float, eased: float) -> list[cp.Expression]:
        """O2 and O4: the costs of leaving the clock of each host, and the guess.

        `end_s`: the unit of `theta`.
        """
        observed = self.observed
        pulls: list[cp.Expression] = []
        known = np.flatnonzero(observed.hosts >= 0)
        if len(known):
            clock = cp.Variable(int(observed.hosts.max()) + 1)
            same = (
                _picking(known, observed.ranks) @ theta
                + self.base_s[known] / end_s
                - _picking(observed.hosts[known], int(observed.hosts.max()) + 1) @ clock
            )
            pulls.append(cp.sum_squares(same * (end_s / (eased * HOST_NOISE_S))))
        if len(self.guessed):
            weights = end_s / (eased * self.error_s)
            pulls.append(cp.sum_squares(cp.multiply(weights, theta[self.guessed])))
        return pulls

    def objective(self, clocks: FloatArray, weight: FloatArray) -> float:
        """The true objective, with the clipping of these clocks."""
        observed, noise, offset_s = self._moved(clocks), self.noise, clocks[0]
        ends = observed.end_s + offset_s[observed.rank]
        cuts = zip(observed.first[:-1], observed.first[1:], strict=True)
        middle = np.array([np.median(ends[begin:end]) for begin, end in cuts])
        weights = weight[observed.of]
        off = (np.abs(ends - middle[observed.of]) / noise.end_s)[self.ended]
        value = float(np.sum(weights[self.ended] * np.where(off <= 1, off**2, 2 * off - 1)))
        value += SLACK_PRICE * float(np.sum(observed.violation_s(offset_s))) / noise.end_s
        durations = ends - observed.latest_start_s(offset_s)[observed.of]
        weights = weights * observed.waits
        total = np.maximum(np.bincount(self.groups, weights=weights), 1e-12)
        mean = np.bincount(self.groups, weights=weights * durations) / total
        deviation = (durations - mean[self.groups]) / noise.duration_s
        value += float(np.sum(weights * deviation**2))
        for host in np.unique(observed.hosts[observed.hosts >= 0]):
            on_host = offset_s[observed.hosts == host]
            value += float(np.sum((on_host - on_host.mean()) ** 2)) / HOST_NOISE_S**2
        moved_s = (offset_s - self.base_s)[self.guessed]
        return value + float(np.sum((moved_s / self.error_s) ** 2))


def _solver_ends(problem: cp.Problem) -> bool:
    """Solve the problem, or find that it is infeasible; False where the solver fails."""
    with warnings.catch_warnings():
        # "may be inaccurate": by some nanoseconds; slack reports what is broken
        warnings.simplefilter("ignore", UserWarning)
        try:
            problem.solve(solver=cp.CLARABEL, tol_infeas_abs=CERTAIN, tol_infeas_rel=CERTAIN)
        except cp.error.SolverError:
            return False
    return True


def _picking(columns: IntArray, width: int) -> sp.csr_matrix:
    """(len(columns), width) with a one per row."""
    return sp.csr_matrix(
        (np.ones(len(columns)), (np.arange(len(columns)), columns)), shape=(len(columns), width)
    )
