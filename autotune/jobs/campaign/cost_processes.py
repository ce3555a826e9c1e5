"""Measures the runtime's costs in as many processes at once as there are ranks on this machine."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.context import SpawnProcess
from queue import Empty
from statistics import fmean
from typing import Any

import torch

from autotune.errors import LaunchError
from autotune.jobs.campaign.runtime_costs import one_process
from autotune.jobs.campaign.step_costs import PAUSE_S, CostConditions
from runtime_rewriter.scheduling import take_round_robin

LONGEST_S = 300.0
POLL_S = 0.5


def measured_costs(
    ranks: int, emulated: bool = False, pause_s: float = PAUSE_S, longest_s: float = LONGEST_S
) -> dict[str, float]:
    """Return name of a constant -> mean over `ranks` processes that work at once.

    Raises `LaunchError` if a process fails, or if they take longer than `longest_s`.
    """
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(ranks), context.Queue()
    way = CostConditions(emulated, pause_s)
    processes = [
        context.Process(target=_process, args=(start, results, way), daemon=True)
        for _ in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        by_rank = _collected(processes, results, longest_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {name: fmean(one[name] for one in by_rank) for name in by_rank[0]}


def _process(start: Any, results: Any, way: CostConditions) -> None:
    take_round_robin()
    torch.set_num_threads(1)
    start.wait(LONGEST_S)
    results.put(one_process(way))


def _collected(
    processes: Sequence[SpawnProcess], results: Any, longest_s: float
) -> list[dict[str, float]]:
    end_s = time.monotonic() + longest_s
    by_rank: list[dict[str, float]] = []
    while len(by_rank) < len(processes):
        try:
            by_rank.append(results.get(timeout=POLL_S))
        except Empty:
            failed = [one.exitcode for one in processes if one.exitcode]
            if failed:
                raise LaunchError(
                    "processes of their own measure the runtime's costs, but one ended with exit "
                    f"status {failed[0]}; its error is printed above"
                ) from None
            if time.monotonic() > end_s:
                raise LaunchError(
                    f"the runtime's costs must be measured within {longest_s:.0f} s, but only "
                    f"{len(by_rank)} of {len(processes)} processes were done; end other work on "
                    "this machine and start again"
                ) from None
    return by_rank
