"""`autotune tune --testbed`: a real Ray cluster on shaped links, of which nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import error_output, json_output
from short_jobs import FEW_STEPS, JOB_S, SHORT_PROBE, START_S, take_interrupts, with_tracking_store
from testbed_traffic import ABLE

from autotune.export import read_export
from autotune.records import Accelerators, Measured, Network
from autotune.storage.store import Store
from autotune.testbed import bed
from autotune.workload import Library

pytestmark = [pytest.mark.skipif(not ABLE.possible, reason=ABLE.message), pytest.mark.job]

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests" / "scripts" / "train_small.py"
TRIALS = ["--budget-trials", "6", "--top-k", "3", "--samples-per-round", "40", *FEW_STEPS]
RATES = (400, 100)  # Mbit/s
AUTOTUNE = [sys.executable, "-m", "autotune"]
LAUNCH = ["--", "torchrun", "--nproc-per-node", "2", str(SMALL)]


def cluster_file(folder: Path, name: str) -> Path:
    hosts = "\n".join(
        f"  - {{name: h{index}, bandwidth: {rate}Mbit/s}}" for index, rate in enumerate(RATES)
    )
    path = folder / "cluster.yaml"
    path.write_text(f"name: {name}\nhosts:\n{hosts}\n")
    return path


def words(folder: Path, name: str, *options: str) -> list[str]:
    testbed = ["--testbed", str(cluster_file(folder, name))]
    job = ["--directory", str(folder), "--job", "bed"]
    return [*AUTOTUNE, "tune", *testbed, *job, *options, *LAUNCH, "--width", "512"]


def beds_of(name: str) -> list[bed.BedStatus]:
    return [item for item in bed.testbeds() if item.layout.name.startswith(name)]


def wait_for(condition: Callable[[], bool], event: str, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{event} did not happen within {limit_s:.0f} s"
        time.sleep(0.2)


def trials_in(folder: Path) -> int:
    if not (folder / "autotune.db").exists():
        return 0
    with Store.open(folder / "autotune.db") as store:
        return len(store.history("bed").trials) if store.jobs() else 0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("horovod") is None, reason="`make horovod` builds it")
def test_a_tensorflow_script_of_horovod_is_tuned_on_emulated_accelerators_and_runs_its_export(
    tmp_path, tracking_store
) -> None:
    with_tracking_store(tmp_path, tracking_store)

    def autotune(*words: str) -> subprocess.CompletedProcess[str]:
        commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [*AUTOTUNE, *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=JOB_S,
            env={**os.environ, "PATH": commands},
        )
        assert done.returncode == 0, done.stderr
        return done

    script = (
        "horovodrun",
        "-np",
        "2",
        "--cycle-time-ms",
        "2",
        "python",
        str(SMALL.with_name("train_horovod_tensorflow.py")),
    )
    few = ("--budget-trials", "1", "--top-k", "1", "--samples-per-round", "20", *FEW_STEPS)
    testbed = ("--testbed", str(cluster_file(tmp_path, "graphs")), "--accelerators", "emulated")
    job = ("--directory", str(tmp_path), "--job", "bed", "--search", "random", "--json")
    tuned = json.loads(autotune("tune", *testbed, *job, *few, *SHORT_PROBE, "--", *script).stdout)
    with Store.open(tmp_path / "autotune.db") as store:
        history = store.history("bed")
    assert history.profiled is not None
    assert history.profiled.workload.source == "measured"
    planned = [trial for trial in history.trials if trial.plan_id is not None]
    for trial in (history.trials[0], planned[0]):
        assert isinstance(trial.outcome, Measured), trial.outcome
        assert trial.conditions.accelerators is Accelerators.EMULATED
    assert planned[0].outcome.gradient_error == 0.0
    assert read_export(Path(tuned["best"])).library is Library.HOROVOD
    strategy, export = planned[0].request.strategy_id, tmp_path / "planned.json"
    chosen = ("--strategy", strategy, "--directory", str(tmp_path), "-o", str(export))
    autotune("export", *chosen)
    ran = autotune("run", "--strategy", str(export), "--", "env", "STEPS=3", *script)
    assert f"ran with {strategy} (carried out by" in ran.stdout
    sums = {line.partition(" sums ")[2] for line in ran.stdout.splitlines() if " sums " in line}
    assert len(sums) == 1, "all ranks hold the same variables"


@pytest.mark.slow
def test_ctrl_c_takes_the_testbed_down_and_resume_builds_it_again(tmp_path, tracking_store) -> None:
    """The whole job states everywhere what was emulated, and leaves nothing."""
    with_tracking_store(tmp_path, tracking_store)
    options = ("--search", "random", "--accelerators", "emulated", *TRIALS)
    options += ("--start-timeout", f"{START_S:.0f}s")
    process = subprocess.Popen(
        words(tmp_path, "interrupted", *options),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_interrupts,
    )
    try:
        wait_for(lambda: trials_in(tmp_path) >= 2, "the second trial", START_S)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=START_S)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert beds_of("interrupted") == []
    before = trials_in(tmp_path)
    resume = [*AUTOTUNE, "tune", "--resume", "bed", "--directory", str(tmp_path), "--json"]
    done = subprocess.run(resume, cwd=ROOT, capture_output=True, text=True, timeout=JOB_S)
    assert done.returncode == 0, done.stderr
    assert trials_in(tmp_path) > before and beds_of("interrupted") == []
    result = json.loads(done.stdout)
    for printed in (error, done.stderr):
        assert "[emulated network, emulated accelerators]" in printed
    with Store.open(tmp_path / "autotune.db") as store:
        history = store.history("bed")
    assert {(t.conditions.network, t.conditions.accelerators) for t in history.trials} == {
        (Network.EMULATED, Accelerators.EMULATED)
    }
    assert history.profiled is not None
    slowest = min(RATES) * 1e6 / 8
    ring = history.profiled.cluster.fit("all_reduce", 2)
    assert ring is not None
    # two ranks: the whole message passes the slow link once
    assert 0.7 * slowest < 2**22 / ring.seconds(2**22) < 1.1 * slowest
    report = Path(result["report"]).read_text()
    assert "The network is emulated" in report and "Accelerators are emulated" in report
    assert read_export(Path(result["best"])).conditions.network is Network.EMULATED
    assert result["unsent_tracking_items"] == 0


def test_after_kill_9_of_the_driver_down_removes_the_namespaces_and_all_processes_in_them(
    tmp_path, capsys
) -> None:
    command = words(tmp_path, "killed", "--search", "random", *TRIALS)
    errors = tmp_path / "stderr"
    with errors.open("w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stderr=stream)

    def ray_runs() -> bool:
        assert process.poll() is None, errors.read_text()
        processes = [item.processes for item in beds_of("killed")]
        return any(len(hosts) == 2 and all(hosts) for hosts in processes)

    try:
        wait_for(ray_runs, "Ray on both hosts", START_S)
    finally:
        process.kill()
        process.wait(timeout=START_S)
    (left,) = beds_of("killed")
    assert left.left_over
    pids = [pid for host in left.processes for pid in host]
    assert left.layout.name in json_output(capsys, "testbed", "down")["removed"]
    assert beds_of("killed") == []
    paths = [Path(f"/proc/{pid}") for pid in pids]
    wait_for(lambda: not any(path.exists() for path in paths), "the end of Ray's processes", 20)


def test_a_testbed_excludes_other_clusters(tmp_path, capsys) -> None:
    for option, message in (
        ("--address", "leave out one of them"),
        ("--cluster", "leave out --cluster"),
    ):
        value = "127.0.0.1:6379" if option == "--address" else str(tmp_path / "cluster.yaml")
        command = words(tmp_path, "never", option, value)
        assert message in error_output(capsys, *command[len(AUTOTUNE) :])
    scaled = error_output(capsys, "tune", "--byte-scale", "4", *LAUNCH)
    assert "only a testbed scales links" in scaled
