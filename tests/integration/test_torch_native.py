"""Plans of mere buckets, executed by a reducer of torch, against torch's DDP."""

from __future__ import annotations

import copy
import os
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_pair import (
    HOOKED,
    assert_close,
    assert_same_state,
    average_hook,
    gradients,
    pair,
    sum_hook,
)
from test_torch_models import USES, BranchingModel, Odd
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_comm_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_plans import Tied, loss_of, mixed, uniform
from torch_world import default_store, on_ranks, run_world

from autotune.errors import InvalidStrategy, SynchronizationError
from autotune.strategy_space.backend import backend_of, buckets_of
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import (
    Compressor,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel, adopted
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.native_buckets import BucketReducer
from runtime_rewriter.pytorch.numerics import GradientGate
from runtime_rewriter.pytorch.observers import BackwardObserver
from runtime_rewriter.tolerances import GateResult


def random_buckets(module: nn.Module, seed: int) -> Plan:
    """Whole variables in random groups, sent in a random order."""
    draw = random.Random(seed)
    workload = assumed_workload(module)
    groups = draw.randint(1, len(workload.variables))
    order = draw.sample(range(groups), groups)
    choices = []
    for variable in workload.variables:
        group = draw.randrange(groups)
        shard = Shard(Synchronizer.ALL_REDUCE, group=group, priority=order[group])
        choices.append(VariableStrategy(variable.name, (shard,)))
    return plan(Strategy(tuple(choices)), workload, dist.get_world_size())


def sent(synchronizer: GradientSynchronizer) -> list[list[str]]:
    """The variables of the actual buckets of torch's reducer, in its order."""
    pairs = zip(synchronizer.names, synchronizer.parameters, strict=True)
    names = {id(parameter): name for name, parameter in pairs}
    assert isinstance(synchronizer.native, BucketReducer)
    buckets = synchronizer.native.reducer._get_zeros_like_grad_buckets()
    return [[names[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets]


def planned(held: Plan) -> list[list[str]]:
    return [[part.variable for part in message.slices] for message in held.messages]


def four_plans(module: nn.Module) -> list[Plan | None]:
    """Carried out by a reducer of the plan, DDP's own, a reducer of the plan, our hooks."""
    return [random_buckets(module, 1), None, random_buckets(module, 2), mixed(module, 2)]


OPTIONS = "gradient_as_bucket_view find_unused_parameters static_graph batched_grad_copy"


@on_ranks(2, each=["", *OPTIONS.split()])
def test_random_buckets_train_like_ddp_in_planned_order(rank: int, option: str) -> None:
    torch.manual_seed(1)
    theirs, mine = pair(Tied(), **({option: True} if option else {}))
    for model in (theirs, mine):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
        for step in range(16):
            if model is mine and step % 2 == 0:  # reducers change after a plan's first step
                native = step % 4 == 0
                other = mixed(mine.module, 2) if step % 8 == 6 else None
                mine.synchronizer.load(random_buckets(mine.module, step) if native else other)
                assert (mine.synchronizer.native is not None) == native
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            if step % 4 == 1 and option != "static_graph":
                with model.no_sync():
                    loss_of(model, rank, 2 * step).backward()
            loss_of(model, rank, 2 * step + 1).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if model is mine and mine.synchronizer.native is not None:
                assert sent(mine.synchronizer) == planned(mine.synchronizer.plan)
    assert_same_state(mine, theirs)


@on_ranks(2, each=[False, True])
def test_unused_parameters_are_treated_as_in_ddp_and_known_to_the_gate(
    rank: int, as_view: bool
) -> None:
    torch.manual_seed(0)
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_view}
    theirs, mine = pair(BranchingModel(), **options)
    plans = four_plans(mine.module)
    untouched: dict[nn.Module, list[list[bool]]] = {theirs: [], mine: []}
    results = []
    for model in (theirs, mine):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for step in range(12):
            if model is mine:
                mine.synchronizer.load(plans[step % 4])
                gate = GradientGate(mine.synchronizer)
                if step % 4 != 1:
                    gate.arm()
            optimizer.zero_grad()
            x = torch.full((2, 4), float(rank + step + 1))
            if step % 3 == 2:
                with model.no_sync():
                    model(x, (1,)).square().sum().backward()
            model(x, USES[step % len(USES)][rank]).square().sum().backward()
            untouched[model].append([parameter.grad is None for parameter in model.parameters()])
            optimizer.step()
            if model is mine and step % 4 != 1:
                results.append(gate.error())
    assert all(result.ok and result.relative_error == 0.0 for result in results), results
    assert untouched[mine] == untouched[theirs] and any(any(row) for row in untouched[mine])
    assert_close(list(mine.parameters()), list(theirs.parameters()))


@on_ranks(2)
def test_a_plan_may_be_loaded_while_parameters_are_frozen(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(Tied(), find_unused_parameters=True)
    plans = {0: mixed(mine.module, 2), 4: random_buckets(mine.module, 1)}
    for model in (theirs, mine):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
        for step in range(8):
            model.module.mix.requires_grad_(step % 4 > 1)
            if model is mine and step % 4 == 0:
                mine.synchronizer.load(plans[step])
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            loss_of(model, rank, step).backward()
            optimizer.step()
        model.module.mix.requires_grad_(True)
    assert mine.synchronizer.native is not None
    assert_same_state(mine, theirs)


@on_ranks(2)
def test_a_static_graph_is_learned_by_every_reducer_and_observed_from_its_first_pass(
    rank: int,
) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(BranchingModel(), static_graph=True)
    plans = four_plans(mine.module)
    for model in (theirs, mine):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for step in range(16):
            if model is mine:
                if step % 2 == 0:
                    mine.synchronizer.load(plans[step // 2 % 4])
                gate = GradientGate(mine.synchronizer)
                if step // 2 % 4 != 1:
                    gate.arm()
            optimizer.zero_grad()
            model(torch.full((2, 4), float(rank + step + 1)), (2, 0)).square().sum().backward()
            optimizer.step()
            assert model is theirs or step // 2 % 4 == 1 or gate.error().ok
        assert all(parameter.grad is None for parameter in model.module.branches[1].parameters())
    assert_close(list(mine.parameters()), list(theirs.parameters()))


@on_ranks(2)
def test_a_script_may_declare_its_graph_static_after_the_plan_was_loaded(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(Tied())
    mine.synchronizer.load(random_buckets(mine.module, 3))
    for model in (theirs, mine):
        model._set_static_graph()
    for step in range(5):
        if step == 4:
            mine.synchronizer.load(None)
        for model in (theirs, mine):
            torch.manual_seed(rank + step)
            model.zero_grad()
            loss_of(model, rank, step).backward()
        assert_close(gradients(mine), gradients(theirs))


@on_ranks(2)
def test_a_plain_module_is_driven_as_ddp_drives_its_own(rank: int) -> None:
    torch.manual_seed(0)
    theirs = DistributedDataParallel(Tied())
    mine = copy.deepcopy(theirs.module)
    synchronizer = attach(mine, random_buckets(mine, 7))
    for model, no_sync in ((theirs, theirs.no_sync), (mine, synchronizer.no_sync)):
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        for step in range(8):
            if model is mine and step == 4:
                synchronizer.load(mixed(mine, 2))
            if model is mine and step == 6:
                synchronizer.load(random_buckets(mine, 8))
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            if step % 2:
                with no_sync():
                    loss_of(model, rank, step).backward()
            loss_of(model, rank, step + 50).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                loss_of(model, rank, step)
            model.train()
        if model is mine:
            assert sent(synchronizer) == planned(synchronizer.plan)
    assert_same_state(mine, theirs)
    synchronizer.close()
    before = mine.gain.grad.clone()
    mine(torch.tensor([rank, rank + 1])).sum().backward()
    assert not torch.equal(before, mine.gain.grad), "no reducer is left"


RS = Synchronizer.REDUCE_SCATTER_ALL_GATHER


class Journal(BackwardObserver):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_forward_start(self) -> None:
        self.events.append("forward")

    def on_forward_output(self, tensors: list[Tensor]) -> None:
        self.events.append(("output", len(tensors)))

    def on_backward_start(self) -> None:
        self.events.append("start")

    def on_ready(self, index: int, gradient: Tensor | None) -> None:
        self.events.append(index)

    def on_computed(self) -> None:
        self.events.append("computed")

    def on_synchronized(self, unused: frozenset[int]) -> None:
        self.events.append(("synchronized", unused))


@on_ranks(2)
def test_observers_get_the_same_calls_as_with_our_hooks(rank: int) -> None:
    journals = []
    for native in (True, False):
        torch.manual_seed(0)
        model = PlannedDataParallel(Tied())
        held = random_buckets(model.module, 1)
        first = replace(held.messages[0], synchronizer=RS)
        by_hooks = replace(held, messages=(first, *held.messages[1:]))
        model.synchronizer.load(held if native else by_hooks)
        assert (model.synchronizer.native is not None) == native
        loss_of(model, rank, 0).backward()
        journal = Journal()
        model.synchronizer.observers.append(journal)
        for step in range(2):
            with model.no_sync():  # a penalty, say
                torch.autograd.grad(loss_of(model, rank, step), model.module.gain)
            journal.events.clear()
            with model.no_sync():
                loss_of(model, rank, step).backward()
            loss_of(model, rank, step).backward()
        model.synchronizer.observers.clear()
        loss_of(model, rank, 2).backward()
        journals.append(journal.events)
    events = journals[0]
    assert events == journals[1]
    assert events[:4] == ["forward", "forward", ("output", 1), "start"]
    assert sorted(events[4:-2]) == list(range(8))
    assert events[-2:] == ["computed", ("synchronized", frozenset())]


def gate_result(rank: int, hook: Any = None) -> GateResult:
    torch.manual_seed(0)
    model = PlannedDataParallel(Tied())
    model.synchronizer.load(random_buckets(model.module, 5))
    assert model.synchronizer.native is not None
    if hook is not None:
        _register_comm_hook(model.synchronizer.native.reducer, None, hook)
    gate = GradientGate(model.synchronizer)
    loss_of(model, rank, 0).backward()
    gate.arm()
    loss_of(model, rank, 1).backward()
    loss_of(model, rank, 2).backward()
    hooked = any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not hooked, "without an observer there is no Python per gradient"
    return gate.error()


@on_ranks(2)
def test_the_gate_checks_the_result_of_the_reducer(rank: int) -> None:
    result = gate_result(rank)
    assert result.ok and result.relative_error == 0.0
    result = gate_result(rank, sum_hook)
    assert not result.ok and result.relative_error > 0.1, "the sum is no average"


@on_ranks(2, each=[True, False])
def test_a_communication_hook_is_refused_under_a_plan(rank: int, builtin: bool) -> None:
    model = PlannedDataParallel(Tied())
    model.synchronizer.load(uniform(model.module, 2))
    loss_of(model, rank, 0).backward()
    with pytest.raises(InvalidStrategy, match=r"which would ignore it"):
        if builtin:
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        else:
            model.register_comm_hook(None, average_hook)
    loss_of(model, rank, 1).backward()
    assert not HOOKED
    model.synchronizer.load(None)
    model.register_comm_hook(None, average_hook)
    loss_of(model, rank, 2).backward()
    assert HOOKED, "without a plan the script's own hook averages"
    HOOKED.clear()
    model.synchronizer.close()


@on_ranks(2)
def test_a_builtin_hook_of_an_adopted_ddp_is_seen(rank: int) -> None:
    model = DistributedDataParallel(Tied())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with (
        adopted(model, timeout_s=20.0, agreement_timeout_s=20.0) as synchronizer,
        pytest.raises(InvalidStrategy, match="the script registered a communication hook"),
    ):
        synchronizer.load(uniform(model.module, 2))


def fail(gradient: Tensor) -> None:
    raise ValueError("out of memory, say")


@on_ranks(2, each=("checkpoint", "exception"))
def test_a_forward_pass_may_follow_a_backward_pass_that_accumulated_nothing(
    rank: int, kind: str
) -> None:
    models = pair(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    models[1].synchronizer.load(random_buckets(models[1].module, 0))
    assert models[1].synchronizer.native is not None
    for step in range(4):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(2 * step + rank))
        for model in models:
            if kind == "checkpoint":  # the backward pass runs the model again
                checkpoint(model, inputs, use_reentrant=False).square().sum().backward()
                continue
            output = model(inputs)
            if step == 1:
                output.register_hook(fail)
                with pytest.raises(ValueError, match="out of memory"):
                    output.square().sum().backward()
            else:
                output.square().sum().backward()
        assert_close(gradients(models[1]), gradients(models[0]))


def check_dead_rank(rank: int) -> str | None:
    # DDP's own broadcast of buffers would be the first to notice.
    model = PlannedDataParallel(Tied(), forward_sync_buffers=False)
    model.synchronizer.load(random_buckets(model.module, 1))
    loss_of(model, rank, 0).backward()
    if rank == 1:
        os._exit(0)
    loss = loss_of(model, rank, 1)
    with pytest.raises(RuntimeError, match=r"(?i)connection|timeout|peer") as caught:
        loss.backward()
    with pytest.raises(SynchronizationError, match="the last one was interrupted"):
        loss_of(model, rank, 2)
    return str(caught.value)


def test_a_rank_that_dies_fails_the_others_as_under_ddp() -> None:
    started = time.monotonic()
    answers = run_world(check_dead_rank, 3)
    assert answers[1] is None and all(answers[rank] for rank in (0, 2))
    assert time.monotonic() - started < 60


@on_ranks(2)
def test_the_wait_for_a_missing_rank_ends_at_the_timeout_of_plans(rank: int) -> None:
    """The planned group's timeout applies, not the script's minute."""
    model = nn.Linear(3, 3)
    synchronizer = attach(model, None, timeout_s=2.0, agreement_timeout_s=60.0)
    synchronizer.load(uniform(model, 2))
    assert synchronizer.native is not None
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timeout|timed out"):
            model(torch.ones(3)).sum().backward()
        default_store().set("raised", "")
    else:
        default_store().wait(["raised"])


@on_ranks(2)
def test_mixed_types_sparse_gradients_and_profiling_are_left_to_our_hooks(rank: int) -> None:
    odd = PlannedDataParallel(Odd())
    sparse = PlannedDataParallel(nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2)))
    for model in (odd, sparse):
        model.synchronizer.load(uniform(model.module, 2))
        assert model.synchronizer.plan is not None and model.synchronizer.native is None
    unused = attach(BranchingModel(), None, find_unused_parameters=True)
    unused.load(uniform(unused.module, 2))
    assert unused.native is None, "only a DDP can drive a reducer that looks for unused parameters"
    held = uniform(odd.module, 2)
    profiled = PlannedDataParallel(Tied())
    profiled.synchronizer.load(uniform(profiled.module, 2), deferred=True)
    assert profiled.synchronizer.native is None and held.messages


def test_buckets_are_read_from_the_plan_alone() -> None:
    module = Tied()
    held = uniform(module, 2)
    assert buckets_of(held) == tuple(map(tuple, planned(held)))
    variables = assumed_workload(module).variables
    sparse = [replace(variables[0], sparse=True)]
    assert backend_of(held, variables) == "carried out by torch's own DDP reducer, 3 buckets"
    assert backend_of(held, sparse) == "carried out by autotune's hooks, 3 messages"
    first, *others = held.messages
    for other in (
        uniform(module, 2, partitioned=True),
        uniform(module, 2, compressor=Compressor.FP16),
        uniform(module, 2, RS),
        uniform(Odd(), 2),
        replace(held, cross_step=True),
        replace(held, ring_order=(1, 0)),
        replace(held, messages=(replace(first, hierarchical=True), *others)),
        replace(held, messages=(replace(first, ranks=(0,)), *others)),
    ):
        assert buckets_of(other) is None
