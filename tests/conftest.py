"""Its presence puts this folder on the import path, so that tests of every kind share `synthetic_job`; and the order of the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LONGEST_FIRST = (
    "test_tune_command",
    "test_testbed_tune",
    "test_ray_address",
    "test_null_experiment",
    "test_apply",
    "test_tracking",
    "test_interrupts",
    "test_world_faults",
    "test_profile_command",
    "test_ray_world",
    "test_recorder",
    "test_torch_memory",
    "test_recorded_traces",
    "test_examples_train",
    "test_testbed_lifecycle",
    "test_testbed_network",
    "test_every_strategy",
    "test_compressed_training",
    "test_probe_command",
    "test_emulated_world",
    "test_measurement",
    "test_tuner",
    "test_torch_hooks",
    "test_torch_rank_failures",
    "test_torch_emulation",
    "test_reference_traces",
    "test_ranking_benchmark",
)
"""Files that run for half a minute or more: begun last, one of them would keep one process busy long after the other is done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session")
def tracking_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store in SQLite without any run: to make one takes MLflow five seconds of computing."""
    path = tmp_path_factory.mktemp("tracking") / "mlflow.db"
    code = "import sys, mlflow; mlflow.MlflowClient(sys.argv[1]).search_experiments()"
    subprocess.run(
        [sys.executable, "-c", code, f"sqlite:///{path}"],
        check=True,
        capture_output=True,
        timeout=120,
        cwd=path.parent,
    )
    return path
