"""The trials that lie in the repository are whole: sums, cards and rows agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.dataset.folder import read_domain

DATASETS = Path(__file__).parents[2] / "datasets"
SHIPPED = sorted(path.parent for path in DATASETS.glob("*/*/SHA256SUMS"))


@pytest.mark.parametrize("folder", SHIPPED, ids=[str(folder.relative_to(DATASETS)) for folder in SHIPPED])
def test_a_shipped_domain_reads_and_its_card_tells_the_truth(folder: Path) -> None:
    domain = read_domain(folder)  # raises where a sum or a size is wrong
    card = json.loads((folder / "card.json").read_text())
    assert domain.name == folder.name == card["name"]
    assert (card["candidates"], card["references"]) == (len(domain.candidates), len(domain.references))
    assert sorted(trial.number for trial in domain.trials) == list(range(len(domain.trials)))
    assert {trial.session for trial in domain.trials} <= {session.id for session in domain.sessions}
