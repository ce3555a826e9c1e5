"""The hooks engine against torch's own DDP, in real processes over gloo."""

from __future__ import annotations

import copy
import itertools
import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_plans import Tied, loss_of, mixed, uniform
from torch_world import run_world

from autotune.errors import InvalidStrategy, ModelMismatch, PlanMismatch, SynchronizationError
from autotune.strategy_space.enactable import why_refused
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer
from runtime_rewriter.pytorch.ddp import PlannedDataParallel, attach
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.numerics import tolerance_of


def pair(module: nn.Module, **arguments: Any) -> tuple[DistributedDataParallel, PlannedDataParallel]:
    """The same module under torch's DDP and under ours."""
    return DistributedDataParallel(copy.deepcopy(module), **arguments), PlannedDataParallel(module, **arguments)


def assert_close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    """Bitwise on 2 ranks; on more the sums may be ordered differently: 1e-5 of the largest value, float32."""
    for a, b in zip((t.detach() for t in mine), (t.detach() for t in theirs), strict=True):
        if dist.get_world_size() == 2:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().amax() + 1e-3))


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


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
            assert float((a - b).abs().amax()) <= 4 * tolerance_of("float32", compressor, size) * float(largest) + 1e-6
            first = a.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, a), "every rank holds the same bits"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_primitive_compressor_and_partition_averages_the_gradients(size: int) -> None:
    run_world(check_every_primitive, size)


def check_switching(rank: int, arguments: dict[str, Any]) -> None:
    """12 steps, each of two micro-batches with `no_sync`, another synchronization at every step."""
    size = dist.get_world_size()
    for make in (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3),  # the bias before BatchNorm has noise for a gradient: do not blow it up
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


@pytest.mark.parametrize("option", ["", "gradient_as_bucket_view", "find_unused_parameters", "static_graph"])
def test_switching_between_ddp_and_plans_every_step_trains_like_ddp(option: str) -> None:
    run_world(check_switching, 2, {option: True} if option else {})


def test_switching_on_four_ranks_trains_like_ddp_up_to_the_order_of_sums() -> None:
    run_world(check_switching, 4, {})


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
        ("refused", replace(plans[0], messages=(replace(plans[0].messages[0], ranks=(0,)), *plans[0].messages[1:]))),
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
        assert seen["other model"][0] is ModelMismatch and "unknown bias, weight" in seen["other model"][1]
        assert seen["one rank's other model"][0] is ModelMismatch
        assert ("rank 1 cannot load" in seen["one rank's other model"][1]) == (number == 0)
        assert seen["other world"][0] is ModelMismatch and "3 ranks" in seen["other world"][1]
        assert seen["refused"][0] is InvalidStrategy and "every rank takes part" in seen["refused"][1]
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


@pytest.mark.parametrize("when", ["load", "backward"])
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


def test_a_rank_that_never_comes_is_named_with_the_message_it_misses() -> None:
    assert run_world(check_late_rank, 2) == ["done", "done"]


