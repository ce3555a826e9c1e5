"""What makes the jobs of tests short: few steps, a short probe, and a tracking store that was made once."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

SHORT_PROBE = ("--probe-time", "1s")
FEW_STEPS = ("--timed-steps", "3", "--most-steps", "3", "--ab-pairs", "6")


def with_tracking_store(directory: Path, made: Path) -> Path:
    """The directory of jobs to be, with a copy of the empty MLflow store in which their runs go."""
    directory.mkdir(exist_ok=True)
    shutil.copy(made, directory / "mlflow.db")
    return directory


def take_interrupts() -> None:
    """For `preexec_fn`: a shell starts its background jobs with SIGINT ignored, and these tests may run in one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
