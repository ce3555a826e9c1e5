"""What asks the commands to stop is obeyed: nothing is left running, and the job can be resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.store import Store

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "train_small.py"


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {limit_s:.0f} s")
        time.sleep(0.2)


def processes_with(word: str) -> list[int]:
    """Ids of the processes, apart from this one, that have `word` among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                arguments = (entry / "cmdline").read_bytes()
            except OSError:  # it ended while we looked
                continue
            if word.encode() in arguments:
                found.append(int(entry.name))
    return found


def take_interrupts() -> None:
    """A shell starts its background jobs with SIGINT ignored, and these tests may run in one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_job_stops_its_ranks_and_says_how_to_go_on(tmp_path, number) -> None:
    script = tmp_path / "train_marked.py"  # a name by which its processes are known
    script.write_text(SCRIPT.read_text())
    words = ["tune", "--directory", str(tmp_path), "--job", "stopped", "--search", "random", "--budget-trials", "500"]
    command = [sys.executable, "-m", "autotune", *words, "--", "torchrun", "--nproc-per-node", "2", str(script)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=take_interrupts)

    def trials() -> int:
        if not (tmp_path / "autotune.db").exists():
            return 0
        with Store.open(tmp_path / "autotune.db") as store:
            return len(store.history("stopped").trials) if store.jobs() else 0

    try:
        wait_for(lambda: trials() >= 3, "the third trial")
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "interrupted; finished trials are kept, `autotune tune --resume` goes on" in error
    wait_for(lambda: not processes_with("train_marked.py"), "the end of the ranks", 20.0)
    with Store.open(tmp_path / "autotune.db") as store:
        assert store.job_status("stopped") == "running"


def test_a_terminated_run_ends_torchrun_and_its_ranks(tmp_path) -> None:
    script = tmp_path / "train_with_export.py"
    script.write_text((ROOT / "tests" / "scripts" / "train_small.py").read_text())
    directory = tmp_path / "jobs"
    launch = ["--", "torchrun", "--standalone", "--nproc-per-node", "2", str(script)]
    settings = [
        "--search",
        "random",
        "--budget-trials",
        "2",
        "--timed-steps",
        "3",
        "--most-steps",
        "3",
        "--ab-pairs",
        "6",
        "--directory",
        str(directory),
    ]
    tuned = subprocess.run(
        [sys.executable, "-m", "autotune", "tune", "--job", "short", *settings, *launch], cwd=ROOT, capture_output=True, timeout=200
    )
    assert tuned.returncode == 0, tuned.stderr
    best = directory / "short" / "best.json"
    running = subprocess.Popen([sys.executable, "-m", "autotune", "run", "--strategy", str(best), *launch], cwd=ROOT)
    wait_for(lambda: len(processes_with("train_with_export.py")) >= 4, "the start of torchrun and two ranks")
    time.sleep(3.0)
    running.send_signal(signal.SIGTERM)
    running.wait(timeout=60)
    wait_for(lambda: not processes_with("train_with_export.py"), "the end of torchrun and its ranks", 40.0)
