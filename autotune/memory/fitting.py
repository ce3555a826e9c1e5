"""Fit a training step into a memory budget at the least cost in time (dPRO, Alg. 1 and Table 4).

An integer program chooses the regions to compute twice; HiGHS solves it exactly, up to its bound.
It minimizes the seconds of the chosen runs, with no segment above the budget:

    minimise sum_u cost_u x_u
    live_i - sum_u saved_(u,i) x_u <= budget                            for every segment i
    again_u - sum_(v != u) saved_(v, b_u) x_v <= budget                  if x_u = 1
    sum of x_u over the runs that hold a region <= 1                     for every region

again_u: most bytes while run u alone is repeated, at segment b_u. The second line is linear with
raised_i, the most bytes that the inputs of disjoint runs add to segment i (negative savings):

    max(again_u + raised_(b_u) - budget, 0) x_u - sum_(v != u) saved_(v,b_u) x_v <= raised_(b_u)

The solver's choice is checked on the profile of the whole step before it counts.

| symbol | meaning | shape | unit |
|---|---|---|---|
| U, S | candidate runs of regions, segments | - | - |
| saved | bytes that a run saves in a segment; negative where it holds its input | (U, S) | B |
| cost | time to compute a run again | (U,) | s |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.lower import Lowering
from autotune.memory.accumulation import accumulated, accumulated_workload
from autotune.memory.peak import MemoryEstimate, peak_memory
from autotune.memory.recomputation import (
    Run,
    neighbours,
    recomputation_error,
    recomputed,
    recomputed_workload,
)
from autotune.memory.saved_bytes import raised_bytes, saved_bytes
from autotune.recordings.memory_profile import PROPORTIONAL, FixedShare, MemoryProfile, Replica
from autotune.strategy_space.plan import Plan
from autotune.units import format_bytes
from autotune.workload import Workload

MAX_RUNS = 400
MAX_PARTS = 64
SOLVER_S = 10.0
MAX_SOLVES = 6
"""The program knows less than the profile: if its choice does not fit, it is solved for less."""

StepSeconds = Callable[[Workload], float]
"""Predicted seconds per step of a workload under the plan."""
Estimate = Callable[[MemoryProfile, Workload], MemoryEstimate]


@dataclass(frozen=True)
class MemoryFit:
    """The chosen pass, and the profile, workload, memory and step time with it.

    `runs`: regions, of the profile before the pass, that are computed twice. `parts`:
    micro-batches. `before`, `before_step_s`: without any pass. `bound_s`: no choice of runs within
    the budget costs fewer seconds; 0 without runs, and if runs and parts are combined, which
    nothing optimizes.
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
        """Predicted cost of the passes per step."""
        return self.step_s - self.before_step_s


def fit_memory(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    profile: MemoryProfile,
    budget_bytes: int,
    *,
    step_s: StepSeconds | None = None,
    replica: Replica | None = None,
    batch: int | None = None,
    fixed: FixedShare = PROPORTIONAL,
    costs: RuntimeCosts | None = None,
) -> MemoryFit:
    """The fastest way to stay within the budget.

    The candidates are the step unchanged, with regions computed twice, or with the batch in parts;
    both passes together only if neither suffices. `step_s` predicts a step, by default with a
    replay of the plan by `costs` (None: those of the workload's device). `batch`: samples of a
    step, a multiple of the number of parts. `fixed`: the share of the passes' times that every part
    pays. Raises `InvalidInput`, with the lowest peak of each pass, if nothing fits.
    """

    def estimate(candidate: MemoryProfile, trained: Workload) -> MemoryEstimate:
        return peak_memory(candidate, trained, plan, cluster, replica=replica)

    def replayed_s(trained: Workload) -> float:
        return Lowering(trained, cluster, costs).step_s(plan)

    fitter = _Fitter(workload, profile, budget_bytes, estimate, step_s or replayed_s, fixed)
    if fitter.before.peak_bytes <= budget_bytes:
        return fitter.fit(profile, workload)
    fits = [fit for fit in (fitter.recompute(), fitter.accumulate(batch)) if fit is not None]
    if not fits and (combined := fitter.recompute_and_accumulate(batch)) is not None:
        fits = [combined]
    if not fits:
        lowest = fitter.lowest_bytes
        listed = ", ".join(f"{format_bytes(size)} {how}" for how, size in lowest.items())
        raise InvalidInput(
            f"the step must fit into {format_bytes(budget_bytes)}, but needs {listed}: "
            f"at least {format_bytes(min(lowest.values()))}; "
            "give a larger budget, a smaller batch, or a plan with smaller buffers"
        )
    return min(fits, key=lambda fit: fit.step_s)


