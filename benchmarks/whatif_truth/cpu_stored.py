"""Part (b) on stored trials: distributed training, and buckets of another size.

`datasets/trials` holds an example that computed really on two emulated hosts, with the probe of
these hosts. The baseline is one replica without messages, as the domain's profile states it. What
is predicted starts from a recording of the example on this machine, scaled to that baseline, so
only the shares of its ops and passes are this machine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from autotune.dataset.folder import read_domain
from autotune.dataset.trials import REFERENCE
from autotune.profiling.traces.job import TraceJob
from autotune.whatif.question import Question
from autotune.whatif.recording.gradients import gradients_of
from autotune.whatif.recording.recorded import recorded_base
from benchmarks.repository import ROOT
from benchmarks.whatif_truth.cpu_cluster import at_step, predicted_row
from benchmarks.whatif_truth.cpu_rows import CpuRow

SOURCES: Mapping[str, str] = {"distributed": REFERENCE, "bucket_size=1": "builder:ddp_1mib"}
"""What-ifs and the stored trials that enacted them."""
STORED_CHANGES = tuple(f"{name}, stored" for name in SOURCES)


def stored_domain(example: str) -> Path:
    return ROOT / "datasets" / "trials" / f"{example}.two_hosts.real"


def stored_rows(example: str, job: TraceJob) -> list[CpuRow]:
    """A row for each what-if; `job`: the recording of one process of the example."""
    domain = read_domain(stored_domain(example))
    baseline_s = domain.workload.compute_s
    base = recorded_base(job, 0)
    gradients = gradients_of(job, 0, base)
    question = Question(
        cluster=domain.cluster, workers=domain.cluster.world_size, gradients=gradients
    )
    base = at_step(base, baseline_s)
    rows = []
    for (name, source), change in zip(SOURCES.items(), STORED_CHANGES, strict=True):
        trials = [one for one in domain.trials if one.source == source and not one.failure]
        measured_s = median(one.median_s for one in trials)
        load = max(one.load for one in trials)
        row = CpuRow(example, change, baseline_s, measured_s=measured_s, load=load)
        rows.append(predicted_row(row, name, base, question))
    return rows
