"""Scripts of accelerate, transformers and Lightning, with the real packages, are tuned as they are.

Every reason why a plan cannot cross the step must be true of the script.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from short_jobs import FEW_STEPS, JOB_S, SHORT_PROBE, with_tracking_store

from autotune.errors import LaunchError
from autotune.records import Measured
from autotune.storage.store import Store

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="needs the extra `frameworks`"
)
ROOT = Path(__file__).parents[2]
FEW_TRIALS = ("--budget-trials", "1", "--top-k", "1", "--samples-per-round", "20", *FEW_STEPS)

LAUNCHES = {
    "accelerate": (
        "accelerate launch --multi_gpu --num_processes 2 {scripts}/train_accelerate.py",
        "",
    ),
    "Trainer": (  # it clips by the global norm, so half of an exchange crosses the step
        "env TOKENIZERS_PARALLELISM=false python -m torch.distributed.run --nproc-per-node 2 "
        "{scripts}/train_trainer.py {out}",
        "",
    ),
    "Lightning": (
        "uv run torchrun --nproc-per-node 2 {scripts}/train_lightning.py 2",
        "step() is given a closure",
    ),
    "mpirun": ("mpirun -np 2 --oversubscribe python {scripts}/train_mpi.py", ""),
}
if find_spec("horovod") is not None:
    LAUNCHES["mpirun, Horovod"] = (
        "mpirun -np 2 --oversubscribe python {scripts}/train_horovod.py",
        "",
    )
SLOW = ("accelerate", "Trainer", "Lightning", "mpirun")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "autotune", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=JOB_S,
        env=environment,
    )


@pytest.mark.job
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAUNCHES]
)
def test_a_script_is_tuned_as_it_is(name: str, tmp_path: Path, tracking_store: Path) -> None:
    command, refused = LAUNCHES[name]
    words = command.format(scripts=ROOT / "tests" / "scripts", out=tmp_path / "out").split()
    jobs = with_tracking_store(tmp_path / "jobs", tracking_store)
    options = ("--json", "--job", "one", "--simulators", "linear", "--directory", str(jobs))
    done = run("tune", *options, *FEW_TRIALS, *SHORT_PROBE, "--", *words)
    assert done.returncode == 0, done.stderr
    assert Path(json.loads(done.stdout)["best"]).exists()
    with Store.open(jobs / "autotune.db") as store:
        history = store.history("one")
    assert all(isinstance(trial.outcome, Measured) for trial in history.trials)
    assert history.profiled is not None
    assert history.profiled.cross_step_refused.startswith(refused)
    assert bool(history.profiled.cross_step_refused) == bool(refused)


SPAWNING = ("--workers", "2", *FEW_TRIALS, *SHORT_PROBE, "--simulators", "linear", "--json")


@pytest.mark.slow
@pytest.mark.job
def test_ranks_that_a_script_spawns_itself_are_controlled(tmp_path, tracking_store) -> None:
    jobs = with_tracking_store(tmp_path / "jobs", tracking_store)
    script = ("python", str(ROOT / "tests" / "scripts" / "train_spawn.py"))
    done = run("tune", "--directory", str(jobs), *SPAWNING, "--", *script, "2", "1000000")
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["best"]
    again = run("run", "--strategy", best, "--", *script, "2", "20")
    assert again.returncode == 0, again.stderr
    mpirun = ("mpirun", "-np", "2", "--oversubscribe", "--allow-run-as-root", "-x", "STEPS=20")
    same_model = ROOT / "tests" / "scripts" / "train_mpi.py"
    other = run("run", "--strategy", best, "--", *mpirun, "python", str(same_model))
    assert other.returncode == 0, other.stderr


ALONE = {
    "unwrapped": "the script has made 8 steps, but its model is not wrapped",
    "sharded": "its parameters are sharded (DTensor",
    "missing": "(crash): ModuleNotFoundError: No module named 'missing_module'",
}
if not torch.backends.cuda.is_built():
    ALONE["cuda"] = "(crash): AssertionError: Torch not compiled with CUDA enabled"


ALONE_SCRIPT = ROOT / "tests" / "scripts" / "train_alone.py"


@pytest.mark.parametrize("case", ALONE)
def test_what_cannot_be_tuned_is_named_at_once(case: str, make_world) -> None:
    with pytest.raises(LaunchError) as refusal:
        make_world(case, script=ALONE_SCRIPT).model_id()
    assert str(refusal.value).count(ALONE[case]) == 1


@pytest.mark.slow
@pytest.mark.job
def test_the_command_names_it_once_and_where_the_output_is(tmp_path, tracking_store) -> None:
    jobs = with_tracking_store(tmp_path / "jobs", tracking_store)
    script = ("torchrun", "--nproc-per-node", "2", str(ALONE_SCRIPT))
    done = run("tune", "--directory", str(jobs), "--", *script, "missing")
    assert done.returncode == 1
    assert done.stderr.count(ALONE["missing"]) == 1 and "Traceback" not in done.stderr
    (log,) = re.findall(r"its output: (\S+)", done.stderr)
    assert Path(log).is_file()
