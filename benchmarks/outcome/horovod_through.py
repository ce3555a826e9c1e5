"""Our plan through Horovod: searched and measured in a process of its own.

`python -m benchmarks.outcome.horovod_through FOLDER MODEL.CLUSTER TRIALS SEED [quick]` starts a
Horovod script of the domain in FOLDER, whose plans are enacted by operations of Horovod only. Its
first line on stdout is the best strategy of a search of TRIALS trials; then it answers each line on
stdin, the number of a round, by the seconds of the block's steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from autotune.canonical import to_data
from autotune.dataset.folder import read_domain
from autotune.errors import LaunchError
from autotune.jobs.campaign.session import TrialSession, trial_session
from autotune.jobs.campaign.setups import Setup
from autotune.jobs.campaign.tuning_jobs import begin_job, job_spec, open_jobs
from autotune.parsing import parse
from autotune.records import Failed, FailureKind
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import SparseHandling, Strategy, Synchronizer
from benchmarks.horovod_ranks import start
from benchmarks.outcome.kept import OutcomeSettings
from benchmarks.outcome.measure import LENGTHS, SETUPS
from benchmarks.outcome.searches import MOST_STEPS, searched
from benchmarks.repository import END_S, child_process, run_benchmark

TRAIN = Path(start.__file__).with_name("train.py").resolve()
STEPS = 6
JOB = "through"


@dataclass(frozen=True)
class Found:
    """The result of the search: None if it found nothing faster than the script's own Horovod."""

    strategy: Strategy | None
    trials: int


def operations_of_horovod(space: SearchSpace) -> SearchSpace:
    """Return the part of the space whose messages are all operations of Horovod."""
    return replace(
        space,
        synchronizers=(Synchronizer.ALL_REDUCE,),
        sparse=(SparseHandling.DENSE, SparseHandling.ALL_GATHER),
        hierarchical=False,
        ring_orders=False,
    )


class BlockHung(LaunchError):
    """The ranks of a block fell silent."""


def block_of(session: TrialSession, source: str, strategy: Strategy | None) -> tuple[float, ...]:
    """Return the steps of a trial, the slowest rank's; None: the script's own setup.

    Raises `BlockHung` if it hangs, and `LaunchError` if it fails otherwise.
    """
    trial = (
        session.reference(source)
        if strategy is None
        else session.candidate(source, strategy, STEPS)
    )
    if isinstance(trial.outcome, Failed):
        kind = BlockHung if trial.outcome.kind is FailureKind.HANG else LaunchError
        raise kind(f"a block failed; run again: {trial.failure}")
    return tuple(trial.outcome.slowest_s.tolist())


class ThroughHorovod:
    """The process, from the side that starts it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.found = parse(Found, json.loads(self._line()), "the search through Horovod")

    def block(self, number: int) -> tuple[float, ...]:
        """Measure a block of round `number`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return tuple(json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait(END_S)
            raise LaunchError(
                f"our plan through Horovod ended with status {status}; see its output above"
            )
        return line


@contextmanager
def through_horovod(
    setup: Setup, folder: Path, settings: OutcomeSettings, quick: bool
) -> Iterator[ThroughHorovod]:
    """Start the process, and end it with the block."""
    words = [str(folder.resolve()), setup.name, str(settings.marks[-1]), str(settings.seed)]
    command = [sys.executable, "-m", __name__, *words, *(["quick"] if quick else [])]
    pipe = subprocess.PIPE
    with child_process(command, stdin=pipe, stdout=pipe) as process:
        yield ThroughHorovod(process)


def main() -> None:
    folder, name, trials, seed, *rest = sys.argv[1:]
    workload = read_domain(Path(folder)).workload
    file = (Path(folder) / "work" / "horovod" / "workload.json").resolve()
    file.write_text(json.dumps(workload.to_data()), encoding="utf-8")
    words = (str(TRAIN), str(file))
    setup = replace(SETUPS[name], script=words, profile=lambda: workload)
    say = Console(stderr=True, highlight=False, markup=False).log
    own = Path(folder) / "horovod"
    with trial_session(own, setup, LENGTHS, say, quick=bool(rest)) as session:
        spec = replace(
            job_spec(session), max_trials=int(trials), most_steps=MOST_STEPS, seed=int(seed)
        )
        with open_jobs(session) as store:
            begin_job(session, store, JOB, spec, session.prepared_s)
            marks = (int(trials),)
            result = searched(JOB, spec, store, session, marks, say, operations_of_horovod)
        strategy = result.at.get(marks[0])
        print(json.dumps(to_data(Found(strategy, result.trials_at[marks[0]]))), flush=True)
        for line in sys.stdin:
            source = f"beside-horovod:{int(line)}:{JOB}"
            print(json.dumps(block_of(session, source, strategy)), flush=True)


if __name__ == "__main__":
    run_benchmark(main)
