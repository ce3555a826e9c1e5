"""Scripts that start their own ranks by `torch.multiprocessing.spawn`.

Our launcher has already started one process per rank. So in each of them `spawn(fn, args, n)` runs
`fn` for the rank of this process, as the process that it would have started does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.multiprocessing

from autotune.errors import LaunchError


@contextmanager
def spawned_ranks_controlled() -> Iterator[None]:
    """Inside, `torch.multiprocessing.spawn` runs this rank's share; always restored.

    It raises `LaunchError` if it starts another number of processes than this host has ranks, does
    not wait for them, or if there are several hosts.
    """
    places: tuple[Any, ...] = (torch.multiprocessing, torch.multiprocessing.spawn.__globals__)
    own = torch.multiprocessing.spawn
    torch.multiprocessing.spawn = _run_own_rank
    places[1]["spawn"] = _run_own_rank
    try:
        yield
    finally:
        torch.multiprocessing.spawn = own
        places[1]["spawn"] = own


def _run_own_rank(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    ranks, world = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if not join or ranks != world or nprocs != ranks:
        raise LaunchError(
            f"the script starts {nprocs} ranks by torch.multiprocessing.spawn, but this job has "
            f"{world} ranks, {ranks} of them on this host; give {nprocs} workers on one host "
            f"(--workers {nprocs}), or let torchrun start the script, which then takes its rank "
            "from the environment: autotune tune -- torchrun --nproc-per-node N train.py"
        )
    fn(int(os.environ["LOCAL_RANK"]), *args)
