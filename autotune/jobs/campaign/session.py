"""Trials of any strategies on an emulated cluster, written into a dataset's domain as they end (`autotune.dataset`).

Hosts are network namespaces of this machine and transfers are real. Computation is timed waits of what one replica alone takes
(emulated accelerators), or real. Used by `datasets/collect.py`, `benchmarks.replay_accuracy` and `benchmarks.outcome`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.dataset.folder import Description
from autotune.dataset.trials import REFERENCE, DatasetTrial, Environment
from autotune.dataset.writing import WORK, DomainWriter, opened
from autotune.errors import LaunchError
from autotune.jobs.places import Ranks, Where, placed_world
from autotune.jobs.probe import measured_cluster
from autotune.jobs.settings import scheduled
from autotune.lowering.costs import EMULATED_COSTS, RuntimeCosts
from autotune.records import CURRENT_SETUP, Accelerators, Conditions, Network, Role, TrialRequest
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload
from autotune.jobs.campaign.quiet import STAT, stolen_share, wait_until_quiet
from benchmarks.runtime_costs import measured_costs
from benchmarks.repository import ROOT
from runtime_rewriter.world.command import read_command
from runtime_rewriter.world.results import Probe, Profile
from runtime_rewriter.world.world import World

PROBE_S, QUICK_PROBE_S = 60.0, 15.0
PROBES = 3
FOLD_EVERY = 50
"""Trials after which the table is written anew; until then they are lines of the journal."""
STEP_TIMEOUT_S, START_TIMEOUT_S = 60.0, 180.0

Say = Callable[[str], None]
Kept = Callable[[DatasetTrial], None]
"""Hears of every trial when it is on disk."""


@dataclass(frozen=True)
class Setup:
    """One model on one cluster. `script`: words behind "python". `profile`: what emulated accelerators wait for; None: what is measured."""

    model: str
    cluster_file: Path
    script: tuple[str, ...]
    accelerators: Accelerators = Accelerators.EMULATED
    profile: Callable[[], Workload] | None = None

    @property
    def name(self) -> str:
        return f"{self.model}.{self.cluster_file.stem}{'' if self.accelerators is Accelerators.EMULATED else '.real'}"


@dataclass(frozen=True)
class Lengths:
    """Of a trial, as in `TrialRequest`."""

    warmup_steps: int
    timed_steps: int
    most_steps: int = 0
    precision: float = 0.0


class TrialSession:
    """Runs trials in a world and keeps each. `prepared_s`: what profiling took, and probing where the session began the domain."""

    def __init__(
        self,
        world: World,
        writer: DomainWriter,
        setup: Setup,
        lengths: Lengths,
        profile: Profile,
        kept: Kept,
        prepared_s: float = 0.0,
    ) -> None:
        self.world, self.writer, self.setup, self.lengths, self.profile = (
            world,
            writer,
            setup,
            lengths,
            profile,
        )
        self.prepared_s = prepared_s
        self._kept = kept
        self._begun = False
        self.session = writer.domain.sessions[-1]

    def candidate(
        self, source: str, strategy: Strategy, timed_steps: int | None = None
    ) -> DatasetTrial:
        """One trial of a strategy; of `timed_steps` instead of the session's."""
        domain = self.writer.described
        assert domain is not None
        wanted = plan(strategy, domain.workload, domain.cluster.world_size)
        request = self._request(strategy.id, Role.CANDIDATE)
        return self.take(
            source,
            replace(request, timed_steps=timed_steps or request.timed_steps),
            strategy,
            wanted,
        )

    def reference(self, source: str = REFERENCE) -> DatasetTrial:
        """One trial of the script's own DDP."""
        return self.take(source, self._request(CURRENT_SETUP, Role.REFERENCE), None, None)

    def take(
        self, source: str, request: TrialRequest, strategy: Strategy | None, wanted: Plan | None
    ) -> DatasetTrial:
        """One trial as it is requested, kept. A session begins with a reference, whatever it is asked for."""
        if strategy is not None and not self._begun:
            self.reference()
        self._begun = True
        load, before = os.getloadavg()[0], STAT.read_text()
        outcome = self.world.run_trial(request, wanted)
        stolen = stolen_share(before, STAT.read_text())
        trial = DatasetTrial(
            len(self.writer.trials),
            source,
            strategy,
            wanted,
            outcome,
            load,
            time.time(),
            self.session.id,
            stolen=stolen,
        )
        self.writer.append(trial)
        self._kept(trial)
        if self.writer.unfolded >= FOLD_EVERY:
            self.writer.fold()
        return trial

    def _request(self, strategy_id: str, role: Role) -> TrialRequest:
        own = self.lengths
        return TrialRequest(
            0,
            strategy_id,
            role,
            own.warmup_steps,
            own.timed_steps,
            most_steps=own.most_steps,
            precision=own.precision,
        )


