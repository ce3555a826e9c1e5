"""Evaluate a domain's folder as a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from autotune.dataset.folder import read_domain
from autotune.dataset.trials import DatasetTrial, Environment
from autotune.features.extract import Extractor
from autotune.jobs.campaign.domain_features import domain_extractor
from autotune.optimizer.bounds import least_step_s, least_synchronization_s
from autotune.tuning.statistics import fewest_values
from autotune.workload import Workload
from benchmarks.outcome.figures import (
    Ratio,
    Round,
    failures_of,
    first_within,
    median_s,
    ratio_to_best,
    ratio_to_bound,
    whole_rounds,
)
from benchmarks.outcome.kept import (
    CLOSING,
    Course,
    Frozen,
    Group,
    Side,
    Stop,
    key_of,
    read_frozen,
    rounds_of,
)
from benchmarks.outcome.rivals import DDP_DEFAULT, ONE_SHOT
from benchmarks.outcome.searches import OURS, OURS_LOSSY
from benchmarks.stated_clusters import as_shaped
from runtime_rewriter.emulation import timetable_of

UNSHOWN = "no test shows that training with its compressors' settings converges"


@dataclass(frozen=True)
class Compared:
    """A side in the closing comparison: quartiles of its blocks' medians, and its ratio to ours.

    Ours is lossless, at the last mark. `replayed_s`: its replayed step, None for the script's DDP.
    """

    side: Side
    low_s: float
    middle_s: float
    high_s: float
    ratio: Ratio
    replayed_s: float | None


@dataclass(frozen=True)
class AtMark:
    """Ours after `trials` trials (`asked` were allowed) in `seconds`."""

    asked: int
    trials: int
    seconds: float
    side: str
    step_s: float
    today: Ratio
    best: Ratio


@dataclass(frozen=True)
class Outcome:
    """One search of ours: every mark, and its first best within 2 % of the best known, or None."""

    marks: tuple[AtMark, ...]
    best_known: str
    best_known_s: float
    near: Stop | None

    @property
    def last(self) -> AtMark:
        return self.marks[-1]


@dataclass(frozen=True)
class Ablation:
    """time(DDP) / time(a part of the method); None where the script forbids it.

    `within`: our search within the step. `without_search`: our builder's order across the step.
    """

    within: Ratio | None
    without_search: Ratio | None
    whole: Ratio


@dataclass(frozen=True)
class DomainFigures:
    """A domain's figures. `gap`: time(ours) / bound, lossless.

    `ratio`: of computation to communication; None: as the model has it. `reachable_gap`: the same
    to `reachable_s`, below which no lossless strategy is. `seeds`: time(DDP) / time(ours) of every
    seed of our search. `failed`: sides that are left out, and the reasons. `stolen`: the median
    over the closing trials; None if it was not noted. `commits`: of all sessions.
    """

    domain: str
    model: str
    ratio: float | None
    compared: tuple[Compared, ...]
    lossless: Outcome
    lossy: Outcome | None
    compute_s: float
    transfer_s: float
    gap: Ratio
    reachable_s: float
    reachable_gap: Ratio
    overrun: float
    load: float
    stolen: float | None
    environment: Environment
    ablation: Ablation
    seeds: tuple[Ratio, ...]
    frozen: Frozen
    commits: tuple[str, ...]
    failed: Mapping[str, str]

    @property
    def bound_s(self) -> float:
        return max(self.compute_s, self.transfer_s)


def row_of(folder: Path) -> DomainFigures | None:
    """Evaluate a domain's folder; None if it has too few whole rounds for an interval."""
    frozen = read_frozen(folder)
    if frozen is None:
        return None
    domain = read_domain(folder)
    closing = rounds_of(domain.trials, CLOSING)
    rounds = whole_rounds(closing, frozen.sides)
    if len(rounds) < fewest_values(0.95) or OURS not in frozen.courses:
        return None
    failures = failures_of(closing)
    left_out = {
        side.name: failures.get(side.plan, UNSHOWN)
        for side in frozen.sides
        if side.plan in failures or not side.convergence_shown
    }
    trials = [trial for of_side in closing.values() for trial in of_side]
    there = [side for side in frozen.sides if side.name not in left_out]
    lossless = _outcome(frozen.courses[OURS], [side for side in there if side.lossless], rounds)
    lossy = (
        _outcome(frozen.courses[OURS_LOSSY], there, rounds)
        if OURS_LOSSY in frozen.courses
        else None
    )
    compute_s = domain.workload.compute_s
    cluster = as_shaped(domain)
    transfer_s = least_synchronization_s(domain.workload, cluster)
    reachable_s = least_step_s(_as_played(domain.workload), cluster)
    ours, extractor = _plan_of(lossless.last.side, there), domain_extractor(domain)
    return DomainFigures(
        domain.name,
        domain.model,
        frozen.settings.ratio,
        tuple(
            _compared(side, rounds, ours, _replayed_s(side, trials, extractor)) for side in there
        ),
        lossless,
        lossy,
        compute_s,
        transfer_s,
        ratio_to_bound(rounds, ours, max(compute_s, transfer_s)),
        reachable_s,
        ratio_to_bound(rounds, ours, reachable_s),
        median(trial.overrun or 0.0 for trial in trials),
        median(trial.load for trial in trials),
        median(stolen)
        if (stolen := [trial.stolen for trial in trials if trial.stolen is not None])
        else None,
        domain.environment,
        _ablation(lossless, there, rounds),
        _of_group(Group.SEED, there, rounds),
        frozen,
        tuple(sorted({session.environment.source for session in domain.sessions})),
        {name: reason[:300] for name, reason in left_out.items()},
    )


