"""`torch.multiprocessing.spawn` in a launched rank runs that rank's share."""

from __future__ import annotations

import pytest
import torch.multiprocessing

from autotune.errors import LaunchError
from runtime_rewriter.rank.own_ranks import spawned_ranks_controlled


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_the_rank_of_this_process_runs_in_it() -> None:
    own, ran = torch.multiprocessing.spawn, []
    with spawned_ranks_controlled():
        torch.multiprocessing.spawn(lambda rank, word: ran.append((rank, word)), ("x",), 2)
    assert ran == [(1, "x")]
    assert torch.multiprocessing.spawn is own


@pytest.mark.parametrize(
    ("processes", "join", "world"), [(4, True, "2"), (2, False, "2"), (2, True, "4")]
)
def test_other_ranks_than_the_jobs_are_refused_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch, processes: int, join: bool, world: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    fix = rf"starts {processes} ranks (.|\n)*--workers {processes}(.|\n)*torchrun --nproc-per-node"
    with spawned_ranks_controlled(), pytest.raises(LaunchError, match=fix):
        torch.multiprocessing.spawn(print, (), processes, join)
