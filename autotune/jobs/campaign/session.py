"""Run trials of any strategies on an emulated or real cluster and write them into a dataset.

On an emulated cluster the hosts are network namespaces of this machine, and transfers are real.
Computation is timed waits of what one replica alone takes (emulated accelerators), or real.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from autotune.cluster import Cluster
from autotune.dataset.folder import Description, read_description, read_sums
from autotune.dataset.trials import REFERENCE, DatasetTrial, Environment
from autotune.dataset.writing import WORK, DomainWriter, opened
from autotune.errors import LaunchError
from autotune.jobs.campaign.balance import balanced
from autotune.jobs.campaign.commit import CHECKOUT, checkout_commit
from autotune.jobs.campaign.quiet import STAT, stolen_share, wait_until_quiet
from autotune.jobs.campaign.setups import Setup
from autotune.jobs.places import Ranks, Where, placed_world
from autotune.jobs.probe import measured_cluster
from autotune.jobs.settings import scheduled
from autotune.lowering.costs import EMULATED_COSTS, RuntimeCosts
from autotune.records import (
    CURRENT_SETUP,
    Accelerators,
    Conditions,
    Failed,
    Measured,
    Network,
    Role,
    TrialRequest,
)
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload
from runtime_rewriter.world.command import read_command
from runtime_rewriter.world.results import Probe, Profile
from runtime_rewriter.world.world import World

PROBE_S = 60.0
QUICK_PROBE_S = 15.0
PROBE_TRIES = 3
TRIALS_PER_FOLD = 50
"""The table is rewritten after this many trials; until then they are lines of the journal."""
STEP_TIMEOUT_S = 60.0
START_TIMEOUT_S = 180.0

Log = Callable[[str], None]
OnTrial = Callable[[DatasetTrial], None]
"""Called with every trial once it is on disk."""


@dataclass(frozen=True)
class TrialLength:
    """How long a trial is, as in `TrialRequest`."""

    warmup_steps: int
    timed_steps: int
    most_steps: int = 0
    precision: float = 0.0


class TrialSession:
    """Runs trials in a world and keeps each one.

    `prepared_s`: seconds of the profile, and of the probe if this session started the domain.
    """

    def __init__(
        self,
        world: World,
        writer: DomainWriter,
        setup: Setup,
        length: TrialLength,
        profile: Profile,
        on_trial: OnTrial = lambda trial: None,
        prepared_s: float = 0.0,
    ) -> None:
        self.world = world
        self.writer = writer
        self.setup = setup
        self.length = length
        self.profile = profile
        self.prepared_s = prepared_s
        self.session = writer.domain.sessions[-1]
        self._on_trial = on_trial
        self._started = False

    def candidate(
        self, source: str, strategy: Strategy, timed_steps: int | None = None
    ) -> DatasetTrial:
        """Run one trial of a strategy, with the session's number of timed steps by default."""
        domain = self.writer.described
        assert domain is not None
        enacted = plan(strategy, domain.workload, domain.cluster.world_size)
        request = self._request(strategy.id, Role.CANDIDATE)
        request = replace(request, timed_steps=timed_steps or request.timed_steps)
        return self.run_trial(source, request, strategy, enacted)

    def reference(self, source: str = REFERENCE) -> DatasetTrial:
        """Run one trial of the script's own DDP."""
        return self.run_trial(source, self._request(CURRENT_SETUP, Role.REFERENCE), None, None)

    def run_trial(
        self, source: str, request: TrialRequest, strategy: Strategy | None, enacted: Plan | None
    ) -> DatasetTrial:
        """Run and keep one trial. A session starts with a reference, whatever is requested."""
        if strategy is not None and not self._started:
            self.reference()
        self._started = True
        load = os.getloadavg()[0]
        before = STAT.read_text()
        outcome = portable(self.world.run_trial(request, enacted))
        trial = DatasetTrial(
            len(self.writer.trials),
            source,
            strategy,
            enacted,
            outcome,
            load,
            time.time(),
            self.session.id,
            stolen=stolen_share(before, STAT.read_text()),
        )
        self.writer.append(trial)
        self._on_trial(trial)
        if self.writer.unfolded >= TRIALS_PER_FOLD:
            self.writer.fold()
        return trial

    def _request(self, strategy_id: str, role: Role) -> TrialRequest:
        length = self.length
        return TrialRequest(
            0,
            strategy_id,
            role,
            length.warmup_steps,
            length.timed_steps,
            most_steps=length.most_steps,
            precision=length.precision,
        )


def portable(outcome: Measured | Failed) -> Measured | Failed:
    """Name files in a failure's message by their places in the checkout, as others have it."""
    if isinstance(outcome, Measured):
        return outcome
    return replace(outcome, message=outcome.message.replace(f"{CHECKOUT}{os.sep}", ""))


def trial_line(trial: DatasetTrial) -> str:
    """Return a line for people: number, source, and time or failure."""
    failure = trial.failure
    outcome = f"failed, {failure[:100]}" if failure else f"{trial.median_s * 1e3:.1f} ms"
    return f"trial {trial.number} {trial.source}: {outcome}"