def _of_group(
    group: Group, there: Sequence[Side], rounds: Sequence[Round], begins: str = ""
) -> tuple[Ratio, ...]:
    """Return time(DDP) / time(side) of the group's sides whose name begins so."""
    today = [side for side in there if side.group is Group.TODAY]
    return tuple(
        ratio_to_best(rounds, today, side.plan)
        for side in there
        if side.group is group and side.name.startswith(begins)
    )


def _ablation(lossless: Outcome, there: Sequence[Side], rounds: Sequence[Round]) -> Ablation:
    def first(ratios: Sequence[Ratio]) -> Ratio | None:
        return next(iter(ratios), None)

    return Ablation(
        first(_of_group(Group.PART, there, rounds)),
        first(_of_group(Group.RIVAL, there, rounds, ONE_SHOT)),
        lossless.last.today,
    )


def _as_played(workload: Workload) -> Workload:
    """Return the workload with the times at which an emulated accelerator acts."""
    timetable = timetable_of(workload)
    ready_s, needed_s = dict(timetable.ready), dict(timetable.needed)
    played = (
        replace(variable, ready_s=ready_s[variable.name], needed_s=needed_s[variable.name])
        for variable in workload.variables
    )
    return replace(workload, variables=tuple(played))


def _plan_of(name: str, sides: Sequence[Side]) -> str:
    return next(side.plan for side in sides if side.name == name)


def _outcome(course: Course, there: Sequence[Side], rounds: Sequence[Round]) -> Outcome:
    """Evaluate a search. `there`: the sides that count for the best known."""
    today = [side for side in there if side.group is Group.TODAY]
    rivals = [side for side in there if side.group in (Group.TODAY, Group.RIVAL)]
    marks = []
    for mark, name in sorted(
        course.sides.items(), key=lambda side: int(side[0])
    ):  # JSON sorts them as text
        if name not in {side.name for side in there}:  # it failed: the current setup stays
            name = DDP_DEFAULT
        ours = _plan_of(name, there)
        compared = ratio_to_best(rounds, today, ours), ratio_to_best(rounds, rivals, ours)
        marks.append(
            AtMark(
                int(mark),
                course.trials[mark],
                course.seconds[mark],
                name,
                median_s(rounds, ours),
                *compared,
            )
        )
    times_s = {side.name: median_s(rounds, side.plan) for side in there}
    best = min(times_s, key=times_s.__getitem__)
    stops = [*course.stops, *(Stop(at.trials, at.seconds, at.side) for at in marks)]
    return Outcome(tuple(marks), best, times_s[best], first_within(stops, times_s, times_s[best]))


def _replayed_s(side: Side, closing: Sequence[DatasetTrial], extractor: Extractor) -> float | None:
    """Replay the plan that the side's trials enacted; None for the script's own DDP."""
    enacted = next((trial.plan for trial in closing if key_of(trial) == side.plan), None)
    return None if enacted is None else extractor.steps.step_s(enacted)


def _compared(side: Side, rounds: Sequence[Round], ours: str, replayed_s: float | None) -> Compared:
    low, middle, high = np.quantile(
        [measured[side.plan].median_s for measured in rounds], [0.25, 0.5, 0.75]
    ).tolist()
    return Compared(side, low, middle, high, ratio_to_best(rounds, [side], ours), replayed_s)
