"""The hooks engine against torch's own DDP, in real processes over gloo."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_pair import assert_close, gradients, pair
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_plans import Tied, loss_of, mixed, uniform
from torch_world import run_world

from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.numerics import tolerance_of


def check_every_primitive(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(Tied())
    size = dist.get_world_size()
    for kind, compressor, partitioned in itertools.product(
        Synchronizer, (Compressor.NONE, Compressor.FP16, Compressor.BF16), (False, True)
    ):
        plan = uniform(mine.module, size, kind, compressor, partitioned)
        mine.synchronizer.load(plan)
        for model in (theirs, mine):
            torch.manual_seed(rank)
            model.zero_grad()
            loss_of(model, rank, 1).backward()
        if compressor is Compressor.NONE:
            assert_close(gradients(mine), gradients(theirs))
        for a, b in zip(gradients(mine), gradients(theirs), strict=True):
            largest = torch.tensor(float(b.abs().amax()))
            assert (
                float((a - b).abs().amax())
                <= 4 * tolerance_of("float32", compressor, size) * float(largest) + 1e-6
            )
            first = a.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, a), "every rank holds the same bits"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_synchronizer_compressor_and_partition_averages_the_gradients(size: int) -> None:
    run_world(check_every_primitive, size)


def check_switching(rank: int, arguments: dict[str, Any]) -> None:
    """12 steps, each of two micro-batches with `no_sync`, another synchronization at every step."""
    size = dist.get_world_size()
    for make in (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(
            p, 0.01, eps=1e-3
        ),  # the bias before BatchNorm has noise for a gradient: do not blow it up
    ):
        torch.manual_seed(1)
        theirs, mine = pair(Tied(), **arguments)
        plans: list[Plan | None] = [
            mixed(mine.module, size),
            None,
            uniform(mine.module, size, Synchronizer.PARAMETER_SERVER, partitioned=True),
            None,
            None,
            uniform(mine.module, size),
        ]
        for model in (theirs, mine):
            optimizer = make(model.parameters())
            for step in range(12):
                if isinstance(model, PlannedDataParallel):
                    model.synchronizer.load(plans[step % len(plans)])
                torch.manual_seed(10 * step + rank)
                optimizer.zero_grad(set_to_none=step % 3 != 0)
                if step % 2 and not arguments.get("static_graph"):
                    with model.no_sync():
                        loss_of(model, rank, 2 * step).backward()
                loss_of(model, rank, 2 * step + 1).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        assert_close(list(mine.parameters()), list(theirs.parameters()))
        assert_close([b.float() for b in mine.buffers()], [b.float() for b in theirs.buffers()])


@pytest.mark.parametrize(
    "option", ["", "gradient_as_bucket_view", "find_unused_parameters", "static_graph"]
)
def test_switching_between_ddp_and_plans_every_step_trains_like_ddp(option: str) -> None:
    run_world(check_switching, 2, {option: True} if option else {})


def test_switching_on_four_ranks_trains_like_ddp_up_to_the_order_of_sums() -> None:
    run_world(check_switching, 4, {})


class Steps:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_boundary(self, now_s: float, clean: bool) -> None:
        self.events.append(("boundary", clean))

    def on_backward_end(self) -> None:
        self.events.append("backward")


def check_boundaries(rank: int, kind: Synchronizer | None) -> list[Any]:
    model = PlannedDataParallel(Tied())
    if kind is not None:
        model.synchronizer.load(uniform(model.module, 2, kind))
    steps = Steps()
    model.synchronizer.listeners.append(steps)
    for step in range(4):
        with model.no_sync():
            loss_of(model, rank, step).backward()
        torch.autograd.grad(
            loss_of(model, rank, step), model.module.gain
        )  # a penalty, say: no end of a step
        loss_of(model, rank, step).backward()
        if step == 1:
            model.eval()
            with torch.no_grad():
                loss_of(model, rank, step)
            model.train()
        if step == 2:
            model.eval()
            loss_of(model, rank, step)  # validation whose author forgot no_grad
            model.train()
    return steps.events


@pytest.mark.parametrize(
    "kind", [None, Synchronizer.ALL_REDUCE, Synchronizer.REDUCE_SCATTER_ALL_GATHER]
)
def test_a_step_is_from_the_first_forward_to_the_next_and_validation_makes_it_unclean(
    kind: Synchronizer | None,
) -> None:
    step = ["backward", ("boundary", True)]
    for events in run_world(check_boundaries, 2, kind):
        assert events == [*step, "backward", ("boundary", False), *step, "backward"]


def check_attach(rank: int) -> None:
    torch.manual_seed(rank)  # rank 0's start counts
    theirs = DistributedDataParallel(Tied())
    torch.manual_seed(rank)
    mine = Tied()
    synchronizer = attach(mine, None)
    synchronizer.load(mixed(mine, 2))
    for model, no_sync in ((theirs, theirs.no_sync), (mine, synchronizer.no_sync)):
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        for step in range(6):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            with no_sync():
                loss_of(model, rank, step).backward()
            loss_of(model, rank, step + 50).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                loss_of(model, rank, step)
            model.train()
    assert_close(list(mine.parameters()), list(theirs.parameters()))
    assert_close([b.float() for b in mine.buffers()], [b.float() for b in theirs.buffers()])
    synchronizer.close()
    assert not mine._forward_pre_hooks and not mine._forward_hooks
    before = mine.gain.grad.clone()
    mine(torch.tensor([rank, rank + 1])).sum().backward()
    assert not torch.equal(before, mine.gain.grad)


def test_an_attached_plain_module_trains_like_ddp_and_is_left_clean() -> None:
    run_world(check_attach, 2)


def check_subgroup(rank: int) -> None:
    torch.manual_seed(0)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    module = Tied()
    theirs = DistributedDataParallel(copy.deepcopy(module), process_group=group)
    mine = PlannedDataParallel(module, process_group=group)
    mine.synchronizer.load(mixed(module, 2))
    for model in (theirs, mine):
        torch.manual_seed(rank)
        loss_of(model, rank, 0).backward()
    for a, b in zip(gradients(mine), gradients(theirs), strict=True):
        assert torch.equal(a, b)


def test_a_process_group_of_some_ranks_synchronizes_them() -> None:
    run_world(check_subgroup, 4)


def test_plans_that_cannot_be_enacted_are_refused_before_any_step() -> None:
    model = Tied()
    plan = uniform(model, 2)
    message = plan.messages[0]
    assert refusal_reason(plan) is None
    assert refusal_reason(replace(plan, ring_order=(1, 0))) is None
    assert "ring_order must name each of the 2 ranks once" in str(
        refusal_reason(replace(plan, ring_order=(1, 1)))
    )
    for change, word in (
        (
            {"compressor": Compressor.INT8, "dtype": "bfloat16"},
            "int8 needs float32 or float64 gradients, but these are bfloat16",
        ),
        (
            {"compressor": Compressor.TOP_K, "ratio": 0.1, "dtype": "complex64"},
            "top_k needs float32 or float64",
        ),
        (
            {"compressor": Compressor.POWER_SGD, "rank": 1, "sparse": SparseHandling.ALL_GATHER},
            "or set sparse = dense",
        ),
        ({"ranks": (0,)}, "every rank"),
        (
            {"sparse": SparseHandling.ALL_GATHER},
            "travel alone, whole or cut along axis 0, but the message holds 2 slice(s)",
        ),
        (
            {"sparse": SparseHandling.GATHER_SCATTER, "slices": message.slices[:1]},
            "needs parameter_server, but the synchronizer is all_reduce",
        ),
    ):
        bad = replace(plan, messages=(replace(message, **change), *plan.messages[1:]))
        assert word in str(refusal_reason(bad)) and str(refusal_reason(bad)).startswith(
            "message 0 (all_reduce of "
        )


def test_a_module_without_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one parameter"):
        GradientSynchronizer(nn.ReLU())
