"""Ranks that disagree, die or never come: the others raise and do not hang."""

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
from torch_world import BACKEND, default_store, run_world

from autotune.errors import InvalidStrategy, ModelMismatch, PlanMismatch, SynchronizationError
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel


def check_disagreement(rank: int) -> dict[str, Any]:
    PlannedDataParallel.agreement_timeout_s = 60.0
    model = PlannedDataParallel(Tied())
    size = dist.get_world_size()
    plans = [uniform(model.module, size), mixed(model.module, size)]
    partial = replace(plans[0].messages[0], ranks=(0,))
    errors: dict[str, Any] = {}
    started = time.monotonic()
    for name, wrong in (
        ("other plan", plans[1] if rank else plans[0]),
        ("no plan", plans[1] if rank else None),
        ("other model", uniform(nn.Linear(2, 2), size)),
        ("one rank's other model", uniform(nn.Linear(2, 2), size) if rank == 1 else plans[0]),
        ("other world", uniform(model.module, size + 1)),
        ("refused", replace(plans[0], messages=(partial, *plans[0].messages[1:]))),
    ):
        try:
            model.synchronizer.load(wrong)
        except (PlanMismatch, ModelMismatch, InvalidStrategy) as error:
            errors[name] = (type(error), str(error), [p.id for p in plans])
    model.synchronizer.residuals.in_use = rank == 1
    try:
        model.synchronizer.load(plans[0])
    except PlanMismatch as error:
        errors["residuals"] = str(error)
    model.synchronizer.residuals.in_use = False
    errors["seconds"] = time.monotonic() - started
    model.synchronizer.load(plans[1])  # after a refusal training goes on
    loss_of(model, rank, 0).backward()
    return errors


def test_ranks_with_different_or_wrong_plans_all_raise_and_can_continue() -> None:
    for rank, errors in enumerate(run_world(check_disagreement, 2)):
        kind, text, ids = errors["other plan"]
        assert kind is PlanMismatch
        assert f"rank 0 holds {ids[0]}" in text and f"rank 1 holds {ids[1]}" in text
        assert errors["no plan"][0] is PlanMismatch
        assert f"rank 0 holds {ids[0]}, rank 1 holds {ids[0]} and residuals" in errors["residuals"]
        assert errors["other model"][0] is ModelMismatch
        assert "unknown bias, weight" in errors["other model"][1]
        assert errors["one rank's other model"][0] is ModelMismatch
        assert ("rank 1 cannot load" in errors["one rank's other model"][1]) == (rank == 0)
        assert errors["other world"][0] is ModelMismatch and "3 ranks" in errors["other world"][1]
        assert errors["refused"][0] is InvalidStrategy
        assert "every rank takes part" in errors["refused"][1]
        assert errors["seconds"] < 50, "nobody waited for a timeout"


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


NOT_NCCL = pytest.mark.skipif(BACKEND == "nccl", reason="torch ends the process (docs/cuda.md)")


@pytest.mark.parametrize("when", ["load", pytest.param("backward", marks=NOT_NCCL)])
def test_a_rank_that_dies_fails_the_others_instead_of_hanging_them(when: str) -> None:
    started = time.monotonic()
    answers = run_world(check_dead_rank, 3, when)
    assert answers[1] is None and all(answers[rank] for rank in (0, 2))
    assert time.monotonic() - started < 60


def check_late_rank(rank: int) -> str:
    model = nn.Linear(3, 3)
    synchronizer = attach(model, None, timeout_s=2.0, agreement_timeout_s=60.0)
    synchronizer.load(uniform(model, 2, Synchronizer.REDUCE_SCATTER_ALL_GATHER))
    if rank == 0:
        with pytest.raises(SynchronizationError, match=r"message 0 .* of bias"):
            model(torch.ones(3)).sum().backward()
        with pytest.raises(SynchronizationError, match="started again"):
            model(torch.ones(3))
        default_store().set("raised", "")
    else:
        default_store().wait(["raised"])
    return "done"


@NOT_NCCL
def test_a_rank_that_never_comes_is_named_with_the_message_it_misses() -> None:
    assert run_world(check_late_rank, 2) == ["done", "done"]