class _Fitter:
    """Tries the passes. `lowest_bytes`: the lowest peak of each."""

    def __init__(
        self,
        workload: Workload,
        profile: MemoryProfile,
        budget_bytes: int,
        estimate: Estimate,
        step_s: StepSeconds,
        fixed: FixedShare,
    ) -> None:
        self._workload = workload
        self._profile = profile
        self._budget_bytes = budget_bytes
        self._estimate = estimate
        self._step_s = step_s
        self._fixed = fixed
        self.before = estimate(profile, workload)
        self.lowest_bytes = {"as it is": self.before.peak_bytes}

    def fit(
        self,
        profile: MemoryProfile,
        workload: Workload,
        runs: tuple[Run, ...] = (),
        parts: int = 1,
        bound_s: float = 0.0,
    ) -> MemoryFit:
        return MemoryFit(
            workload=workload,
            profile=profile,
            estimate=self._estimate(profile, workload),
            step_s=self._step_s(workload),
            before=self.before,
            before_step_s=self._step_s(self._workload),
            runs=runs,
            parts=parts,
            bound_s=bound_s,
        )

    def recompute(self) -> MemoryFit | None:
        chosen = choose_runs(self._profile, self._workload, self._budget_bytes, self._estimate)
        self._note("with regions computed twice", chosen.lowest_bytes)
        if not chosen.fits:
            return None
        runs = chosen.runs
        workload = recomputed_workload(self._workload, self._profile, runs)
        return self.fit(
            recomputed(self._profile, runs), workload, runs=runs, bound_s=chosen.bound_s
        )

    def accumulate(self, batch: int | None) -> MemoryFit | None:
        """The fewest parts that fit."""
        for parts in _parts(batch):
            profile, workload = self._cut(parts)
            if self._fits("with the batch in parts", profile, workload):
                return self.fit(profile, workload, parts=parts)
        return None

    def recompute_and_accumulate(self, batch: int | None) -> MemoryFit | None:
        """The fewest parts, a power of two, with every region that drops tensors computed twice."""
        lifetimes = self._profile.lifetimes
        singles = (
            Run(number, number)
            for number, region in enumerate(self._profile.regions)
            if recomputation_error(region) is None
        )
        runs = tuple(run for run in singles if any(map(run.drops, lifetimes)))
        for parts in _parts(batch):
            if not runs or parts & (parts - 1) != 0:
                continue
            cut, micro = self._cut(parts)
            profile, workload = recomputed(cut, runs), recomputed_workload(micro, cut, runs)
            if self._fits("with both", profile, workload):
                return self.fit(profile, workload, runs=runs, parts=parts)
        return None

    def _cut(self, parts: int) -> tuple[MemoryProfile, Workload]:
        workload = accumulated_workload(self._workload, parts, self._fixed)
        return accumulated(self._profile, parts, self._fixed), workload

    def _fits(self, how: str, profile: MemoryProfile, workload: Workload) -> bool:
        peak_bytes = self._estimate(profile, workload).peak_bytes
        self._note(how, peak_bytes)
        return peak_bytes <= self._budget_bytes

    def _note(self, how: str, peak_bytes: int) -> None:
        self.lowest_bytes[how] = min(peak_bytes, self.lowest_bytes.get(how, peak_bytes))


def _parts(batch: int | None) -> Iterator[int]:
    limit = MAX_PARTS if batch is None else min(batch, MAX_PARTS)
    return (parts for parts in range(2, limit + 1) if batch is None or batch % parts == 0)


@dataclass(frozen=True)
class ChosenRuns:
    """`lowest_bytes`: the peak with `runs`; the lowest peak that was seen if nothing fits."""

    runs: tuple[Run, ...]
    fits: bool
    lowest_bytes: int
    bound_s: float = 0.0


