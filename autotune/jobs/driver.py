"""Execute the tuner's instructions: run trials in the world, ask for proposals, record events.

The order is fixed: an event is durable in the store before observers receive it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from autotune.cluster import MAX_NAMED, Cluster, CollectiveFit, Host
from autotune.errors import LaunchError
from autotune.profiling.fits.probe_fits import collective_fits
from autotune.records import (
    CURRENT_SETUP,
    Accelerators,
    Conditions,
    Decision,
    Failed,
    Measured,
    Network,
    TrialRequest,
)
from autotune.sampler.proposer import Proposer
from autotune.storage.store import Store
from autotune.strategy_space.plan import Plan
from autotune.tuning.events import Event, Profiled, Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.instructions import (
    Abort,
    Finish,
    Instruction,
    ProfileWorkload,
    Propose,
    RunTrial,
)
from autotune.tuning.job import JobSpec
from autotune.tuning.tuner import next_instruction
from autotune.workload import Workload
from runtime_rewriter.world.results import Profile, TrainingEnded


class TrialWorld(Protocol):
    """The running training. It returns failures of a trial.

    It raises `LaunchError` if the script no longer starts, and `TrainingEnded` if a kept training
    has come to its own end.
    """

    def model_id(self) -> str: ...
    def profile(self) -> Profile: ...
    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed: ...
    def emulate(self, workload: Workload) -> None: ...
    def round_robin(self) -> bool: ...


class Observer(Protocol):
    """Receives the job's progress while the ranks are paused at a step boundary."""

    def started(self, instruction: Instruction, history: History) -> None: ...
    def recorded(self, event: Event, history: History) -> None: ...


def drive(
    job_id: str,
    spec: JobSpec,
    store: Store,
    world: TrialWorld,
    proposer: Proposer,
    observers: Sequence[Observer],
    began_s: float | None = None,
) -> Decision:
    """Continue the job from the end of its event log to its decision.

    `began_s`: when its time began on the monotonic clock; None: now.

    If a kept training ends by itself before, the current setup stays. The caller closes the job
    when its results are written. Raises `LaunchError` if the script cannot be tuned.
    """
    try:
        history = carry_out(
            job_id,
            spec,
            store,
            world,
            proposer,
            observers,
            next_instruction,
            began_s,
            started_anew=True,
        )
    except TrainingEnded as ended:
        return _undecided(ended, store.history(job_id))
    last = next_instruction(spec, history)
    assert isinstance(last, Finish)
    return last.decision


def _undecided(ended: TrainingEnded, history: History) -> Decision:
    if history.profiled is None:
        raise LaunchError(
            f"{ended}, before it was profiled: nothing was tuned, and the training is not repeated"
        ) from ended
    return Decision(CURRENT_SETUP, f"{ended}, before the search was decided", None, None)


def carry_out(
    job_id: str,
    spec: JobSpec,
    store: Store,
    world: TrialWorld,
    proposer: Proposer,
    observers: Sequence[Observer],
    instruct: Callable[[JobSpec, History], Instruction | None],
    began_s: float | None = None,
    started_anew: bool = False,
) -> History:
    """Execute instructions from the end of the event log until None or `Finish`.

    Returns the history. With `tuner.search_instruction`, only the search runs. `started_anew`: the
    script has started since the last event. Raises `LaunchError` if the script cannot be tuned.
    """
    history = store.history(job_id)
    restarts = started_anew and bool(history.trials)
    before_s, began_s = history.elapsed_s, time.monotonic() if began_s is None else began_s
    if history.profiled is not None:
        _same_model(history.profiled.workload, world.model_id())
        if spec.conditions.accelerators is Accelerators.EMULATED:
            world.emulate(history.profiled.workload)
    while True:
        instruction = instruct(spec, history)
        if instruction is None:
            return history
        for observer in observers:
            observer.started(instruction, history)
        if isinstance(instruction, Finish):
            return history
        if isinstance(instruction, Abort):
            store.finish(job_id, None)
            raise LaunchError(instruction.message)
        event = _execute(instruction, spec, history, world, proposer)
        event = replace(event, elapsed_s=before_s + time.monotonic() - began_s)
        if isinstance(event, TrialFinished):
            event = replace(event, restarted=restarts)
            restarts = isinstance(event.outcome, Failed) and not event.refused
        store.append(job_id, len(history.events), event)
        history = history.then(event)
        for observer in observers:
            observer.recorded(event, history)


