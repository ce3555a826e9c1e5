"""Measures one domain: profile, sweep of bucket sizes, searches, and the closing comparison, all in one running script.

The closing comparison measures every side once a round, in an order drawn for each round; rounds are what is paired. So no side has a
minute of its own, and nothing that was chosen by its time is judged by the trials it was chosen by.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
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
    if frozen is not None and frozen.settings == settings and not _missing_rounds(folder, frozen):
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
        run(domain.command, SharedWorld(world, described, folder), described, folder, settings, say)


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


def run(command: tuple[str, ...], world: SharedWorld, described: Described, folder: Folder, settings: Settings, say: Say) -> None:
    """Everything after the profile."""
    frozen = folder.frozen()
    if frozen is None or frozen.settings != settings:
        runner = _Runner(world, described, folder, settings, say)
        swept = runner.sweep()
        frozen = _frozen(swept, _search_all(command, world, described, folder, settings, say), described, settings)
        folder.freeze(frozen)
    close(world, described, folder, frozen, say)


@dataclass(frozen=True)
class _Swept:
    times_s: dict[str, float]
    best: Strategy


@dataclass(frozen=True)
class _Runner:
    world: SharedWorld
    described: Described
    folder: Folder
    settings: Settings
    say: Say

    def sweep(self) -> _Swept:
        """Every bucket size `sweeps` times, in orders drawn anew; the best by the median of its trials."""
        workload, workers = self.described.profile.workload, self.described.given.world_size
        sizes = bucket_sweep(workload, workers)
        plans = {name: plan(strategy, workload, workers) for name, strategy in sizes.items()}
        for round_ in range(self.settings.sweeps):
            done = {line.plan for line in self.folder.lines(SWEEP) if line.round == round_}
            _round(self.world, SWEEP, round_, {name: made for name, made in plans.items() if made.id not in done}, self.settings.seed)
        times_s = best_of_sweep(self.folder.lines(SWEEP), {name: made.id for name, made in plans.items()})
        best = min(times_s, key=times_s.__getitem__)
        self.say(f"sweep: {', '.join(f'{name} {value * 1e3:.1f} ms' for name, value in times_s.items())}; best: {best}")
        return _Swept(times_s, sizes[best])


def _search_all(
    command: tuple[str, ...], world: SharedWorld, described: Described, folder: Folder, settings: Settings, say: Say
) -> dict[str, Searched]:
    """Ours at every mark, the other searches with the trials of the last one."""
    last = settings.marks[-1:]
    wanted = [(OURS, Search.AUTOSYNC, False, settings.marks), (RANDOM, Search.RANDOM, False, last), (BAYES, Search.BAYES, False, last)]
    if settings.lossy:
        wanted.insert(1, (OURS_LOSSY, Search.AUTOSYNC, True, settings.marks))
    found = {}
    with Store.open(folder.store) as store:
        for job, search, lossy, marks in wanted:
            found[job] = searched(job, job_spec(command, described, search, lossy, settings), store, world, marks, say)
    return found


def _frozen(swept: _Swept, found: Mapping[str, Searched], described: Described, settings: Settings) -> Frozen:
    workload, workers = described.profile.workload, described.given.world_size

    def side(name: str, group: Group, strategy: Strategy) -> Side:
        return Side(name, group, plan(strategy, workload, workers).id, strategy)

    sides = [Side(DDP_DEFAULT, Group.TODAY, CURRENT_SETUP, None), side(DDP_BEST, Group.TODAY, swept.best)]
    made = rivals(workload, described.given, not described.profile.cross_step_refused)
    sides += [side(name, Group.RIVAL, strategy) for name, strategy in made.items()]
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
            {str(mark): at_marks[mark].name if mark in at_marks else DDP_DEFAULT for mark in settings.marks},
            {str(mark): trials for mark, trials in own.trials_at.items()},
            {str(mark): seconds for mark, seconds in own.seconds_at.items()},
            tuple(Stop(best.trials, best.seconds, made_side.name) for best, made_side in bests),
        )
    return Frozen(settings, tuple(sides), courses, swept.times_s)


def close(world: SharedWorld, described: Described, folder: Folder, frozen: Frozen, say: Say) -> None:
    """Rounds of all sides, equal plans once, until there are enough whole ones. A side that fails is left out from then on.

    A round that was cut is made again from its beginning: its first half would be of another minute than its second.
    """
    workload, workers = described.profile.workload, described.given.world_size
    while _missing_rounds(folder, frozen):
        lines = folder.lines(CLOSING)
        failed = {line.plan for line in lines if line.failure}
        if CURRENT_SETUP in failed:
            raise LaunchError(f"the script failed with its current setup in the closing comparison; see {folder.path}/trials.jsonl")
        plans = {
            side.plan: plan(side.strategy, workload, workers) if side.strategy is not None else None
            for side in frozen.sides
            if side.plan not in failed
        }
        number = 1 + max((line.round for line in lines), default=-1)
        say(f"closing comparison, round {number + 1}: {len(plans)} plans, {_missing_rounds(folder, frozen)} rounds to go")
        _round(world, CLOSING, number, plans, frozen.settings.seed)


def _missing_rounds(folder: Folder, frozen: Frozen) -> int:
    return max(0, frozen.settings.rounds - len(whole_rounds(folder.lines(CLOSING), frozen.sides)))


def _round(world: SharedWorld, phase: str, number: int, plans: Mapping[str, Plan | None], seed: int) -> None:
    """Each plan once, in an order of its own."""
    world.phase, world.round = phase, number
    wanted = list(plans.values())
    for index in generator(seed, phase, number).permutation(np.arange(len(wanted))).tolist():
        request = TrialRequest(0, plan_key(wanted[index]), Role.AB, WARMUP_STEPS, TIMED_STEPS)
        world.run_trial(request, wanted[index])
