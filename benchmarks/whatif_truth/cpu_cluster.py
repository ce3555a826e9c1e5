"""Part (b) on an emulated cluster of two hosts: distributed, other buckets, fp16 gradients.

A rank computes really, on a core of its own. The baseline is one replica alone in the same world.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from autotune.commands.what_if import register_all
from autotune.errors import InvalidInput
from autotune.jobs.campaign.session import TrialLength, trial_session
from autotune.jobs.campaign.setups import script_setup
from autotune.profiling.traces.job import TraceJob
from autotune.records import Accelerators
from autotune.strategy_space.builders.collectives import ddp_default
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
LENGTH = TrialLength(warmup_steps=2, timed_steps=12)


def cluster_rows(
    folder: Path, example: str, job: TraceJob, log: Callable[[str], None]
) -> Iterator[CpuRow]:
    """Measure an example on the emulated cluster (root); `job`: the recording of one process."""
    base = recorded_base(job, 0)
    gradients = gradients_of(job, 0, base)
    setup = script_setup(
        ROOT / "examples" / f"{example}.py", cluster_file(CLUSTER), Accelerators.REAL
    )
    with trial_session(folder / setup.name, setup, LENGTH, log, quick=True) as session:
        described = session.writer.described
        assert described is not None
        workers = described.cluster.world_size
        question = Question(cluster=described.cluster, workers=workers, gradients=gradients)
        alone_s = described.workload.compute_s
        for name, strategy in _strategies(described.workload).items():
            load = os.getloadavg()[0]
            trial = session.reference() if strategy is None else session.candidate(name, strategy)
            if trial.failure:
                yield CpuRow(example, name, reason=trial.failure)
                continue
            try:
                predicted_s = alone_s + _added_s(base, name, question)
            except InvalidInput as error:
                yield CpuRow(example, name, reason=str(error))
                continue
            yield CpuRow(example, name, alone_s, predicted_s, trial.median_s, load=load)


CHANGES = ("distributed", f"bucket_size={SMALL_BUCKET_MIB}", "distributed+fp16_gradients")


def _strategies(workload: Workload) -> dict[str, Strategy | None]:
    """What-ifs and the strategies that enact them; None: the script's own DDP."""
    small = ddp_default(workload, bucket_bytes=SMALL_BUCKET_MIB * MIB)
    return dict(zip(CHANGES, (None, small, _halved(ddp_default(workload))), strict=True))


def _halved(strategy: Strategy) -> Strategy:
    """The strategy with every gradient sent as fp16."""
    return replace(
        strategy,
        variables=tuple(
            replace(
                variable,
                shards=tuple(
                    replace(shard, compressor=Compressor.FP16) for shard in variable.shards
                ),
            )
            for variable in strategy.variables
        ),
    )


def _added_s(base: Base, name: str, question: Question) -> float:
    """How much a what-if adds to the recorded step. Raises `InvalidInput` for a refused one."""
    register_all([])
    (asked,) = read_asked(name)
    found = answer(base, asked, question)
    if found.prediction is None:
        raise InvalidInput(found.reason)
    return found.prediction.after_s - steady(base).step_s
