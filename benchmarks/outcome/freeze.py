"""The sides of the closing comparison: tuned rivals, our searches at their marks, and bests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.jobs.campaign.session import TrialSession
from autotune.records import CURRENT_SETUP
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Strategy
from benchmarks.outcome.ddp_options import SweptOptions
from benchmarks.outcome.kept import Course, Frozen, Group, OutcomeSettings, Side, Stop
from benchmarks.outcome.rivals import DDP, DDP_DEFAULT
from benchmarks.outcome.searches import OURS, OURS_LOSSY, WITHIN, Incumbent, Searched, is_seed

MOST_INCUMBENTS = 3
"""So many of a search's bests that no other side shares are measured again."""


@dataclass(frozen=True)
class Tuned:
    """A rival's best setting. `times_s`: setting -> median step over its trials."""

    setting: str
    strategy: Strategy
    times_s: dict[str, float]


def plan_id(session: TrialSession, strategy: Strategy) -> str:
    domain = session.writer.domain
    return plan(strategy, domain.workload, domain.cluster.world_size).id


def freeze(
    session: TrialSession,
    settings: OutcomeSettings,
    tuned: Mapping[str, Tuned],
    searches: Mapping[str, Searched],
    swept: SweptOptions | None,
) -> Frozen:
    """Return the sides of the closing comparison."""

    def side(name: str, group: Group, strategy: Strategy) -> Side:
        return Side(name, group, plan_id(session, strategy), strategy)

    sides = [Side(DDP_DEFAULT, Group.TODAY, CURRENT_SETUP, None)]
    for rival, best in tuned.items():
        group = Group.TODAY if rival == DDP else Group.RIVAL
        sides.append(side(f"{rival}, {best.setting}", group, best.strategy))
    for job, search in searches.items():
        sides += [
            side(side_name(job, mark, search), group_of(job, mark, settings), strategy)
            for mark, strategy in search.at.items()
        ]
    courses = {}
    for job in (job for job in (OURS, OURS_LOSSY) if job in searches):
        search = searches[job]
        bests = [
            (best, side(f"{job}, best from trial {best.trials}", Group.STOP, best.strategy))
            for best in search.incumbents
        ]
        again = measured_again(bests, {there.plan for there in sides})
        sides += [stop for _, stop in again]
        courses[job] = _course(job, search, settings, again)
    return Frozen(
        settings,
        tuple(sides),
        courses,
        {rival: best.times_s for rival, best in tuned.items()},
        swept.times_s if swept else {},
        swept.chosen if swept else "",
    )


def _course(
    job: str, search: Searched, settings: OutcomeSettings, again: Sequence[tuple[Incumbent, Side]]
) -> Course:
    return Course(
        # if every trial failed, the tuner keeps the current setup
        {
            str(mark): side_name(job, mark, search) if mark in search.at else DDP_DEFAULT
            for mark in settings.marks
        },
        {str(mark): search.trials_at[mark] for mark in settings.marks},
        {str(mark): search.seconds_at[mark] for mark in settings.marks},
        tuple(Stop(best.trials, best.seconds, stop.name) for best, stop in again),
    )


def group_of(job: str, mark: int, settings: OutcomeSettings) -> Group:
    """Return the group of a search's side."""
    if is_seed(job):
        return Group.SEED
    if job == WITHIN:
        return Group.PART
    if job in (OURS, OURS_LOSSY):
        return Group.OURS if mark in settings.marks else Group.KNOWN
    return Group.RIVAL


def side_name(job: str, mark: int, search: Searched) -> str:
    """Return the name of a search's side; ours by the mark, as its budget is not always used."""
    return f"{job}, {mark if job in (OURS, OURS_LOSSY) else search.trials_at[mark]} trials"


def measured_again(
    bests: Sequence[tuple[Incumbent, Side]], planned: set[str]
) -> list[tuple[Incumbent, Side]]:
    """Keep the bests whose plan is `planned` anyway, and the first `MOST_INCUMBENTS` others."""
    chosen, once, left = [], set(), MOST_INCUMBENTS
    for best, side in bests:
        new = side.plan not in planned
        if side.plan not in once and (not new or left > 0):
            chosen.append((best, side))
            once.add(side.plan)
            left -= new
    return chosen
