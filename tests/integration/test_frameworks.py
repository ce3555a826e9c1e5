"""Scripts of accelerate, transformers and Lightning, with the real packages, are tuned as they are.

Every reason why a plan cannot cross the step must be true of the script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from short_jobs import FEW_STEPS, SHORT_PROBE, with_tracking_store

from autotune.records import Measured
from autotune.storage.store import Store

pytest.importorskip("accelerate", reason="needs the extra `frameworks`")
ROOT = Path(__file__).parents[2]
FEW_TRIALS = ("--budget-trials", "1", "--top-k", "1", "--samples-per-round", "20", *FEW_STEPS)

LAUNCHES = {
    "accelerate": (
        "accelerate launch --multi_gpu --num_processes 2 {scripts}/train_accelerate.py",
        "",
    ),
    "Trainer": (  # without clipping, too, it scales by 1 to log the norm
        "env TOKENIZERS_PARALLELISM=false python -m torch.distributed.run --nproc-per-node 2 {scripts}/train_trainer.py {out}",
        "gradients are changed between backward() and step()",
    ),
    "Lightning": (
        "uv run torchrun --nproc-per-node 2 {scripts}/train_lightning.py 2",
        "step() is given a closure",
    ),
    "mpirun": ("mpirun -np 2 --oversubscribe python {scripts}/train_mpi.py", ""),
}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "autotune", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )


@pytest.mark.parametrize("name", LAUNCHES)
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
