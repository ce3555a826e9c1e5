"""Which pass makes a training step fit into a memory budget, and costs the least time (dPRO, Alg. 1 line 1 and Table 4).

Which regions to compute twice is an integer program, solved exactly (HiGHS) up to its bound: minimise the seconds of the chosen runs so
that no segment holds more than the budget,

    minimise sum_u cost_u x_u
    live_i - sum_u saved_(u,i) x_u <= budget                            for every segment i
    again_u - sum_(v != u) saved_(v, b_u) x_v <= budget                  if x_u = 1
    sum of x_u over the runs that hold a region <= 1                     for every region

again_u: most bytes while run u alone is computed again, at segment b_u. What the solver chose is replayed over the whole step before it
counts.

| symbol | meaning | shape |
|---|---|---|
| U | candidate runs of regions | - |
| saved | bytes that a run saves in a segment | (U, S) |
| cost | seconds that a run takes to compute again | (U,) |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import IntArray
from autotune.cluster import Cluster
from autotune.costs.issue_order import MessageTimes, channel_ends_s
from autotune.errors import InvalidInput
from autotune.memory.passes import (
    Run,
    accumulated,
    accumulated_workload,
    neighbours,
    recomputed,
    recomputed_workload,
    why_not_recomputed,
)
from autotune.memory.peak import MemoryEstimate, peak_memory
from autotune.recordings.memory_profile import (
    PROPORTIONAL,
    FixedShare,
    Lifetime,
    MemoryProfile,
    Replica,
    touched,
)
from autotune.strategy_space.plan import Plan
from autotune.units import format_bytes
from autotune.workload import Workload

MAX_RUNS = 400
MAX_PARTS = 64
SOLVER_S = 10.0
TRIES = 6
"""The program knows less than the replay: when what it chose does not fit, it is asked again for that much less."""

Seconds = Callable[[Workload], float]
"""Seconds per step of a workload under the plan, by whoever replays it."""
Estimate = Callable[[MemoryProfile, Workload], MemoryEstimate]


@dataclass(frozen=True)
class MemoryFit:
    """What was chosen. `runs`: regions of the profile before the pass that are computed twice; `parts`: micro-batches.

    `before`, `before_step_s`: as it was. `bound_s`: no choice of runs costs fewer seconds of computation; 0 where nothing is computed
    twice, and where `runs` and `parts` came together, which nobody optimized.
    """

    workload: Workload
    profile: MemoryProfile
    estimate: MemoryEstimate
    step_s: float
    before: MemoryEstimate
    before_step_s: float
    runs: tuple[Run, ...] = ()
    parts: int = 1
    bound_s: float = 0.0

    @property
    def price_s(self) -> float:
        """What the passes cost per step, as predicted."""
        return self.step_s - self.before_step_s


def plan_step_s(plan: Plan, cluster: Cluster) -> Seconds:
    """One channel that sends beside the computation: what cross_step.py says, and without crossing the backward pass waits for its end."""

    def seconds(workload: Workload) -> float:
        times = MessageTimes.of(plan, workload, cluster)
        if plan.cross_step:
            return times.period_s
        end_s = float(channel_ends_s(times.ready_s, times.cost_s).max(initial=0.0))
        return workload.forward_s + max(workload.backward_s, end_s) + workload.update_s

    return seconds


def fit_memory(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    profile: MemoryProfile,
    budget_bytes: int,
    *,
    replica: Replica | None = None,
    step_s: Seconds | None = None,
    batch: int | None = None,
    fixed: FixedShare = PROPORTIONAL,
    random: bool = True,
) -> MemoryFit:
    """The fastest way to stay within the budget: as it is, regions computed twice, or the batch in parts; both where neither is enough.

    `step_s`: predicts a step, default `plan_step_s`. `batch`: samples of a step, which the number of parts divides. `fixed`: what of
    the passes' times every part pays again. `random`: regions that draw random numbers may be computed twice. Raises `InvalidInput`,
    which says what each pass comes down to, where none fits.
    """
    seconds = step_s or plan_step_s(plan, cluster)

    def estimate(of: MemoryProfile, trained: Workload) -> MemoryEstimate:
        return peak_memory(of, trained, plan, cluster, replica=replica)

    ways = _Ways(workload, profile, budget_bytes, estimate, seconds, fixed, random)
    if ways.now.peak_bytes <= budget_bytes:
        return ways.fit(profile, workload)
    found = [fit for fit in (ways.computed_twice(), ways.in_parts(batch)) if fit is not None]
    if not found and (both := ways.both(batch)) is not None:
        found = [both]
    if not found:
        shown = ", ".join(f"{format_bytes(size)} {how}" for how, size in ways.least.items())
        raise InvalidInput(
            f"the step must fit into {format_bytes(budget_bytes)}, but needs {shown}: at least {format_bytes(min(ways.least.values()))}; "
            "give a larger budget, a smaller batch, or a plan with smaller buffers"
        )
    return min(found, key=lambda one: one.step_s)


class _Ways:
    """The passes, tried one by one. `least`: what each comes down to at its best, in bytes."""

    def __init__(
        self,
        workload: Workload,
        profile: MemoryProfile,
        budget_bytes: int,
        estimate: Estimate,
        seconds: Seconds,
        fixed: FixedShare,
        random: bool,
    ) -> None:
        self._workload, self._profile, self._budget, self._fixed, self._random = (
            workload,
            profile,
            budget_bytes,
            fixed,
            random,
        )
        self._estimate, self._seconds = estimate, seconds
        self.now = estimate(profile, workload)
        self.least = {"as it is": self.now.peak_bytes}

    def fit(
        self,
        after: MemoryProfile,
        trained: Workload,
        runs: tuple[Run, ...] = (),
        parts: int = 1,
        bound_s: float = 0.0,
    ) -> MemoryFit:
        estimate, before_s = self._estimate(after, trained), self._seconds(self._workload)
        return MemoryFit(
            trained,
            after,
            estimate,
            self._seconds(trained),
            self.now,
            before_s,
            runs,
            parts,
            bound_s,
        )

    def computed_twice(self) -> MemoryFit | None:
        chosen = choose_runs(
            self._profile, self._workload, self._budget, self._estimate, random=self._random
        )
        self._note("with regions computed twice", chosen.least_bytes)
        if not chosen.fits:
            return None
        after = recomputed(self._profile, chosen.runs)
        return self.fit(
            after,
            recomputed_workload(self._workload, self._profile, chosen.runs),
            chosen.runs,
            1,
            chosen.bound_s,
        )

    def in_parts(self, batch: int | None) -> MemoryFit | None:
        """The fewest parts that fit."""
        for parts in _parts(batch):
            after, trained = self._cut(parts)
            if self._fits("with the batch in parts", after, trained):
                return self.fit(after, trained, (), parts)
        return None

    def both(self, batch: int | None) -> MemoryFit | None:
        """The fewest parts with which every region computed twice fits; of parts, powers of two."""
        runs = tuple(
            Run(number, number)
            for number, one in enumerate(self._profile.regions)
            if why_not_recomputed(one, self._random) is None
        )
        for parts in (parts for parts in _parts(batch) if runs and parts & (parts - 1) == 0):
            cut, micro = self._cut(parts)
            after, trained = recomputed(cut, runs), recomputed_workload(micro, cut, runs)
            if self._fits("with both", after, trained):
                return self.fit(after, trained, runs, parts)
        return None

    def _cut(self, parts: int) -> tuple[MemoryProfile, Workload]:
        fixed = self._fixed
        return accumulated(self._profile, parts, fixed=fixed), accumulated_workload(
            self._workload, parts, fixed=fixed
        )

    def _fits(self, how: str, after: MemoryProfile, trained: Workload) -> bool:
        peak_bytes = self._estimate(after, trained).peak_bytes
        self._note(how, peak_bytes)
        return peak_bytes <= self._budget

    def _note(self, how: str, peak_bytes: int) -> None:
        self.least[how] = min(peak_bytes, self.least.get(how, peak_bytes))


def _parts(batch: int | None) -> Iterator[int]:
    limit = MAX_PARTS if batch is None else min(batch, MAX_PARTS)
    return (parts for parts in range(2, limit + 1) if batch is None or batch % parts == 0)


@dataclass(frozen=True)
class ChosenRuns:
    """`least_bytes`: peak of the choice, or of the one that saves the most where nothing fits."""

    runs: tuple[Run, ...]
    fits: bool
    least_bytes: int
    bound_s: float = 0.0


def candidates(profile: MemoryProfile, random: bool = True) -> list[Run]:
    """Regions that may be computed twice, alone and with their neighbours; at most about `MAX_RUNS`."""
    usable = [why_not_recomputed(region, random) is None for region in profile.regions]
    longest = max(1, MAX_RUNS // max(1, sum(usable)))
    found = []
    for first in range(len(usable)):
        for last in range(first, min(first + longest, len(usable))):
            if not usable[last] or (
                last > first and not neighbours(profile.regions[last - 1], profile.regions[last])
            ):
                break
            found.append(Run(first, last))
    return found


def choose_runs(
    profile: MemoryProfile,
    workload: Workload,
    budget_bytes: int,
    estimate: Estimate,
    *,
    random: bool = True,
) -> ChosenRuns:
    """The runs with the least seconds that keep the peak within the budget."""
    now = estimate(profile, workload)
    runs = [
        run
        for run in candidates(profile, random)
        if any(run.drops(one) for one in profile.lifetimes)
    ]
    if not runs:
        return ChosenRuns((), now.peak_bytes <= budget_bytes, now.peak_bytes)
    program = _Program(profile, workload, runs, now, estimate)
    least, wanted = now.peak_bytes, float(budget_bytes)
    for _ in range(TRIES):
        solved = program.solve(wanted)
        if solved is None:
            break
        chosen, bound_s = solved
        peak = estimate(
            recomputed(profile, chosen), recomputed_workload(workload, profile, chosen)
        ).peak_bytes
        least = min(least, peak)
        if peak <= budget_bytes:
            return ChosenRuns(tuple(chosen), True, peak, bound_s)
        wanted -= peak - budget_bytes
    return ChosenRuns((), False, min(least, program.least_bytes()))


class _Program:
    """The integer program of the module's head for one profile."""

    def __init__(
        self,
        profile: MemoryProfile,
        workload: Workload,
        runs: Sequence[Run],
        now: MemoryEstimate,
        estimate: Estimate,
    ) -> None:
        self._profile, self._workload, self._runs, self._estimate = (
            profile,
            workload,
            runs,
            estimate,
        )
        end_s = profile.end_s
        used = [run.passes(profile.regions) for run in runs]
        self._cost_s = np.array(
            [
                sum(end_s[p.last] - (end_s[p.first - 1] if p.first else 0.0) for p in passes)
                for passes in used
            ]
        )
        self._saved = np.array([_saved(profile, run) for run in runs])
        self._live = now.live_bytes
        self._at = np.array([passes[-1].backward for passes in used])
        self._again = np.array([self._most_again(run) for run in runs])

    def _most_again(self, run: Run) -> int:
        """Most bytes while this run alone is computed again and goes back."""
        after = recomputed(self._profile, [run])
        live = self._estimate(
            after, recomputed_workload(self._workload, self._profile, [run])
        ).live_bytes
        lengths = [used.last - used.first + 1 for used in run.passes(self._profile.regions)]
        return max(
            int(
                live[
                    after.regions[run.last].passes[number].backward - length : after.regions[
                        run.last
                    ]
                    .passes[number]
                    .backward
                ].max()
            )
            for number, length in enumerate(lengths)
        )

    def solve(self, budget: float) -> tuple[list[Run], float] | None:
        """The chosen runs and the bound; None where there is no choice."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        count = len(self._runs)
        tight = np.flatnonzero(self._live > budget)
        others = self._saved[:, self._at].T.astype(
            np.float64
        )  # (run that is computed again, run that saves)
        np.fill_diagonal(others, 0.0)
        slack = np.maximum(self._again - budget, 0.0)
        regions = np.array(
            [
                [run.first <= number <= run.last for run in self._runs]
                for number in range(len(self._profile.regions))
            ],
            dtype=float,
        )
        rows = np.vstack(
            [-self._saved[:, tight].T.astype(np.float64), np.diag(slack) - others, regions]
        )
        upper = np.concatenate([budget - self._live[tight], np.zeros(count), np.ones(len(regions))])
        # In units of the budget: bytes would be large numbers beside the ones of the choice.
        scale = np.concatenate(
            [np.full(len(tight) + count, max(budget, 1.0)), np.ones(len(regions))]
        )
        found = milp(
            np.maximum(self._cost_s, 1e-12),
            constraints=LinearConstraint(rows / scale[:, None], -np.inf, upper / scale),
            bounds=Bounds(0, 1),
            integrality=np.ones(count, dtype=np.int64),
            options={"time_limit": SOLVER_S},
        )
        if found.x is None:
            return None
        return [run for run, x in zip(self._runs, found.x, strict=True) if x > 0.5], float(
            found.mip_dual_bound or 0.0
        )

    def least_bytes(self) -> int:
        """The lowest peak of the simple choices: every region alone, and every run alone."""
        alone = [run for run in self._runs if run.first == run.last]
        tried = [alone, *([run] for run in self._runs)]
        return min(
            self._estimate(
                recomputed(self._profile, runs),
                recomputed_workload(self._workload, self._profile, runs),
            ).peak_bytes
            for runs in tried
            if runs
        )


def _saved(profile: MemoryProfile, run: Run) -> IntArray:
    """Bytes that the run alone saves in every segment of the profile, shape (S,)."""
    absent = []
    for used in run.passes(profile.regions):
        if used.backward > used.last + 1:
            absent += [
                Lifetime(one.bytes, one.kind, used.last + 1, used.backward - 1)
                for one in profile.lifetimes
                if run.drops(one) and one.born is not None and one.dies is not None
                if used.first <= one.born <= used.last and one.dies >= used.backward
            ]
    return touched(absent, len(profile.segments))
