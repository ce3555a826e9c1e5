"""Measures one domain: profile, sweep of bucket sizes, searches, and the closing comparison, all in one running script.

The closing comparison measures every side once a round, in an order drawn for each round; rounds are what is paired. So no side has a
minute of its own, and nothing that was chosen by its time is judged by the trials it was chosen by.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from autotune.commands.emulation import scheduled
from autotune.commands.places import Ranks, Where, placed_world
from autotune.commands.probe import measured_cluster
from autotune.errors import LaunchError
from autotune.job import Search
from autotune.records import CURRENT_SETUP, Accelerators, Conditions, Network, Role, TrialRequest
from autotune.rng import generator
from autotune.store import Store
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload
from benchmarks.outcome.domains import Domain
from benchmarks.outcome.figures import best_of_sweep, whole_rounds
from benchmarks.outcome.kept import Course, Described, Folder, Frozen, Group, Settings, Side, Stop, plan_key
from benchmarks.outcome.rivals import DDP_BEST, DDP_DEFAULT, bucket_sweep, rivals
from benchmarks.outcome.searches import BAYES, OURS, OURS_LOSSY, RANDOM, Searched, SharedWorld, job_spec, searched
from runtime_rewriter.command import read_command
from runtime_rewriter.world import World

STEP_TIMEOUT_S, START_TIMEOUT_S = 60.0, 180.0
LINKS_S = 20.0
"""What the probe of the hosts' own links, for the bound, may take."""
PROBES = 3
WARMUP_STEPS, TIMED_STEPS = 2, 6
SWEEP, CLOSING = "sweep", "closing"

Say = Callable[[str], None]


def measure(domain: Domain, folder: Folder, settings: Settings, say: Say) -> None:
    """Until the domain has all its rounds; goes on where an earlier run with these settings ended. Needs root."""
    frozen = folder.frozen()
    if frozen is not None and frozen.settings == settings and not missing_rounds(folder, frozen):
        say(f"{domain.name}: complete")
        return
    given = domain.cluster()
    conditions = scheduled(Conditions(Network.EMULATED, Accelerators.EMULATED), given.world_size)
    limits = STEP_TIMEOUT_S, START_TIMEOUT_S
    ranks = Ranks(read_command(list(domain.command)), given.world_size, folder.path / "logs", *limits, domain.given_profile())
    with placed_world(Where(None, False, (0, 0)), given, conditions, ranks, say) as world:
        described = folder.described()
        if described is None:
            described = _describe(world, domain, conditions, say)
            folder.describe(described)
        world.model_id()  # the ranks are up
        world.emulate(described.profile.workload)
        run(Session(domain.command, SharedWorld(world, described, folder), described, folder, settings, say))


def _describe(world: World, domain: Domain, conditions: Conditions, say: Say) -> Described:
    given = domain.cluster()
    world.model_id()
    began_s = time.monotonic()
    profile = world.profile()
    profile_s = time.monotonic() - began_s
    say(f"{domain.name}: one replica alone takes {profile.workload.compute_s * 1e3:.0f} ms; probing the links")
    for attempt in range(PROBES):  # on a crowded machine a rank may fail to connect; the script is then started again
        try:
            found = world.probe(LINKS_S, lambda _: None, computing=False)
            break
        except LaunchError as error:
            if attempt + 1 == PROBES:
                raise
            say(f"{domain.name}: the probe failed, once more: {error}")
    links, _ = measured_cluster(given, found, datetime.now(UTC), conditions.label)
    return Described(profile, given, links, conditions, profile_s, os.cpu_count() or 1, platform.machine())


@dataclass(frozen=True)
class Session:
    """One domain's script that runs, and what is wanted of it."""

    command: tuple[str, ...]
    world: SharedWorld
    described: Described
    folder: Folder
    settings: Settings
    say: Say

    @property
    def workload(self) -> Workload:
        return self.described.profile.workload

    def plan(self, strategy: Strategy) -> Plan:
        return plan(strategy, self.workload, self.described.given.world_size)

    def round(self, phase: str, number: int, plans: Sequence[Plan | None]) -> None:
        """Each plan once, in an order of the round's own. None is the script's own DDP."""
        self.world.phase, self.world.round = phase, number
        for index in generator(self.settings.seed, phase, number).permutation(np.arange(len(plans))).tolist():
            request = TrialRequest(0, plan_key(plans[index]), Role.AB, WARMUP_STEPS, TIMED_STEPS)
            self.world.run_trial(request, plans[index])


def run(session: Session) -> None:
    """Everything after the profile."""
    frozen = session.folder.frozen()
    if frozen is None or frozen.settings != session.settings:
        swept = sweep(session)
        frozen = freeze(session, swept, search_all(session))
        session.folder.freeze(frozen)
    close(session, frozen)


