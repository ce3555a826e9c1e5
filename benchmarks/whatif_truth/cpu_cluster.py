"""Part (b) on an emulated cluster of two hosts: distributed, other buckets, fp16 gradients.

A rank computes really, on a core of its own. The baseline is the same replicas without messages
during the step (`World.profile`). Baseline and changes take turns. Of each one's turns the lower
quartile counts: other work only slows them down, and the prediction knows no other work. Sparse
gradients are sent as rows, as DDP sends them.

The recording was made alone, the replicas compute side by side. What-ifs start from the recorded
step with all of its host's times scaled such that it takes as long as the baseline.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autotune.commands.what_if import register_all
from autotune.jobs.campaign.session import TrialLength, TrialSession, trial_session
from autotune.jobs.campaign.setups import script_setup
from autotune.profiling.traces.job import TraceJob
from autotune.records import Accelerators
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.strategy import Compressor, Strategy
from autotune.whatif.answers.answers import answer, read_asked
from autotune.whatif.base import Base, steady
from autotune.whatif.question import Question
from autotune.whatif.recording.gradients import gradients_of
from autotune.whatif.recording.recorded import recorded_base
from autotune.workload import Workload
from benchmarks.repository import ROOT, cluster_file
from benchmarks.whatif_truth.cpu_rows import CpuRow

CLUSTER = "two_hosts"
SMALL_BUCKET_MIB = 1
MIB = 2**20
LENGTH = TrialLength(warmup_steps=2, timed_steps=8)
ROUNDS = 8
CHANGES = ("distributed", f"bucket_size={SMALL_BUCKET_MIB}", "distributed+fp16_gradients")


@dataclass(frozen=True)
class Turns:
    """Step times in seconds by round: of the baseline, and of each change.

    `failures`: why a change could not be measured. `load`: the largest of the machine.
    """

    baseline_s: Sequence[float]
    changed_s: dict[str, list[float]]
    failures: dict[str, str]
    load: float

    def row(self, example: str, name: str) -> CpuRow:
        """The measured row of a change."""
        if name in self.failures:
            return CpuRow(example, name, reason=self.failures[name])
        measured_s = undisturbed_s(self.changed_s[name])
        return CpuRow(
            example, name, undisturbed_s(self.baseline_s), measured_s=measured_s, load=self.load
        )


def undisturbed_s(turns_s: Sequence[float]) -> float:
    """The lower quartile of the turns."""
    return float(np.quantile(turns_s, 0.25))


def cluster_rows(
    folder: Path, example: str, job: TraceJob, log: Callable[[str], None]
) -> list[CpuRow]:
    """Measure an example on the emulated cluster (root); `job`: the recording of one process."""
    base = recorded_base(job, 0)
    gradients = gradients_of(job, 0, base)
    setup = script_setup(
        ROOT / "examples" / f"{example}.py", cluster_file(CLUSTER), Accelerators.REAL
    )
    with trial_session(folder / setup.name, setup, LENGTH, log) as session:
        turns = _measured(session, ROUNDS)
        described = session.writer.described
        assert described is not None
        cluster = described.cluster
    question = Question(cluster=cluster, workers=cluster.world_size, gradients=gradients)
    base = at_step(base, undisturbed_s(turns.baseline_s))
    return [predicted_row(turns.row(example, name), name, base, question) for name in CHANGES]


def predicted_row(measured: CpuRow, name: str, base: Base, question: Question) -> CpuRow:
    """The row with the prediction of a what-if, or with the reason why there is none."""
    if measured.reason:
        return measured
    register_all([])
    (asked,) = read_asked(name)
    answered = answer(base, asked, question)
    if answered.prediction is None:
        return CpuRow(measured.example, measured.change, reason=answered.reason)
    return replace(measured, predicted_s=measured.baseline_s / answered.prediction.speedup)


def at_step(base: Base, step_s: float) -> Base:
    """The step of a host that is slower or faster throughout, such that it takes `step_s`."""
    factor = step_s / steady(base).step_s
    return replace(
        base,
        duration_s=factor * base.duration_s,
        gap_s=factor * base.gap_s,
        delay_s=factor * base.delay_s,
        unknown_gap_s=factor * base.unknown_gap_s,
        unknown_delay_s=factor * base.unknown_delay_s,
        loading_s=factor * base.loading_s,
        between_s=factor * base.between_s,
    )


def _measured(session: TrialSession, rounds: int) -> Turns:
    """Let the baseline and the changes take turns; every other round is in reverse order."""
    strategies = _strategies(session.profile.workload)
    failures: dict[str, str] = {}
    baseline_s: list[float] = []
    changed_s: dict[str, list[float]] = {name: [] for name in CHANGES}
    load = 0.0
    for number in range(rounds):
        order: list[str] = ["", *CHANGES]
        for name in order if number % 2 == 0 else reversed(order):
            if name in failures:
                continue
            load = max(load, os.getloadavg()[0])
            if not name:
                baseline_s.append(session.world.profile().workload.compute_s)
                continue
            strategy = strategies[name]
            trial = session.reference() if strategy is None else session.candidate(name, strategy)
            if trial.failure:
                failures[name] = trial.failure
            else:
                changed_s[name].append(trial.median_s)
    return Turns(baseline_s, changed_s, failures, load)


def _strategies(workload: Workload) -> dict[str, Strategy | None]:
    """What-ifs and the strategies that enact them; None: the script's own DDP."""
    small = ddp_default(workload, bucket_bytes=SMALL_BUCKET_MIB * MIB)
    strategies = (with_rows(one, workload) for one in (small, _halved(workload)))
    return dict(zip(CHANGES, (None, *strategies), strict=True))


def _halved(workload: Workload) -> Strategy:
    """DDP's buckets with every dense gradient sent as fp16."""
    strategy = ddp_default(workload)
    choices = []
    for choice in strategy.variables:
        if not workload.variables[workload.index[choice.variable]].sparse:
            shards = tuple(replace(one, compressor=Compressor.FP16) for one in choice.shards)
            choice = replace(choice, shards=shards)
        choices.append(choice)
    return replace(strategy, variables=tuple(choices))
