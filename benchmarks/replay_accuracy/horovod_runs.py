"""Runs of Horovod's ranks whose results are kept in a folder and read again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from autotune.cluster import Cluster
from autotune.workload import Workload
from benchmarks.horovod_ranks.start import (
    JOB,
    Case,
    CaseResult,
    job_data,
    read_results,
    result_files,
    run_cases,
)


@dataclass(frozen=True)
class RankRun:
    """One start of the ranks, which run `cases` one after the other.

    `framework`: as of `run_cases`.
    """

    cluster: Cluster
    workload: Workload
    cases: tuple[Case, ...]
    folder: Path
    framework: str

    @property
    def is_collected(self) -> bool:
        """Whether the folder has the results of exactly these cases from every rank."""
        job = self.folder / JOB
        if not job.exists():
            return False
        stored = json.loads(job.read_text())
        del stored["folder"]
        wanted = json.loads(json.dumps(job_data(self.workload, self.cases, self.framework)))
        return bool(stored == wanted) and all(file.exists() for file in self._files())

    def collect(self) -> None:
        """Run the cases; needs root. Earlier results are removed, so no run mixes with another."""
        for file in self._files():
            file.unlink(missing_ok=True)
        run_cases(self.cluster, self.workload, self.cases, self.folder, self.framework)

    def results(self) -> list[CaseResult]:
        """Read the results of a collected run, one per case."""
        return read_results(self.folder, len(self.cases), self.cluster.world_size)

    def _files(self) -> list[Path]:
        by_case = result_files(self.folder, len(self.cases), self.cluster.world_size)
        return [file for of_case in by_case for file in of_case]