@dataclass(frozen=True)
class Swept:
    times_s: dict[str, float]
    best: Strategy


def sweep(session: Session) -> Swept:
    """Every bucket size `sweeps` times, in orders drawn anew; the best by the median of its trials."""
    sizes = bucket_sweep(session.workload, session.described.given.world_size)
    plans = {name: session.plan(strategy) for name, strategy in sizes.items()}
    for number in range(session.settings.sweeps):
        done = {line.plan for line in session.folder.lines(SWEEP) if line.round == number}
        session.round(SWEEP, number, [made for made in plans.values() if made.id not in done])
    times_s = best_of_sweep(session.folder.lines(SWEEP), {name: made.id for name, made in plans.items()})
    best = min(times_s, key=times_s.__getitem__)
    session.say(f"sweep: {', '.join(f'{name} {value * 1e3:.1f} ms' for name, value in times_s.items())}; best: {best}")
    return Swept(times_s, sizes[best])


def search_all(session: Session) -> dict[str, Searched]:
    """Ours at every mark, the other searches with the trials of the last one."""
    marks = session.settings.marks
    last = marks[-1:]
    wanted = [(OURS, Search.AUTOSYNC, False, marks), (RANDOM, Search.RANDOM, False, last), (BAYES, Search.BAYES, False, last)]
    if session.settings.lossy:
        wanted.insert(1, (OURS_LOSSY, Search.AUTOSYNC, True, marks))
    found = {}
    with Store.open(session.folder.store) as store:
        for job, search, lossy, at in wanted:
            spec = job_spec(session.command, session.described, search, lossy, session.settings)
            found[job] = searched(job, spec, store, session.world, at, session.say)
    return found


def freeze(session: Session, swept: Swept, found: Mapping[str, Searched]) -> Frozen:
    """The sides of the closing comparison."""
    marks = session.settings.marks

    def side(name: str, group: Group, strategy: Strategy) -> Side:
        return Side(name, group, session.plan(strategy).id, strategy)

    sides = [Side(DDP_DEFAULT, Group.TODAY, CURRENT_SETUP, None), side(DDP_BEST, Group.TODAY, swept.best)]
    across_steps = not session.described.profile.cross_step_refused
    sides += [side(name, Group.RIVAL, made) for name, made in rivals(session.workload, session.described.given, across_steps).items()]
    courses = {}
    for job, own in found.items():
        if job in (RANDOM, BAYES):
            sides += [side(f"{job}, {own.trials_at[mark]} trials", Group.RIVAL, strategy) for mark, strategy in own.at.items()]
            continue
        at_marks = {mark: side(f"{job}, {mark} trials", Group.OURS, strategy) for mark, strategy in own.at.items()}
        bests = [(best, side(f"{job}, best from trial {best.trials}", Group.STOP, best.strategy)) for best in own.incumbents]
        sides += [*at_marks.values(), *(made_side for _, made_side in bests)]
        courses[job] = Course(
            # where every trial failed, the tuner keeps the current setup
            {str(mark): at_marks[mark].name if mark in at_marks else DDP_DEFAULT for mark in marks},
            {str(mark): trials for mark, trials in own.trials_at.items()},
            {str(mark): seconds for mark, seconds in own.seconds_at.items()},
            tuple(Stop(best.trials, best.seconds, made_side.name) for best, made_side in bests),
        )
    return Frozen(session.settings, tuple(sides), courses, swept.times_s)


def close(session: Session, frozen: Frozen) -> None:
    """Rounds of all sides, equal plans once, until there are enough whole ones. A side that fails is left out from then on.

    A round that was cut is made again from its beginning: its first half would be of another minute than its second.
    """
    while missing := missing_rounds(session.folder, frozen):
        lines = session.folder.lines(CLOSING)
        failed = {line.plan for line in lines if line.failure}
        if CURRENT_SETUP in failed:
            where = session.folder.path / "trials.jsonl"
            raise LaunchError(f"the script failed with its current setup, so there is nothing to compare with; see {where}")
        sides = {side.plan: side.strategy for side in frozen.sides if side.plan not in failed}
        session.say(f"closing comparison: {missing} rounds of {len(sides)} plans to go")
        number = 1 + max((line.round for line in lines), default=-1)
        session.round(CLOSING, number, [None if strategy is None else session.plan(strategy) for strategy in sides.values()])


def missing_rounds(folder: Folder, frozen: Frozen) -> int:
    """Of the closing comparison."""
    return max(0, frozen.settings.rounds - len(whole_rounds(folder.lines(CLOSING), frozen.sides)))
