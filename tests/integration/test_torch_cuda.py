"""The runtime on CUDA tensors, two and four ranks on one GPU: every strategy trains as torch's DDP
does, over Gloo and over NCCL."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from strategy_rank import CASES, RankOutcome, check_case, enacted_alike
from test_torch_clipping import clipping
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch_plans import mixed, uniform
from torch_world import run_world

from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.ddp import PlannedDataParallel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

OVER_NCCL = {
    ranks: tuple(case for case in cases if not case.endswith("/sparse"))
    for ranks, cases in CASES.items()
}
"""By ranks. torch's DDP does not send sparse gradients over NCCL, so there is nothing to compare
with."""


def check_cases_of(rank: int, cases: tuple[str, ...]) -> dict[str, list[RankOutcome]]:
    return {case: check_case(rank, case) for case in cases}


WORLDS = [
    *(("nccl", "cuda", 2, case) for case in OVER_NCCL[2]),
    ("nccl", "cuda:0", 2, OVER_NCCL[2][0]),
    *(("nccl", "cuda:0", 4, case) for case in OVER_NCCL[4]),  # groups of some of the ranks, too
    *(("gloo", "cuda", 2, case) for case in CASES[2]),
]
LEAST_ENACTED = {2: 30, 4: 20}


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "device", "ranks", "case"), WORLDS)
def test_every_strategy_trains_as_ddp_on_a_gpu(
    backend: str, device: str, ranks: int, case: str
) -> None:
    by_rank = run_world(
        check_cases_of, ranks, (case,), timeout_s=240.0, backend=backend, device=device
    )
    assert len(enacted_alike(by_rank)) >= LEAST_ENACTED[ranks]


WITHIN = tuple(Synchronizer)
WAITS: dict[str, Callable[[nn.Module], Plan]] = {
    **{str(kind): partial(uniform, world_size=2, synchronizer=kind) for kind in WITHIN},
    "across the step": lambda module: replace(mixed(module, 2), cross_step=True),
    "norms": lambda module: clipping(mixed(module, 2)),
}


def waits_under(rank: int, name: str) -> list[str]:
    """Where the host waited for the device in two steps of a script that clips."""
    model = PlannedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    model.synchronizer.load(WAITS[name](model.module))
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(8, 64)
    waits: list[str] = []

    def note(message: object, *rest: object) -> None:
        if "synchronizing" in str(message):
            waits.append("".join(traceback.format_stack(limit=12)))

    for step in range(5):
        if step == 3:  # those before build buffers and communicators
            torch.cuda.set_sync_debug_mode("warn")
            warnings.simplefilter("always")
            warnings.showwarning = note
        optimizer.zero_grad()
        model(inputs).sum().backward()
        if name in ("norms", str(Synchronizer.ALL_REDUCE)):
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    model.synchronizer.close()
    return waits


@pytest.mark.parametrize("name", WAITS)
def test_the_host_runs_ahead_of_the_device_under_plans(name: str) -> None:
    for waits in run_world(waits_under, 2, name, backend="nccl", device="cuda"):
        assert not waits, waits[0]