class Branches(nn.Module):
    """Which branch is used depends on rank and step."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        for number in use:
            x = self.branches[number](x)
        return x


USES = [[(0, 1), (0, 1)], [(0,), (1,)], [(2, 0), (0,)], [(0,), (0,)], [(1, 2), (1,)], [(2,), (2,)]]  # [step][rank]


def check_unused(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(Branches(), find_unused_parameters=True)
    plans = [mixed(mine.module, 2), None, uniform(mine.module, 2, Synchronizer.REDUCE_SCATTER_ALL_GATHER)]
    untouched: dict[nn.Module, list[list[bool]]] = {theirs: [], mine: []}
    for model in (theirs, mine):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for step in range(12):
            if isinstance(model, PlannedDataParallel):
                model.synchronizer.load(plans[step % 3])
            optimizer.zero_grad()
            x = torch.full((2, 4), float(rank + step + 1))
            if step % 4 == 3:
                with model.no_sync():
                    model(x, (1,)).square().sum().backward()
            model(x, USES[step % len(USES)][rank]).square().sum().backward()
            untouched[model].append([parameter.grad is None for parameter in model.parameters()])
            optimizer.step()
    assert untouched[mine] == untouched[theirs] and any(any(row) for row in untouched[mine])
    assert_close(list(mine.parameters()), list(theirs.parameters()))


def test_unused_parameters_are_treated_as_ddp_treats_them() -> None:
    run_world(check_unused, 2)


def check_static_unused(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(Branches(), static_graph=True)
    plans = [mixed(mine.module, 2), uniform(mine.module, 2), None, None, mixed(mine.module, 2)]
    for model in (theirs, mine):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for step in range(10):
            if model is mine:
                mine.synchronizer.load(plans[step % 5])
            optimizer.zero_grad()
            model(torch.full((2, 4), float(rank + step + 1)), (2, 0)).square().sum().backward()
            optimizer.step()
        assert all(parameter.grad is None for parameter in model.module.branches[1].parameters())
    assert_close(list(mine.parameters()), list(theirs.parameters()))


def test_a_static_graph_with_unused_parameters_needs_no_option() -> None:
    run_world(check_static_unused, 2)


def check_unused_refused(rank: int) -> None:
    model = PlannedDataParallel(Branches())
    model.synchronizer.load(uniform(model.module, 2, Synchronizer.REDUCE_SCATTER_ALL_GATHER))
    with pytest.raises(SynchronizationError, match=r"2 did not: branches.2.weight, branches.2.bias.*find_unused_parameters=True"):
        model(torch.ones(2, 4), (0, 1)).sum().backward()


def test_unused_parameters_without_the_option_raise_on_every_rank() -> None:
    run_world(check_unused_refused, 2)


class Steps:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_boundary(self, now_s: float, clean: bool) -> None:
        self.events.append(("boundary", clean))

    def on_backward_end(self, now_s: float) -> None:
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
        torch.autograd.grad(loss_of(model, rank, step), model.module.gain)  # a penalty, say: no end of a step
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


@pytest.mark.parametrize("kind", [None, Synchronizer.ALL_REDUCE, Synchronizer.REDUCE_SCATTER_ALL_GATHER])
def test_a_step_is_from_the_first_forward_to_the_next_and_validation_makes_it_unclean(kind: Synchronizer | None) -> None:
    step = ["backward", ("boundary", True)]
    for events in run_world(check_boundaries, 2, kind):
        assert events == [*step, "backward", ("boundary", False), *step, "backward"]


class Checkpointed(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.inner, x, use_reentrant=True)
        return self.last(x)


def check_reentrant(rank: int) -> None:
    torch.manual_seed(0)
    for times, arguments in ((1, {}), (2, {"static_graph": True})):
        theirs, mine = pair(Checkpointed(times), **arguments)
        mine.synchronizer.load(uniform(mine.module, 2, Synchronizer.REDUCE_SCATTER_ALL_GATHER, groups=4))
        for step in range(3):
            for model in (theirs, mine):
                model.zero_grad()
                model(torch.full((2, 4), float(rank + step))).square().sum().backward()
            assert_close(gradients(mine), gradients(theirs))
    twice = PlannedDataParallel(Checkpointed(2))
    twice.synchronizer.load(uniform(twice.module, 2, Synchronizer.REDUCE_SCATTER_ALL_GATHER))
    with pytest.raises(SynchronizationError, match="use_reentrant=False"):
        twice(torch.ones(2, 4)).sum().backward()


def test_reentrant_checkpoints_synchronize_or_say_what_to_do() -> None:
    run_world(check_reentrant, 2)


class Odd(nn.Module):
    """dtypes, layouts and extents off the beaten track."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        image = x.expand(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        other = self.wide.sum() + self.narrow.sum().double() + self.complex.abs().sum().double() + self.empty.sum().double()
        return self.convolution(image).square().sum() * (1 + other.float()) * self.frozen.sum()


