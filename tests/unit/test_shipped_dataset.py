"""The trials and recordings in the repository are whole: sums, cards and rows agree."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from autotune.dataset.folder import read_domain

DATASETS = Path(__file__).parents[2] / "datasets"
RECORDED = DATASETS / "gpu_traces"  # steps and traces of single models, no trials
SHIPPED = sorted(
    path.parent for path in DATASETS.glob("*/*/SHA256SUMS") if path.parent.parent != RECORDED
)


@pytest.mark.parametrize(
    "folder", SHIPPED, ids=[str(folder.relative_to(DATASETS)) for folder in SHIPPED]
)
def test_a_shipped_domain_reads_and_its_card_tells_the_truth(folder: Path) -> None:
    domain = read_domain(folder)  # raises where a sum or a size is wrong
    card = json.loads((folder / "card.json").read_text())
    assert domain.name == folder.name == card["name"]
    assert (card["candidates"], card["references"]) == (
        len(domain.candidates),
        len(domain.references),
    )
    assert sorted(trial.number for trial in domain.trials) == list(range(len(domain.trials)))
    assert {trial.session for trial in domain.trials} <= {session.id for session in domain.sessions}


@pytest.mark.parametrize("folder", sorted(RECORDED.glob("*/")), ids=lambda folder: folder.name)
def test_recordings_have_the_sums_they_came_with(folder: Path) -> None:
    lines = [line.split("  ", 1) for line in (folder / "SHA256SUMS").read_text().splitlines()]
    listed = {path: digest for digest, path in lines}
    found = {
        str(path.relative_to(folder)): path
        for path in folder.rglob("*")
        if path.is_file() and path.name != "SHA256SUMS"
    }
    assert listed == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()
    }
