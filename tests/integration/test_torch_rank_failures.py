"""SynchronizerGroups that disagree, die or never come: the others raise and do not hang."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch_plans import Tied, loss_of, mixed, uniform
from torch_world import BACKEND, run_world

from autotune.errors import InvalidStrategy, ModelMismatch, PlanMismatch, SynchronizationError
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel


def check_disagreement(rank: int) -> dict[str, Any]:
    model = PlannedDataParallel(Tied())
    size = dist.get_world_size()
    plans = [uniform(model.module, size), mixed(model.module, size)]
    seen: dict[str, Any] = {}
    started = time.monotonic()
    for name, wrong in (
        ("other plan", plans[1] if rank else plans[0]),
        ("no plan", plans[1] if rank else None),
        ("other model", uniform(nn.Linear(2, 2), size)),
        ("one rank's other model", uniform(nn.Linear(2, 2), size) if rank == 1 else plans[0]),
        ("other world", uniform(model.module, size + 1)),
        (
            "refused",
            replace(
                plans[0],
                messages=(replace(plans[0].messages[0], ranks=(0,)), *plans[0].messages[1:]),
            ),
        ),
    ):
        try:
            model.synchronizer.load(wrong)
        except (PlanMismatch, ModelMismatch, InvalidStrategy) as error:
            seen[name] = (type(error), str(error), [p.id for p in plans])
    seen["seconds"] = time.monotonic() - started
    model.synchronizer.load(plans[1])  # after a refusal training goes on
    loss_of(model, rank, 0).backward()
    return seen


def test_ranks_that_disagree_or_hold_a_wrong_plan_all_raise_and_can_go_on() -> None:
    for number, seen in enumerate(run_world(check_disagreement, 2)):
        kind, text, ids = seen["other plan"]
        assert kind is PlanMismatch
        assert f"rank 0 holds {ids[0]}" in text and f"rank 1 holds {ids[1]}" in text
        assert seen["no plan"][0] is PlanMismatch
        assert (
            seen["other model"][0] is ModelMismatch
            and "unknown bias, weight" in seen["other model"][1]
        )
        assert seen["one rank's other model"][0] is ModelMismatch
        assert ("rank 1 cannot load" in seen["one rank's other model"][1]) == (number == 0)
        assert seen["other world"][0] is ModelMismatch and "3 ranks" in seen["other world"][1]
        assert (
            seen["refused"][0] is InvalidStrategy and "every rank takes part" in seen["refused"][1]
        )
        assert seen["seconds"] < 20


def check_dead_rank(rank: int, when: str) -> str | None:
    model = PlannedDataParallel(Tied())
    model.synchronizer.load(mixed(model.module, dist.get_world_size()))
    loss_of(model, rank, 0).backward()
    if rank == 1:
        os._exit(0)
    try:
        if when == "load":
            model.synchronizer.load(None)
        else:
            model.module.norm.eval()
            model.broadcast_buffers = False  # DDP's own broadcast would be the first to notice
            loss_of(model, rank, 1).backward()
    except SynchronizationError as error:
        try:
            model.synchronizer.load(None)
        except SynchronizationError:
            return str(error)
    return None


@pytest.mark.parametrize(
    "when",
    [
        "load",
        pytest.param(
            "backward",
            marks=pytest.mark.skipif(
                BACKEND == "nccl", reason="torch ends the process (docs/cuda.md)"
            ),
        ),
    ],
)
def test_a_rank_that_dies_fails_the_others_instead_of_hanging_them(when: str) -> None:
    started = time.monotonic()
    answers = run_world(check_dead_rank, 3, when)
    assert answers[1] is None and all(answers[rank] for rank in (0, 2))
    assert time.monotonic() - started < 60


def check_late_rank(rank: int) -> str:
    model = nn.Linear(3, 3)
    synchronizer = attach(model, None, timeout_s=2.0, agreement_timeout_s=2.0)
    synchronizer.load(uniform(model, 2, Synchronizer.REDUCE_SCATTER_ALL_GATHER))
    if rank == 0:
        with pytest.raises(SynchronizationError, match=r"message 0 .* of bias"):
            model(torch.ones(3)).sum().backward()
        with pytest.raises(SynchronizationError, match="started again"):
            model(torch.ones(3))
    else:
        time.sleep(6.0)
    return "done"


@pytest.mark.skipif(BACKEND == "nccl", reason="torch ends the process (docs/cuda.md)")
def test_a_rank_that_never_comes_is_named_with_the_message_it_misses() -> None:
    assert run_world(check_late_rank, 2) == ["done", "done"]
