"""Start ranks of TensorFlow in the hosts of a testbed, and read what they recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.cluster import Cluster
from autotune.parsing import parse, read_json
from autotune.recordings.probe import ProbeSeries
from autotune.strategy_space.plan import Plan
from autotune.testbed.bed import running
from benchmarks.tensorflow_ranks.layers import TimedLayer
from benchmarks.testbed_fidelity.processes import inside

PORT = 23400
JOB, RESULTS, PROBED = "job.json.input", "results.json", "probed.json"
START_S, CASE_S = 180.0, 90.0
"""Longest time until all ranks run, and of one case."""


@dataclass(frozen=True)
class Case:
    """One plan of one model. `steps` are recorded, after `warmup` ones."""

    name: str
    model: str
    plan: Plan
    steps: int = 6
    warmup: int = 2


@dataclass(frozen=True)
class CaseResult:
    """`folder`: the recording. `plain_s`: the client's times of steps that were not recorded."""

    folder: Path
    plain_s: tuple[float, ...]
    recorded_s: tuple[float, ...]


def run_cases(
    cluster: Cluster,
    models: Mapping[str, Sequence[TimedLayer]],
    cases: Sequence[Case],
    folder: Path,
    probe_s: float = 0.0,
) -> dict[str, CaseResult]:
    """Run the cases in one start of the ranks, on a testbed of the cluster; needs root.

    `probe_s`: time for a probe of TensorFlow's exchanges behind them, for `read_probe`.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / RESULTS
    results.unlink(missing_ok=True)
    with running(cluster, name=f"tensorflow-{os.getpid()}") as bed:
        places = [
            (index, host) for index, host in enumerate(bed.hosts) for _ in range(host.devices)
        ]
        job = {
            "addresses": [f"{host.address}:{PORT + rank}" for rank, (_, host) in enumerate(places)],
            "hosts": [host.name for _, host in places],
            "models": {name: [asdict(one) for one in layers] for name, layers in models.items()},
            "cases": [asdict(case) | {"plan": case.plan.to_json()} for case in cases],
            "folder": str(folder),
            "probe_s": probe_s,
        }
        (folder / JOB).write_text(json.dumps(job))
        command = [sys.executable, "-m", "benchmarks.tensorflow_ranks.rank"]
        processes = [
            inside(bed, index, [*command, str(folder / JOB), str(rank)])
            for rank, (index, _) in enumerate(places)
        ]
        try:
            _await(processes, results, START_S + CASE_S * len(cases) + 2 * probe_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return read_results(folder)


def read_results(folder: Path) -> dict[str, CaseResult]:
    """What `run_cases` wrote into `folder`."""
    times = json.loads((folder / RESULTS).read_text())
    return {
        name: CaseResult(folder / name, tuple(of["plain_s"]), tuple(of["recorded_s"]))
        for name, of in times.items()
    }


def read_probe(folder: Path) -> tuple[ProbeSeries, ...]:
    """The probe that `run_cases` wrote into `folder`; () without one."""
    path = folder / PROBED
    if not path.exists():
        return ()
    return tuple(parse(ProbeSeries, one, str(path)) for one in read_json(path))


def _await(processes: Sequence[subprocess.Popen[str]], results: Path, most_s: float) -> None:
    """Wait for the results. Ends the benchmark if a rank fails or they are late."""
    deadline_s = time.monotonic() + most_s
    while not results.exists():
        failed = [rank for rank, one in enumerate(processes) if one.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline_s:
            problem = f"ranks {failed} failed" if failed else f"nothing came within {most_s:.0f} s"
            raise SystemExit(f"TensorFlow in a testbed: {problem}; see the output above")
        time.sleep(0.5)
