"""Start workers of MultiWorkerMirroredStrategy in the hosts of a testbed; read their times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.cluster import Cluster
from autotune.testbed.bed import running
from autotune.workload import Workload
from benchmarks.testbed_fidelity.processes import inside

PORT = 23600
JOB = "job.json"
START_S, STEP_S = 240.0, 5.0
"""Longest time until all workers run, and of a step."""


@dataclass(frozen=True)
class Case:
    """Steps with messages of this size; 0: one message, TensorFlow's default."""

    bytes_per_pack: int
    steps: int
    warmup: int


def run_cases(
    cluster: Cluster, workload: Workload, cases: Sequence[Case], folder: Path
) -> list[tuple[float, ...]]:
    """Run the cases in one start of the workers; return the seconds of each one's steps.

    A step counts from its beginning to the next one's, on the slowest worker. It runs on a testbed
    of the cluster, which needs root.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    steps = sum(case.steps + case.warmup + 1 for case in cases)
    with running(cluster, name=f"mirrored-{os.getpid()}") as bed:
        places = [
            (index, host.address)
            for index, host in enumerate(bed.hosts)
            for _ in range(host.devices)
        ]
        workers = [f"{address}:{PORT + rank}" for rank, (_, address) in enumerate(places)]
        job = {
            "workload": workload.to_data(),
            "cases": [asdict(case) for case in cases],
            "folder": str(folder),
        }
        (folder / JOB).write_text(json.dumps(job))
        command = [sys.executable, "-m", "benchmarks.mirrored_ranks.rank", str(folder / JOB)]
        processes = [
            inside(bed, index, command, TF_CONFIG=_configuration(workers, rank))
            for rank, (index, _) in enumerate(places)
        ]
        try:
            for process in processes:
                process.wait(START_S + STEP_S * steps)
        except subprocess.TimeoutExpired:
            raise SystemExit("workers of TensorFlow did not end in time") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
    failed = {
        rank: process.returncode for rank, process in enumerate(processes) if process.returncode
    }
    if failed:
        raise SystemExit(f"workers of TensorFlow failed (rank: status): {failed}; see above")
    of_ranks = [
        json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(len(places))
    ]
    return [
        tuple(max(step) for step in zip(*of_case, strict=True))
        for of_case in zip(*of_ranks, strict=True)
    ]


def _configuration(workers: Sequence[str], rank: int) -> str:
    task = {"type": "worker", "index": rank}
    return json.dumps({"cluster": {"worker": list(workers)}, "task": task})