def _execute(
    instruction: ProfileWorkload | Propose | RunTrial,
    spec: JobSpec,
    history: History,
    world: TrialWorld,
    proposer: Proposer,
) -> Profiled | Proposed | TrialFinished:
    if isinstance(instruction, ProfileWorkload):
        profile = world.profile()
        workload = profile.workload
        if spec.conditions.accelerators is Accelerators.EMULATED:
            workload = replace(workload, threads=0)  # waits take no core from messages
        cluster = probed(spec.cluster, profile, spec.conditions.network is not Network.HOSTS)
        return Profiled(
            workload,
            cluster,
            0.0,
            profile.software,
            profile.cross_step_refused,
            profile.current_buckets,
            profile.op_fusions,
            profile.op_fusion_report,
            profile.mirrored,
            profile.direct_refused,
            profile.further_models,
            profile.plugins_refused,
        )
    if isinstance(instruction, Propose):
        return proposer.propose(
            history, instruction.round, instruction.count, instruction.incumbent
        )
    request = instruction.request
    planned = history.planned(request.strategy_id)
    plan = planned.plan if planned else None
    outcome = world.run_trial(request, plan)
    return TrialFinished(request, outcome, plan.id if plan else None, 0.0, _conditions(spec, world))


def _conditions(spec: JobSpec, world: TrialWorld) -> Conditions:
    """The actual conditions: the machine may not have permitted round-robin scheduling."""
    return replace(spec.conditions, round_robin=spec.conditions.round_robin and world.round_robin())


def probed(cluster: Cluster, profile: Profile, one_machine: bool) -> Cluster:
    """Return the cluster with its fitted costs, and with cores where the file has none.

    An assumed cluster is replaced by the hosts of the ranks, with the bandwidth that the ring of
    all ranks showed; the hosts and bandwidths of a cluster file stay. Hosts that are emulated on
    `one_machine` share its cores. Raises `LaunchError` if the ranks run on other machines than
    those of the file.
    """
    fits = collective_fits(profile.series)
    if cluster == Cluster.local(cluster.world_size):
        ring = cluster.with_fits(fits).fit("all_reduce", cluster.world_size)
        cluster = replace(cluster, hosts=_hosts_of_ranks(cluster.hosts[0], profile, ring))
    elif not one_machine:
        _refuse_another_layout(cluster, profile)
        cluster = cluster.at_addresses(profile.addresses)

    def cores(host: Host) -> int:
        share = host.devices / cluster.world_size if one_machine else 1.0
        return host.cores or max(1, int(profile.cores * share)) * (profile.cores > 0)

    machine_cores = profile.cores if one_machine else 0
    with_cores = tuple(replace(host, cores=cores(host)) for host in cluster.hosts)
    return replace(cluster, hosts=with_cores, machine_cores=machine_cores).with_fits(fits)


def _hosts_of_ranks(
    assumed: Host, profile: Profile, ring: CollectiveFit | None
) -> tuple[Host, ...]:
    """The hosts that the ranks are on, each with the bandwidth of their ring if it was probed."""
    if ring is not None and ring.beta_s_per_byte > 0:
        # Eq. 3: each link carries 2 (w - 1) / w of the bytes of a ring all-reduce
        speed = 2 * (ring.group_size - 1) / ring.group_size / ring.beta_s_per_byte
        assumed = replace(assumed, link_bytes_per_s=speed, inner_bytes_per_s=speed)
    if len(profile.hosts) < 2:
        return (assumed,)
    addresses = profile.addresses or ("",) * len(profile.hosts)
    return tuple(
        replace(assumed, name=name, devices=ranks, address=address)
        for (name, ranks), address in zip(profile.hosts, addresses, strict=True)
    )


def _refuse_another_layout(cluster: Cluster, profile: Profile) -> None:
    layout = [ranks for _, ranks in profile.hosts]
    if layout != [host.devices for host in cluster.hosts]:
        listed = ", ".join(map(str, layout[:MAX_NAMED]))
        raise LaunchError(
            f"the ranks must run on hosts like the {len(cluster.hosts)} of cluster "
            f"{cluster.name!r}, but run on {len(layout)} with {listed} ranks; describe these hosts "
            "in the cluster file, with the `address` of each, or leave out --cluster"
        )


def _same_model(workload: Workload, running_id: str) -> None:
    if workload.id != running_id:
        raise LaunchError(
            f"the job was started with model {workload.id} ({len(workload.variables)} variables), "
            f"but the script now builds {running_id}; start a new job, or restore the script",
            anchor="another-model",
        )
