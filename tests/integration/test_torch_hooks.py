"""The hooks engine against torch's own DDP, in real processes over gloo."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_pair import assert_close, assert_same_state, gradients, pair
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_plans import Tied, loss_of, mixed, uniform
from torch_world import on_ranks, seeded

from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.exchange.transfer import BATCHED_BYTES
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.tolerances import tolerance_of

EXACT_OR_CAST = (Compressor.NONE, Compressor.FP16, Compressor.BF16)


@on_ranks(1, 2, 4)
def test_every_synchronizer_compressor_and_partition_averages_the_gradients(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(Tied())
    size = dist.get_world_size()
    torch.manual_seed(rank)
    loss_of(theirs, rank, 1).backward()
    for kind, compressor, cut in itertools.product(Synchronizer, EXACT_OR_CAST, (False, True)):
        mine.synchronizer.load(uniform(mine.module, size, kind, compressor, cut))
        torch.manual_seed(rank)
        mine.zero_grad()
        loss_of(mine, rank, 1).backward()
        if compressor is Compressor.NONE:
            assert_close(gradients(mine), gradients(theirs))
        tolerance = 4 * tolerance_of("float32", compressor, size)
        for a, b in zip(gradients(mine), gradients(theirs), strict=True):
            assert float((a - b).abs().amax()) <= tolerance * float(b.abs().amax()) + 1e-6
            first = a.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, a), "every rank holds the same bits"


@on_ranks(2)
def test_large_and_small_gradients_of_one_message_are_averaged_as_ddp_does(rank: int) -> None:
    """Large ones are packed alone, small ones together."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 200), nn.Linear(200, 200), nn.Linear(200, 5))
    sizes = [4 * parameter.numel() for parameter in module.parameters()]
    # The larger of the two parts that `uniform` cuts is large, too.
    assert min(sizes) < BATCHED_BYTES < max(sizes) / 2
    theirs, mine = pair(module)
    for groups, partitioned in itertools.product((1, 2), (False, True)):
        mine.synchronizer.load(uniform(module, 2, partitioned=partitioned, groups=groups))
        for step in range(2):
            inputs = torch.randn(4, 3, generator=seeded(10 * rank + step))
            for model in (theirs, mine):
                model.zero_grad()
                model(inputs).square().sum().backward()
            assert_close(gradients(mine), gradients(theirs))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """`eps` avoids scaling up noise, which is all that the bias before BatchNorm gets."""
    return torch.optim.AdamW(parameters, 0.01, eps=1e-3)


def check_switching(rank: int, arguments: dict[str, Any]) -> None:
    """12 steps, each of two micro-batches with `no_sync`, another synchronization at every step.

    The optimizer has nothing to do with the options of DDP: with one, a single optimizer trains.
    """
    size = dist.get_world_size()
    for make in (adam,) if arguments else (sgd, adam):
        torch.manual_seed(1)
        theirs, mine = pair(Tied(), **arguments)
        module = mine.module
        served = uniform(module, size, Synchronizer.PARAMETER_SERVER, partitioned=True)
        plans = [mixed(module, size), None, served, None, None, uniform(module, size)]
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
        assert_same_state(mine, theirs)
        mine.synchronizer.close()


@on_ranks(2, each=("", "gradient_as_bucket_view", "find_unused_parameters", "static_graph"))
def test_switching_between_ddp_and_plans_every_step_trains_like_ddp(rank: int, option: str) -> None:
    check_switching(rank, {option: True} if option else {})


@pytest.mark.slow
@on_ranks(4)
def test_switching_on_four_ranks_trains_like_ddp_up_to_the_order_of_sums(rank: int) -> None:
    check_switching(rank, {})


class Steps:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_boundary(self, now_s: float, clean: bool) -> None:
        self.events.append(("boundary", clean))

    def on_backward_end(self) -> None:
        self.events.append("backward")