def told(trial: DatasetTrial) -> str:
    """For people."""
    outcome = (
        f"failed, {trial.failure[:100]}" if trial.failure else f"{trial.median_s * 1e3:.1f} ms"
    )
    return f"trial {trial.number} {trial.source}: {outcome}"


@contextlib.contextmanager
def trial_session(
    folder: Path, setup: Setup, lengths: Lengths, say: Say, kept: Kept, quick: bool = False
) -> Iterator[TrialSession]:
    """The script's ranks on a testbed, and the writer of their domain's `folder`; a new domain is profiled and probed first.

    `quick`: links are probed for a quarter of a minute, and the runtime's costs are taken to be the usual ones.

    Raises `LaunchError` where the script does not start and `InvalidInput` where the folder cannot be written or holds trials that were
    taken under other conditions.
    """
    given = read_cluster(setup.cluster_file)
    conditions = scheduled(Conditions(Network.EMULATED, setup.accelerators), given.world_size)
    with opened(folder) as writer:
        costs = (
            writer.described.costs
            if writer.described
            else _costs(setup.accelerators, given.world_size, quick)
        )
        command = read_command(["python", str(ROOT / setup.script[0]), *setup.script[1:]])
        logs = folder / WORK / "logs"
        ranks = Ranks(
            command,
            given.world_size,
            logs,
            STEP_TIMEOUT_S,
            START_TIMEOUT_S,
            _given_profile(setup, writer),
            probe_s=0.0,
        )
        with placed_world(Where(None, False, (0, 0)), given, conditions, ranks, say) as world:
            world.model_id()  # the ranks are up
            if writer.described is None:
                wait_until_quiet(say)
            began_s = time.monotonic()
            profile = world.profile()
            if writer.described is None:
                probe_s = QUICK_PROBE_S if quick else PROBE_S
                writer.describe(
                    _described(world, setup, given, conditions, profile, costs, probe_s, say)
                )
            prepared_s = time.monotonic() - began_s
            told = replace(conditions, round_robin=conditions.round_robin and world.round_robin())
            cores, machine = os.cpu_count() or 1, platform.machine()
            writer.begin_session(
                Environment(told, profile.software, cores, machine, platform.release(), _source())
            )
            yield TrialSession(world, writer, setup, lengths, profile, kept, prepared_s)


def _given_profile(setup: Setup, writer: DomainWriter) -> Workload | None:
    """Emulated accelerators wait for the same times in every session of a domain."""
    if setup.accelerators is Accelerators.REAL:
        return None
    if writer.described is not None:
        return writer.described.workload
    return setup.profile() if setup.profile is not None else None


def _described(
    world: World,
    setup: Setup,
    given: Cluster,
    conditions: Conditions,
    profile: Profile,
    costs: dict[str, float],
    probe_s: float,
    say: Say,
) -> Description:
    say(f"probing the links for {probe_s:.0f} s")
    computing = setup.accelerators is Accelerators.REAL
    workload = replace(
        profile.workload, threads=profile.workload.threads if computing else 0, model=setup.model
    )  # waits take no core
    cluster, _ = measured_cluster(
        given, _probed(world, say, computing, probe_s), datetime.now(UTC), conditions.label
    )
    return Description(
        setup.name,
        setup.model,
        setup.cluster_file.stem,
        workload,
        cluster,
        costs,
        os.cpu_count() or 1,
        (),
    )


def _probed(world: World, say: Say, computing: bool, probe_s: float) -> Probe:
    """On a crowded machine a rank may fail to connect; the script is then started again."""
    for _ in range(PROBES - 1):
        try:
            return world.probe(probe_s, lambda _: None, computing=computing)
        except LaunchError as error:
            say(f"the probe failed, once more: {error}")
    return world.probe(probe_s, lambda _: None, computing=computing)


def _costs(accelerators: Accelerators, ranks: int, quick: bool) -> dict[str, float]:
    emulated = accelerators is Accelerators.EMULATED
    if quick:
        usual = EMULATED_COSTS if emulated else RuntimeCosts()
        return {name: usual[name] for name in usual.sources}
    return _measured_once(ranks, emulated)


@cache
def _measured_once(ranks: int, emulated: bool) -> dict[str, float]:
    """Of this machine, so once in a process."""
    return measured_costs(ranks, emulated=emulated)


def _source() -> str:
    """The commit of this checkout, "" where it is none."""
    words = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
