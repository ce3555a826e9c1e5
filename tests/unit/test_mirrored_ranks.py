"""The start of MultiWorkerMirroredStrategy's workers waits for all, and names one that ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.mirrored_ranks.start import await_results

WORKER = """
import sys
from pathlib import Path
if sys.argv[1] == "fails": sys.exit(3)
if sys.argv[1] == "ends": Path(sys.argv[2]).touch()
sys.stdin.read()
"""
LONG_S = 60.0

Worker = Callable[[str], tuple[subprocess.Popen[str], Path]]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """Start a process that "ends" its work, "fails", or "goes on"; return it and its file."""
    processes: list[subprocess.Popen[str]] = []

    def start(fate: str) -> tuple[subprocess.Popen[str], Path]:
        file = tmp_path / f"rank{len(processes)}.json"
        words = [sys.executable, "-c", WORKER, fate, str(file)]
        processes.append(subprocess.Popen(words, stdin=subprocess.PIPE, text=True))
        return processes[-1], file

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_workers_with_times_are_still_running(worker: Worker) -> None:
    (first, one), (second, other) = worker("ends"), worker("ends")
    await_results([first, second], [one, other], LONG_S)
    assert one.exists() and other.exists()
    assert first.poll() is None and second.poll() is None


def test_the_first_worker_that_ends_without_times_is_named(worker: Worker) -> None:
    (first, one), (second, other) = worker("ends"), worker("fails")
    with pytest.raises(SystemExit, match=r"some ended \(rank: status\): {1: 3}"):
        await_results([first, second], [one, other], LONG_S)


def test_late_workers_are_named(worker: Worker) -> None:
    process, file = worker("goes on")
    with pytest.raises(SystemExit, match=r"workers \[0\] of TensorFlow had no times after 0 s"):
        await_results([process], [file], 0.0)
