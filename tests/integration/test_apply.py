"""`autotune.apply`, the one line in a training script: same bits as DDP, tuned by `autotune tune`, checked before use."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autotune
from autotune.errors import InvalidInput
from autotune.export import read_export

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "train_apply.py"


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def digests(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert done.returncode == 0, done.stderr
    found = re.findall(r"digest \d ([0-9a-f]{64})", done.stdout)
    assert len(found) == 2
    return set(found)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The script tuned through its `apply` line; the export of a strategy that was tried."""
    directory = tmp_path_factory.mktemp("jobs")
    settings = ["--search", "random", "--budget-trials", "4", "--timed-steps", "3", "--ab-pairs", "6", "--directory", str(directory)]
    launch = ["--", "torchrun", "--nproc-per-node", "2", str(SCRIPT)]
    command = [sys.executable, "-m", "autotune", "tune", "--json", "--job", "applied", *settings, *launch]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    tried = json.loads(done.stdout)["decision"]["best_candidate_id"]
    path = directory / "chosen.json"
    export = [sys.executable, "-m", "autotune", "export", "--strategy", tried, "--directory", str(directory), "-o", str(path)]
    assert subprocess.run(export, cwd=ROOT, capture_output=True, timeout=60).returncode == 0
    return path, tried


def test_an_applied_export_trains_to_the_same_bits_as_ddp(tuned) -> None:
    path, tried = tuned
    assert read_export(path).strategy.id == tried
    with_export = digests(torchrun("--steps", "5", "--strategy", str(path)))
    without = digests(torchrun("--steps", "5"))
    with_ddp = digests(torchrun("--steps", "5", "--with-ddp"))
    assert with_export == without == with_ddp
    assert len(with_ddp) == 1


def test_another_model_is_refused_with_the_difference_named(tuned) -> None:
    path, _ = tuned
    refused = torchrun("--steps", "5", "--width", "48", "--strategy", str(path))
    assert refused.returncode != 0
    assert "ModelMismatch" in refused.stderr
    assert "(64, 32)" in refused.stderr and "(48, 32)" in refused.stderr


def test_an_edited_export_is_refused(tuned, tmp_path) -> None:
    path, _ = tuned
    data = json.loads(path.read_text())
    data["world_size"] = 3
    (tmp_path / "edited.json").write_text(json.dumps(data))
    with pytest.raises(InvalidInput, match="was changed after autotune wrote it"):
        read_export(tmp_path / "edited.json")
    replace(read_export(path), reason="written again").write(tmp_path / "again.json")
    assert read_export(tmp_path / "again.json").reason == "written again"


def test_apply_without_a_process_group_names_the_fix() -> None:
    with pytest.raises(InvalidInput, match=r"call torch\.distributed\.init_process_group before it"):
        autotune.apply(torch.nn.Linear(2, 2))
