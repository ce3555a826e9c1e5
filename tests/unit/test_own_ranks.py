"""`torch.multiprocessing.spawn` in a launched rank runs that rank's share."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch.multiprocessing

from autotune.errors import LaunchError
from runtime_rewriter.rank.own_ranks import spawned_ranks_controlled

RAN: list[tuple[int, str, str]] = []


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def note(rank: int, word: str) -> None:
    RAN.append((rank, word, os.environ["SETTING"]))
    os.environ["SETTING"] = "the rank's"


def test_the_rank_of_this_process_runs_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.multiprocessing.spawn
    monkeypatch.setenv("SETTING", "")
    with spawned_ranks_controlled():
        os.environ["SETTING"] = "the parent's"
        torch.multiprocessing.spawn(note, ("x",), 1)
    assert RAN == [(0, "x", "the parent's")]
    assert os.environ["SETTING"] == "the parent's"
    assert torch.multiprocessing.spawn is own


def test_what_only_a_new_process_inherits_is_refused() -> None:
    fix = r"Lock objects should only be shared (.|\n)*let torchrun start the script"
    lock = multiprocessing.get_context("spawn").Lock()
    with spawned_ranks_controlled(), pytest.raises(LaunchError, match=fix):
        torch.multiprocessing.spawn(note, (lock,), 1)


@pytest.mark.parametrize(
    ("processes", "join", "world"), [(4, True, "2"), (2, False, "2"), (2, True, "4")]
)
def test_other_ranks_than_the_jobs_are_refused_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch, processes: int, join: bool, world: str
) -> None:
    launched = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": world}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    fix = rf"starts {processes} ranks (.|\n)*--workers {processes}(.|\n)*torchrun --nproc-per-node"
    with spawned_ranks_controlled(), pytest.raises(LaunchError, match=fix):
        torch.multiprocessing.spawn(print, (), processes, join)
