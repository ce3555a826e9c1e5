"""Start workers of MultiWorkerMirroredStrategy in the hosts of a testbed; read their times.

A worker whose peer ends during its own last step fails with "Socket closed". So no worker ends
before all have written their times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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
LOOK_S = 0.2


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
        files = [result_file(folder, rank) for rank in range(len(places))]
        for file in files:
            file.unlink(missing_ok=True)
        processes = [
            inside(bed, index, command, subprocess.PIPE, TF_CONFIG=_configuration(workers, rank))
            for rank, (index, _) in enumerate(places)
        ]
        try:
            await_results(processes, files, START_S + STEP_S * steps)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    of_ranks = [json.loads(file.read_text()) for file in files]
    return [
        tuple(max(step) for step in zip(*of_case, strict=True))
        for of_case in zip(*of_ranks, strict=True)
    ]


def result_file(folder: Path, rank: int) -> Path:
    """Return the file with the times of a worker; it is there once the worker is done."""
    return folder / f"rank{rank}.json"


def await_results(
    processes: Sequence[subprocess.Popen[str]], files: Sequence[Path], most_s: float
) -> None:
    """Wait until all files exist. End the benchmark if a process ends before, or after `most_s`."""
    deadline_s = time.monotonic() + most_s
    while missing := [rank for rank, file in enumerate(files) if not file.exists()]:
        ended = {
            rank: one.returncode for rank, one in enumerate(processes) if one.poll() is not None
        }
        if ended:
            raise SystemExit(
                "workers of TensorFlow must run until all have their times, but some ended "
                f"(rank: status): {ended}; see above"
            )
        if time.monotonic() > deadline_s:
            raise SystemExit(f"workers {missing} of TensorFlow had no times after {most_s:.0f} s")
        time.sleep(LOOK_S)


def _configuration(workers: Sequence[str], rank: int) -> str:
    task = {"type": "worker", "index": rank}
    return json.dumps({"cluster": {"worker": list(workers)}, "task": task})
