"""Short jobs for tests: few steps, a short probe, and a copied tracking store."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from autotune.workload import Variable, Workload

START_S = 300.0
"""Patience with a start of Ray or of ranks, which took more than two minutes when it was busy."""
JOB_S = 500.0
"""Longest duration of a whole job."""
SHORT_PROBE = ("--probe-time", "1s", "--start-timeout", f"{START_S:.0f}s")
FEW_STEPS = ("--warmup-steps", "1", "--timed-steps", "3", "--most-steps", "3", "--ab-pairs", "6")


def with_tracking_store(directory: Path, empty_store: Path) -> Path:
    """The directory for jobs, with a copy of the empty MLflow store for their runs."""
    directory.mkdir(exist_ok=True)
    shutil.copy(empty_store, directory / "mlflow.db")
    return directory


def take_interrupts() -> None:
    """For `preexec_fn`: undo that shells start background jobs with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def small_model(*, emulated: bool = False) -> Workload:
    """The model of `train_small.py`; if `emulated`, with a step of 0.2 s, far above the real."""
    shapes = {"0.weight": (64, 32), "0.bias": (64,), "2.weight": (64, 64), "2.bias": (64,)}
    shapes |= {"3.weight": (8, 64), "3.bias": (8,)}
    in_ready_order = list(reversed(shapes.items()))
    if not emulated:
        return Workload("Sequential", tuple(Variable(*item) for item in in_ready_order))
    variables = tuple(
        Variable(name, shape, ready_s=0.02 * number)
        for number, (name, shape) in enumerate(in_ready_order, 1)
    )
    return Workload(
        "Sequential", variables, forward_s=0.05, backward_s=0.13, update_s=0.02, source="measured"
    )
