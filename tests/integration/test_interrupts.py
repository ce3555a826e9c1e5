"""Commands obey every request to stop: nothing is left running, and the job can be resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from short_jobs import SHORT_PROBE, START_S, with_tracking_store

from autotune.cluster import Cluster
from autotune.export import Export
from autotune.storage.store import Store
from autotune.strategy_space.builders.collectives import single_bucket
from autotune.strategy_space.plan import plan
from autotune.workload import Variable, Workload

pytestmark = pytest.mark.job
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "train_small.py"


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = START_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {limit_s:.0f} s")
        time.sleep(0.2)


def processes_with(word: str) -> list[int]:
    """Ids of the processes, apart from this one, that have `word` among their arguments."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                arguments = (entry / "cmdline").read_bytes()
            except OSError:  # it ended while we looked
                continue
            if word.encode() in arguments:
                processes.append(int(entry.name))
    return processes


def test_a_terminated_job_stops_its_ranks_and_says_how_to_go_on(
    tmp_path: Path, tracking_store: Path
) -> None:
    """By a closed terminal; `test_interruption.py` has the other signals."""
    with_tracking_store(tmp_path, tracking_store)
    script = tmp_path / "train_marked.py"  # a name by which its processes are known
    script.write_text(SCRIPT.read_text())
    words = [
        "tune",
        "--directory",
        str(tmp_path),
        "--job",
        "stopped",
        "--search",
        "random",
        "--budget-trials",
        "500",
        *SHORT_PROBE,
    ]
    command = [
        sys.executable,
        "-m",
        "autotune",
        *words,
        "--",
        "torchrun",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Under nohup it is ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )

    def trials() -> int:
        if not (tmp_path / "autotune.db").exists():
            return 0
        with Store.open(tmp_path / "autotune.db") as store:
            return len(store.history("stopped").trials) if store.jobs() else 0

    try:
        wait_for(lambda: trials() >= 3, "the third trial")
        process.send_signal(signal.SIGHUP)
        _, error = process.communicate(timeout=START_S)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "interrupted; finished trials are kept, `autotune tune --resume` continues" in error
    wait_for(lambda: not processes_with("train_marked.py"), "the end of the ranks", 20.0)
    with Store.open(tmp_path / "autotune.db") as store:
        assert store.job_status("stopped") == "running"


def test_a_terminated_run_ends_torchrun_and_its_ranks(tmp_path) -> None:
    """And states the strategy under which they trained."""
    script = tmp_path / "train_with_export.py"
    script.write_text(SCRIPT.read_text())
    launch = ["--", "torchrun", "--standalone", "--nproc-per-node", "2", str(script)]
    # No such fault: the last rank creates the file in its fourth step, and goes on.
    launch += ["--fault", "none", "--fault-step", "3", "--fault-file", str(tmp_path / "trained")]
    best, printed = tmp_path / "best.json", tmp_path / "printed"
    export = export_of_the_small_model()
    export.write(best)
    with printed.open("w") as stream:
        running = subprocess.Popen(
            [sys.executable, "-m", "autotune", "run", "--strategy", str(best), *launch],
            cwd=ROOT,
            stdout=stream,
        )
    try:
        wait_for((tmp_path / "trained-none").exists, "a few steps of both ranks")
        assert len(processes_with("train_with_export.py")) >= 4
        running.send_signal(signal.SIGTERM)
        running.wait(timeout=START_S)
    finally:
        running.kill()
    assert f"ran with {export.strategy.id} (carried out by" in printed.read_text()
    wait_for(
        lambda: not processes_with("train_with_export.py"),
        "the end of torchrun and its ranks",
        40.0,
    )


@pytest.mark.slow
def test_a_run_prints_one_object_and_has_the_status_of_a_shell(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal\n"
        "print('from the script', flush=True)\n"
        "if os.environ['RANK'] == '0':\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
    )
    best = tmp_path / "best.json"
    export_of_the_small_model().write(best)
    launch = ["--", "torchrun", "--standalone", "--nproc-per-node", "2", str(script)]
    words = [sys.executable, "-m", "autotune", "run", "--json", "--strategy", str(best), *launch]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=START_S)
    assert json.loads(done.stdout)["exit_status"] == done.returncode == 128 + signal.SIGKILL
    assert "from the script" in done.stderr


def export_of_the_small_model() -> Export:
    shapes = {
        "0.weight": (64, 32),
        "0.bias": (64,),
        "2.weight": (64, 64),
        "2.bias": (64,),
        "3.weight": (8, 64),
        "3.bias": (8,),
    }
    workload = Workload(
        "Sequential", tuple(Variable(name, shape) for name, shape in reversed(shapes.items()))
    )
    strategy = single_bucket(workload)
    return Export(
        job_id="by-hand",
        created_at="2026-01-01T00:00:00",
        model=workload.model,
        variables=workload.variables,
        world_size=2,
        strategy=strategy,
        plan_id=plan(strategy, workload, 2).id,
        lossy=False,
        reason="for a test",
        comparison=None,
        tuned=None,
        current=None,
        predicted_s=None,
        cluster=Cluster.local(2),
        software={},
    )
