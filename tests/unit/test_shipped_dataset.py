"""The trials and recordings in the repository are whole: sums, cards and rows agree."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from autotune.dataset.folder import read_domain

DATASETS = Path(__file__).parents[2] / "datasets"
RECORDED = DATASETS / "gpu_traces"  # steps and traces of single models, no trials
SUMS = sorted(DATASETS.glob("*/*/SHA256SUMS"))
SHIPPED = [path.parent for path in SUMS if path.parents[1] != RECORDED]


def name_of(folder: Path) -> str:
    return str(folder.relative_to(DATASETS))


@pytest.mark.parametrize("folder", SHIPPED, ids=name_of)
def test_a_shipped_domain_reads_and_its_card_is_true(folder: Path):
    domain = read_domain(folder)  # raises if a sum or a size is wrong
    card = json.loads((folder / "card.json").read_text())
    assert domain.name == folder.name == card["name"]
    assert card["candidates"] == len(domain.candidates)
    assert card["references"] == len(domain.references)
    assert sorted(trial.number for trial in domain.trials) == list(range(len(domain.trials)))
    assert {trial.session for trial in domain.trials} <= {session.id for session in domain.sessions}


@pytest.mark.parametrize("folder", sorted(RECORDED.glob("*/")), ids=name_of)
def test_recordings_match_their_checksums(folder: Path):
    lines = [line.split("  ", 1) for line in (folder / "SHA256SUMS").read_text().splitlines()]
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "SHA256SUMS"]
    sums = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sums.items()}
    assert {path: digest for digest, path in lines} == digests