def check_odd(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(Odd())
    for kind, partitioned in itertools.product(Synchronizer, (False, True)):
        mine.synchronizer.load(uniform(mine.module, 2, kind, partitioned=partitioned))
        for model in (theirs, mine):
            model.zero_grad()
            model(torch.tensor(float(rank + 1))).backward()
        assert_close(gradients(mine), gradients(theirs))
        assert mine.module.convolution.weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_uncommon_dtypes_layouts_and_empty_parameters_match_ddp() -> None:
    run_world(check_odd, 2)


def check_sparse(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2)))
    mine.synchronizer.load(uniform(mine.module, 2, Synchronizer.PARAMETER_SERVER, partitioned=True))
    for model in (theirs, mine):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor([rank, step, 5])).square().sum().backward()
            assert model.module[0].weight.grad.is_sparse
            optimizer.step()
    assert_close(list(mine.parameters()), list(theirs.parameters()))


def test_sparse_gradients_travel_dense_and_stay_sparse_for_the_optimizer() -> None:
    run_world(check_sparse, 2)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=True)
        self.out = nn.Linear(3, 2)

    def forward(self, words: Tensor, weights: Tensor) -> Tensor:
        return self.out(self.table(words) * weights.unsqueeze(1))


def check_rows_of_zeros(rank: int) -> None:
    """Row 5 has a gradient at first and one of zeros later, on one rank; row 8 never has any."""
    torch.manual_seed(0)
    theirs, mine = pair(Masked())
    mine.synchronizer.load(uniform(mine.module, 2, Synchronizer.ALL_REDUCE, partitioned=True))
    for model in (theirs, mine):
        table, out = model.module.table, model.module.out
        optimizers = [torch.optim.SparseAdam(table.parameters(), 0.1), torch.optim.SGD(out.parameters(), 0.1)]
        for step in range(3):
            model.zero_grad()
            words = torch.tensor([rank, step + 2, 5 if rank else 4])
            model(words, torch.tensor([1.0, 1.0, float(step == 0)])).square().sum().backward()
            assert table.weight.grad.coalesce().indices()[0].tolist() == sorted({0, 1, step + 2, 4, 5})
            for optimizer in optimizers:
                optimizer.step()
    assert_close(list(mine.parameters()), list(theirs.parameters()))


def test_rows_of_a_sparse_gradient_stay_when_their_values_are_zero() -> None:
    run_world(check_rows_of_zeros, 2)


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


def test_a_process_group_of_some_ranks_synchronizes_among_them() -> None:
    run_world(check_subgroup, 4)


def test_what_cannot_be_enacted_is_named_before_any_step() -> None:
    model = Tied()
    plan = uniform(model, 2)
    message = plan.messages[0]
    assert why_refused(plan) is None
    assert why_refused(replace(plan, ring_order=(1, 0))) is None
    assert "ring_order must name each of the 2 ranks once" in str(why_refused(replace(plan, ring_order=(1, 1))))
    for change, word in (
        ({"compressor": Compressor.INT8, "dtype": "bfloat16"}, "int8 needs float32 or float64 gradients, but these are bfloat16"),
        ({"compressor": Compressor.TOP_K, "ratio": 0.1, "dtype": "complex64"}, "top_k needs float32 or float64"),
        (
            {"compressor": Compressor.POWER_SGD, "rank": 1, "sparse": SparseHandling.ALL_GATHER},
            "or set sparse = dense",
        ),
        ({"ranks": (0,)}, "every rank"),
        ({"sparse": SparseHandling.ALL_GATHER}, "travel alone, whole or cut along axis 0, but the message holds 2 slice(s)"),
        ({"sparse": SparseHandling.GATHER_SCATTER, "slices": message.slices[:1]}, "needs push_pull, but the primitive is all_reduce"),
    ):
        bad = replace(plan, messages=(replace(message, **change), *plan.messages[1:]))
        assert word in str(why_refused(bad)) and str(why_refused(bad)).startswith("message 0 (all_reduce of ")


def test_a_module_without_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one parameter"):
        GradientSynchronizer(nn.ReLU())