def candidates(profile: MemoryProfile) -> list[Run]:
    """Regions that may be computed twice, alone and with neighbours; about `MAX_RUNS` at most."""
    regions = profile.regions
    usable = [recomputation_error(region) is None for region in regions]
    longest = max(1, MAX_RUNS // max(1, sum(usable)))
    runs = []
    for first in range(len(regions)):
        for last in range(first, min(first + longest, len(regions))):
            joins = last == first or neighbours(regions[last - 1], regions[last])
            if not (usable[last] and joins):
                break
            runs.append(Run(first, last))
    return runs


def choose_runs(
    profile: MemoryProfile, workload: Workload, budget_bytes: int, estimate: Estimate
) -> ChosenRuns:
    """The runs with the least seconds that keep the peak within the budget."""
    before = estimate(profile, workload)
    runs = [
        run
        for run in candidates(profile)
        if any(run.drops(lifetime) for lifetime in profile.lifetimes)
    ]
    if not runs:
        return ChosenRuns((), before.peak_bytes <= budget_bytes, before.peak_bytes)
    program = _Program(profile, workload, runs, before, estimate)
    lowest_bytes, solved_bytes = before.peak_bytes, float(budget_bytes)
    bound_s: float | None = None
    for _ in range(MAX_SOLVES):
        solution = program.solve(solved_bytes)
        if solution is None:
            break
        chosen, solved_s = solution
        bound_s = solved_s if bound_s is None else bound_s  # only the first solve is for the budget
        peak_bytes = program.peak_bytes(chosen)
        lowest_bytes = min(lowest_bytes, peak_bytes)
        if peak_bytes <= budget_bytes:
            return ChosenRuns(tuple(chosen), True, peak_bytes, bound_s)
        solved_bytes -= peak_bytes - budget_bytes
    return ChosenRuns((), False, min(lowest_bytes, program.lowest_bytes()))


class _Program:
    """The integer program of the module's docstring for one profile."""

    def __init__(
        self,
        profile: MemoryProfile,
        workload: Workload,
        runs: Sequence[Run],
        before: MemoryEstimate,
        estimate: Estimate,
    ) -> None:
        self._profile = profile
        self._workload = workload
        self._runs = runs
        self._estimate = estimate
        passes_of = [run.passes(profile.regions) for run in runs]
        start_s = np.concatenate([[0.0], profile.end_s])
        self._cost_s = np.array(
            [
                sum(profile.end_s[used.last] - start_s[used.first] for used in passes)
                for passes in passes_of
            ]
        )
        self._saved = np.array([saved_bytes(profile, run) for run in runs])
        self._raised = raised_bytes(runs, self._saved)
        self._live = before.live_bytes
        self._at = np.array([passes[-1].backward for passes in passes_of])
        self._again = np.array([self._most_again(run) for run in runs])

    def solve(self, budget: float) -> tuple[list[Run], float] | None:
        """(chosen runs, lower bound of their seconds); None if no choice fits."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        count = len(self._runs)
        tight = np.flatnonzero(self._live + self._raised > budget)
        saved_tight = self._saved[:, tight].T.astype(np.float64)
        saved_again = self._saved[:, self._at].T.astype(np.float64)  # (repeated run, saving run)
        np.fill_diagonal(saved_again, 0.0)
        most_raised = self._raised[self._at].astype(np.float64)
        slack = np.maximum(self._again + most_raised - budget, 0.0)
        holds = np.array(
            [
                [run.first <= number <= run.last for run in self._runs]
                for number in range(len(self._profile.regions))
            ],
            dtype=float,
        )
        rows = np.vstack([-saved_tight, np.diag(slack) - saved_again, holds])
        upper = np.concatenate([budget - self._live[tight], most_raised, np.ones(len(holds))])
        # Bytes are in units of the budget: next to the ones of `holds` they would be huge.
        scale = np.ones(len(rows))
        scale[: len(tight) + count] = max(budget, 1.0)
        solution = milp(
            np.maximum(self._cost_s, 1e-12),
            constraints=LinearConstraint(rows / scale[:, None], -np.inf, upper / scale),
            bounds=Bounds(0, 1),
            integrality=np.ones(count, dtype=np.int64),
            options={"time_limit": SOLVER_S},
        )
        if solution.x is None:
            return None
        chosen = [run for run, x in zip(self._runs, solution.x, strict=True) if x > 0.5]
        return chosen, float(solution.mip_dual_bound or 0.0)

    def peak_bytes(self, runs: Sequence[Run]) -> int:
        return self._recomputed(runs)[1].peak_bytes

    def lowest_bytes(self) -> int:
        """The lowest peak of the simple choices: all single regions together, or one run."""
        single = [run for run in self._runs if run.first == run.last]
        return min(self.peak_bytes(runs) for runs in [single, *([r] for r in self._runs)] if runs)

    def _recomputed(self, runs: Sequence[Run]) -> tuple[MemoryProfile, MemoryEstimate]:
        profile = recomputed(self._profile, runs)
        workload = recomputed_workload(self._workload, self._profile, runs)
        return profile, self._estimate(profile, workload)

    def _most_again(self, run: Run) -> int:
        """Most bytes while this run alone is repeated."""
        after, estimate = self._recomputed([run])
        most = 0
        new_passes = after.regions[run.last].passes
        for used, new in zip(run.passes(self._profile.regions), new_passes, strict=True):
            length = used.last - used.first + 1
            repeated = estimate.live_bytes[new.backward - length : new.backward]
            most = max(most, int(repeated.max()))
        return most