@contextlib.contextmanager
def trial_session(
    folder: Path,
    setup: Setup,
    length: TrialLength,
    log: Log,
    on_trial: OnTrial = lambda trial: None,
    quick: bool = False,
    like: Path | None = None,
) -> Iterator[TrialSession]:
    """Start the script's ranks and open their domain's `folder`; profile and probe a new domain.

    A new domain takes its description from the domain in `like`, if given. `quick` shortens the
    probe and assumes the runtime's usual costs. Raises `LaunchError` if the
    script does not start, and `InvalidInput` if the folder cannot be written or holds trials that
    were taken under other conditions.
    """
    cluster = setup.cluster()
    network = Network.EMULATED if setup.address is None else Network.HOSTS
    conditions = scheduled(Conditions(network, setup.accelerators), cluster.world_size)
    with opened(folder) as writer:
        if writer.described is None and like is not None:
            writer.describe(replace(read_description(like, read_sums(like)), sessions=()))
        described = writer.described
        costs = described.costs if described else _costs(setup, cluster.world_size, quick)
        ranks = Ranks(
            read_command(["python", *setup.script]),
            cluster.world_size,
            folder / WORK / "logs",
            STEP_TIMEOUT_S,
            START_TIMEOUT_S,
            _emulated_profile(setup, cluster, described),
            probe_s=0.0,
        )
        where = Where(setup.address, False, (0, 0))
        with placed_world(where, cluster, conditions, ranks, log) as world:
            world.model_id()  # the ranks are up
            if described is None:
                wait_until_quiet(log)
            started_s = time.monotonic()
            profile = world.profile()
            if described is None and setup.ratio is not None and setup.profile is None:
                profile = _at_ratio(world, profile, cluster, setup.ratio)
            if described is None:
                probe_s = QUICK_PROBE_S if quick else PROBE_S
                log(f"probing the links for {probe_s:.0f} s")
                probe = _probe(world, log, setup.accelerators is Accelerators.REAL, probe_s)
                writer.describe(_description(setup, cluster, conditions, profile, probe, costs))
            prepared_s = time.monotonic() - started_s
            round_robin = conditions.round_robin and world.round_robin()
            conditions = replace(conditions, round_robin=round_robin)
            environment = Environment(
                conditions,
                profile.software,
                os.cpu_count() or 1,
                platform.machine(),
                platform.release(),
                checkout_commit(),
            )
            writer.begin_session(environment)
            yield TrialSession(world, writer, setup, length, profile, on_trial, prepared_s)


def _emulated_profile(
    setup: Setup, cluster: Cluster, described: Description | None
) -> Workload | None:
    """Return what emulated accelerators wait for: the same in every session of a domain."""
    if setup.accelerators is Accelerators.REAL:
        return None
    if described is not None:
        return described.workload
    if setup.profile is None:
        return None
    assumed = setup.profile()
    return assumed if setup.ratio is None else balanced(assumed, cluster, setup.ratio)


def _at_ratio(world: World, profile: Profile, cluster: Cluster, ratio: float) -> Profile:
    """Let the accelerators wait for the measured times, scaled to the ratio."""
    workload = balanced(profile.workload, cluster, ratio)
    world.emulate(workload)
    return replace(profile, workload=workload)


def _description(
    setup: Setup,
    cluster: Cluster,
    conditions: Conditions,
    profile: Profile,
    probe: Probe,
    costs: dict[str, float],
) -> Description:
    threads = profile.workload.threads if setup.accelerators is Accelerators.REAL else 0
    measured, _ = measured_cluster(cluster, probe, datetime.now(UTC), conditions.label)
    return Description(
        setup.name,
        setup.model,
        setup.cluster_file.stem,
        replace(profile.workload, threads=threads, model=setup.model),  # waits take no core
        measured,
        costs,
        os.cpu_count() or 1,
        (),
    )


def _probe(world: World, log: Log, computing: bool, probe_s: float) -> Probe:
    """Probe the links. On a crowded machine a rank may fail to connect: then start again."""
    for _ in range(PROBE_TRIES - 1):
        try:
            return world.probe(probe_s, lambda _: None, computing=computing)
        except LaunchError as error:
            log(f"the probe failed, trying again: {error}")
    return world.probe(probe_s, lambda _: None, computing=computing)


def _costs(setup: Setup, ranks: int, quick: bool) -> dict[str, float]:
    emulated = setup.accelerators is Accelerators.EMULATED
    if quick:
        usual = EMULATED_COSTS if emulated else RuntimeCosts()
        return {name: usual[name] for name in usual.sources}
    return _measured_costs(ranks, emulated)


@cache
def _measured_costs(ranks: int, emulated: bool) -> dict[str, float]:
    """Measure the runtime's costs on this machine, once in a process."""
    from autotune.jobs.campaign.cost_processes import measured_costs

    return measured_costs(ranks, emulated=emulated)
