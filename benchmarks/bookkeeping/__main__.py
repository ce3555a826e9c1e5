"""Measure bookkeeping after thousands of trials: `python -m benchmarks.bookkeeping`.

A job's log is filled with `--trials` synthetic trials. `next_instruction_s` is the median time in
which the tuner takes in an event and decides, over the last `--steps` events; `slowest_s` is the
longest. `show_s` is the median wall time of `autotune show JOB`, a new process, over `--repeats`
runs; `show_json_s` that of `autotune show JOB --json`. `append_s` is the median time to store an
event. The last line is one JSON object.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from autotune.cluster import Cluster
from autotune.jobs.workspace import Workspace
from autotune.records import Measured, Role
from autotune.rng import generator
from autotune.sampler.random import sample_many
from autotune.storage.store import Store
from autotune.strategy_space.space import SearchSpace
from autotune.tuning.events import Event, Profiled, Proposal, Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.instructions import ProfileWorkload, Propose, RunTrial
from autotune.tuning.job import JobSpec
from autotune.tuning.tuner import next_instruction
from autotune.zoo.architectures import workload
from benchmarks.repository import option_parser

JOB = "bookkeeping"
STEP_S = 0.1


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    spec = JobSpec.from_data(
        {
            "command": ["torchrun", "--nproc-per-node", "4", "train.py"],
            "workers": 4,
            "max_trials": options.trials,
            "max_seconds": 1e6,
            "cluster": Cluster.local(4).to_data(),
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder))
        with Store.open(workspace.store_path) as store:
            store.create_job(JOB, spec)
            decided_s, append_s = _fill(store, spec, options.model, options.trials, options.steps)
        show_s = [_show_s(workspace) for _ in range(options.repeats)]
        show_json_s = [_show_s(workspace, "--json") for _ in range(options.repeats)]
    result = {
        "next_instruction_s": round(statistics.median(decided_s), 5),
        "slowest_s": round(max(decided_s), 5),
        "show_s": round(statistics.median(show_s), 2),
        "show_json_s": round(statistics.median(show_json_s), 2),
        "append_s": round(statistics.median(append_s), 5),
        "trials": options.trials,
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    print(json.dumps(result))
    return 0


def _fill(
    store: Store, spec: JobSpec, model: str, trials: int, steps: int
) -> tuple[list[float], list[float]]:
    """Store the events of `trials` trials; seconds of the last `steps` decisions and appends."""
    history = History((), spec.deviation)
    job = _SyntheticJob(spec, model, trials)
    decided_s: list[float] = []
    append_s: list[float] = []
    instruction = next_instruction(spec, history)
    while len(history.trials) < trials:
        assert isinstance(instruction, ProfileWorkload | Propose | RunTrial)
        event = job.event(instruction, history)
        before_s = time.perf_counter()
        store.append(JOB, len(history.events), event)
        stored_s = time.perf_counter()
        history = history.then(event)
        instruction = next_instruction(spec, history)
        decided_s.append(time.perf_counter() - stored_s)
        append_s.append(stored_s - before_s)
    return decided_s[-steps:], append_s[-steps:]


class _SyntheticJob:
    """Answers instructions with drawn strategies and log-normal step times."""

    def __init__(self, spec: JobSpec, model: str, trials: int) -> None:
        self._spec = spec
        self._workload = workload(model)
        count = trials + spec.top_k
        self._strategies = sample_many(
            self._workload, spec.cluster, SearchSpace.default(), count, seed=0
        )
        self._rng = generator(0, "bookkeeping")

    def event(self, instruction: ProfileWorkload | Propose | RunTrial, history: History) -> Event:
        now_s = history.elapsed_s + 1.0
        if isinstance(instruction, ProfileWorkload):
            return Profiled(self._workload, self._spec.cluster, now_s, {"torch": "2.13.0"})
        if isinstance(instruction, Propose):
            first = len(history.proposals)
            chosen = self._strategies[first : first + instruction.count]
            proposals = tuple(Proposal(strategy, "sampled", STEP_S) for strategy in chosen)
            return Proposed(instruction.round, proposals, "replay", "", 300, (), now_s)
        request = instruction.request
        usual_s = STEP_S * float(np.exp(0.2 * self._rng.standard_normal()))
        if request.role is Role.REFERENCE:
            usual_s = STEP_S * float(np.exp(0.01 * self._rng.standard_normal()))
        noise = np.exp(0.01 * self._rng.standard_normal((2, request.timed_steps)))
        step_s = tuple(tuple(map(float, usual_s * rank)) for rank in noise)
        return TrialFinished(request, Measured(step_s, 0.0), None, now_s)


def _show_s(workspace: Workspace, *options: str) -> float:
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "autotune", "show", JOB, *options]
    command += ["--directory", str(workspace.directory)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=600)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    sys.exit(main())
