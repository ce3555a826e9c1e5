"""Start ranks of Horovod in the hosts of a testbed without `horovodrun`; read their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.cluster import Cluster
from autotune.lowering.negotiation import HorovodSettings
from autotune.testbed.bed import Testbed, running
from autotune.workload import Workload
from benchmarks.testbed_fidelity.processes import inside

FIRST_PORT = 29500
START_S, CASE_S = 120.0, 60.0
"""Longest time until all ranks run, and of one case."""
STALL_S = 30
STALL = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": str(STALL_S // 2),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_S),
}
"""A wait for another rank ends."""
STEP_S = 2.0
JOB = "job.json"


@dataclass(frozen=True)
class Case:
    """Settings and blocks of steps, as `rank.run_case` takes them.

    Without settings, Horovod has its own defaults, which its autotune may change.
    `sparse_as_dense` as in `hvd.DistributedOptimizer`.
    """

    settings: HorovodSettings | None
    blocks: tuple[tuple[str, int], ...]
    warmup: int = 4
    probe_bytes: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    sparse_as_dense: bool = False

    def to_data(self) -> dict[str, Any]:
        settings = self.settings
        fixed = {} if settings is None else environment_of(settings)
        takes = any(what == "timeline" for what, _ in self.blocks)
        timeline = {"HOROVOD_TIMELINE": "DYNAMIC"} if takes else {}
        return {
            "environment": {**STALL, **fixed, **timeline, **self.environment},
            "groups": [] if settings is None else [list(group) for group in settings.groups],
            "blocks": [list(block) for block in self.blocks],
            "warmup": self.warmup,
            "probe_bytes": list(self.probe_bytes),
            "sparse_as_dense": self.sparse_as_dense,
        }


def environment_of(settings: HorovodSettings) -> dict[str, str]:
    """Horovod's variables for these settings."""
    return {
        "HOROVOD_FUSION_THRESHOLD": str(settings.fusion_threshold_bytes),
        "HOROVOD_CYCLE_TIME": repr(settings.cycle_s * 1e3),
        "HOROVOD_DISABLE_GROUP_FUSION": "0" if settings.fuses_groups else "1",
    }


@dataclass(frozen=True)
class CaseResult:
    """Results of the ranks: `ranks[r]` of rank r; `folder` holds the timelines."""

    ranks: tuple[dict[str, Any], ...]
    folder: Path

    def steps_s(self, what: str) -> list[float]:
        """Seconds of the steps of all blocks that recorded `what`, each the slowest rank's."""
        first, steps_s = 0, []
        for block in self.ranks[0]["blocks"]:
            count = len(block["marks_s"]) - 1
            if block["what"] == what:
                steps_s += self.ranks[0]["slowest"][first : first + count]
            first += count
        return steps_s

    def timelines(self) -> list[Path]:
        return [
            self.folder / block["timeline"]
            for block in self.ranks[0]["blocks"]
            if block["what"] == "timeline"
        ]


def run_cases(
    cluster: Cluster,
    workload: Workload,
    cases: Sequence[Case],
    folder: Path,
    framework: str = "torch",
) -> list[CaseResult]:
    """Run the cases in one start of the ranks, on a testbed of the cluster; needs root.

    `framework`: torch or tensorflow, whose script the ranks run.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / JOB
    data = job_data(workload, cases, framework)
    job.write_text(json.dumps({**data, "folder": str(folder)}))
    steps = sum(count for case in cases for _, count in case.blocks)
    with running(cluster, name=f"horovod-{os.getpid()}") as bed:
        processes = start(bed, [sys.executable, "-m", "benchmarks.horovod_ranks.rank", str(job)])
        try:
            for process in processes:
                process.wait(START_S + CASE_S * len(cases) + STEP_S * steps)
        finally:
            for process in processes:
                process.kill()
    failed = {
        rank: process.returncode for rank, process in enumerate(processes) if process.returncode
    }
    if failed:
        raise SystemExit(
            f"ranks of Horovod failed (rank: status): {failed}; see their output above"
        )
    return read_results(folder, len(cases), cluster.world_size)


def job_data(workload: Workload, cases: Sequence[Case], framework: str) -> dict[str, Any]:
    """Return what ranks are to run, without the folder of their results."""
    return {
        "framework": framework,
        "workload": workload.to_data(),
        "cases": [case.to_data() for case in cases],
    }


def result_files(folder: Path, cases: int, ranks: int) -> list[list[Path]]:
    """Return the files of results: of each case, one per rank."""
    return [
        [folder / f"case{number}.rank{rank}.json" for rank in range(ranks)]
        for number in range(cases)
    ]


def read_results(folder: Path, cases: int, ranks: int) -> list[CaseResult]:
    """Read what the ranks of a finished run have written."""
    return [
        CaseResult(tuple(json.loads(file.read_text()) for file in files), folder)
        for files in result_files(folder, cases, ranks)
    ]


def start(bed: Testbed, command: Sequence[str]) -> list[subprocess.Popen[str]]:
    """Start a command as every rank, with the places that `horovodrun` would give.

    The command must call `hvd.init` by `runtime_rewriter.horovod.hostname.call_on_interface`.
    """
    places = [
        (number, local) for number, host in enumerate(bed.hosts) for local in range(host.devices)
    ]
    shared = {
        "HOROVOD_SIZE": str(len(places)),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": bed.hosts[0].address,
        "HOROVOD_GLOO_IFACE": bed.interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "BENCHMARK_HOSTS": ",".join(f"{host.name}:{host.devices}" for host in bed.hosts),
        "BENCHMARK_PORT": str(FIRST_PORT),
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    for rank, (number, local) in enumerate(places):
        host = bed.hosts[number]
        mine = {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_HOSTNAME": host.name,
            "HOROVOD_LOCAL_RANK": str(local),
            "HOROVOD_LOCAL_SIZE": str(host.devices),
            "HOROVOD_CROSS_RANK": str(sum(devices > local for devices in _devices(bed, number))),
            "HOROVOD_CROSS_SIZE": str(sum(devices > local for devices in _devices(bed, None))),
        }
        processes.append(inside(bed, number, command, **shared, **mine))
    return processes


def _devices(bed: Testbed, before: int | None) -> list[int]:
    return [host.devices for host in bed.hosts[:before]]