RS = Synchronizer.REDUCE_SCATTER_ALL_GATHER


@on_ranks(2)
def test_a_step_ends_at_the_next_forward_pass_and_validation_makes_it_unclean(rank: int) -> None:
    for kind in (None, Synchronizer.ALL_REDUCE, RS):
        model = PlannedDataParallel(Tied())
        if kind is not None:
            model.synchronizer.load(uniform(model.module, 2, kind))
        steps = Steps()
        model.synchronizer.listeners.append(steps)
        for step in range(4):
            if step < 3:  # DDP synchronizes this pass, too, behind a forward pass that has none
                with model.no_sync():
                    loss_of(model, rank, step).backward()
            # A penalty, say, does not end a step.
            torch.autograd.grad(loss_of(model, rank, step), model.module.gain)
            loss_of(model, rank, step).backward()
            if step in (1, 2):
                model.eval()
                with torch.set_grad_enabled(step == 2):  # as if its author forgot no_grad
                    loss_of(model, rank, step)
                model.train()
        clean = ["backward", ("boundary", True)]
        assert steps.events == [*clean, "backward", ("boundary", False), *clean, "backward"], kind


@on_ranks(2)
def test_an_attached_plain_module_trains_like_ddp_and_is_left_clean(rank: int) -> None:
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
    assert_same_state(mine, theirs)
    synchronizer.close()
    assert not mine._forward_pre_hooks and not mine._forward_hooks
    before = mine.gain.grad.clone()
    mine(torch.tensor([rank, rank + 1])).sum().backward()
    assert not torch.equal(before, mine.gain.grad)


@on_ranks(4)
def test_a_process_group_of_some_ranks_synchronizes_them(rank: int) -> None:
    torch.manual_seed(0)
    dist.new_group([0])  # the members of a group are then in different numbers of groups
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    theirs, mine = pair(Tied(), process_group=groups[rank // 2])
    mine.synchronizer.load(mixed(mine.module, 2))
    for model in (theirs, mine):
        torch.manual_seed(rank)
        loss_of(model, rank, 0).backward()
    for a, b in zip(gradients(mine), gradients(theirs), strict=True):
        assert torch.equal(a, b)


def test_plans_that_cannot_be_enacted_are_refused_before_any_step() -> None:
    model = Tied()
    plan = uniform(model, 2)
    message = plan.messages[0]
    assert refusal_reason(plan) is None
    assert refusal_reason(replace(plan, ring_order=(1, 0))) is None
    rule = "ring_order must name each of the 2 ranks once"
    assert rule in str(refusal_reason(replace(plan, ring_order=(1, 1))))
    rows = SparseHandling.ALL_GATHER
    whole_rows = {"sparse": rows}
    bfloat16 = {"compressor": Compressor.INT8, "dtype": "bfloat16"}
    complex64 = {"compressor": Compressor.TOP_K, "ratio": 0.1, "dtype": "complex64"}
    factored_rows = {"compressor": Compressor.POWER_SGD, "rank": 1, "sparse": rows}
    one_slice = {"sparse": SparseHandling.GATHER_SCATTER, "slices": message.slices[:1]}
    rules: dict[str, dict[str, Any]] = {
        "int8 needs float32 or float64 gradients, but these are bfloat16": bfloat16,
        "top_k needs float32 or float64": complex64,
        "or set sparse = dense": factored_rows,
        "every rank": {"ranks": (0,)},
        "travel alone, whole or cut along axis 0, but the message holds 2 slice(s)": whole_rows,
        "needs parameter_server or direct_exchange, but the synchronizer is all_reduce": one_slice,
    }
    for rule, change in rules.items():
        bad = replace(plan, messages=(replace(message, **change), *plan.messages[1:]))
        reason = str(refusal_reason(bad))
        assert rule in reason and reason.startswith("message 0 (all_reduce of ")


def test_a_module_without_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one parameter"):
        GradientSynchronizer(nn.ReLU())
