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
from ddp_pair import assert_close, gradients, pair
from test_torch_models import USES, BranchingModel, Odd
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_comm_hook
from torch.nn.parallel import DistributedDataParallel
from torch_plans import Tied, loss_of, mixed, uniform
from torch_world import run_world

from autotune.errors import SynchronizationError
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
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.native_buckets import BucketReducer
from runtime_rewriter.pytorch.numerics import GateResult, GradientGate
from runtime_rewriter.pytorch.observers import BackwardObserver


def random_buckets(module: nn.Module, seed: int) -> Plan:
    """Whole variables in random groups, sent in a random order."""
    draw = random.Random(seed)
    workload = assumed_workload(module)
    groups = draw.randint(1, len(workload.variables))
    order = draw.sample(range(groups), groups)
    choices = []
    for variable in workload.variables:
        group = draw.randrange(groups)
        choices.append(
            VariableStrategy(
                variable.name, (Shard(Synchronizer.ALL_REDUCE, group=group, priority=order[group]),)
            )
        )
    return plan(Strategy(tuple(choices)), workload, dist.get_world_size())


def sent(synchronizer: GradientSynchronizer) -> list[list[str]]:
    """The variables of the actual buckets of torch's reducer, in its order."""
    names = {
        id(parameter): name
        for name, parameter in zip(synchronizer.names, synchronizer.parameters, strict=True)
    }
    assert isinstance(synchronizer.native, BucketReducer)
    return [
        [names[id(parameter)] for parameter in bucket.parameters()]
        for bucket in synchronizer.native.reducer._get_zeros_like_grad_buckets()
    ]


def planned(held: Plan) -> list[list[str]]:
    return [[part.variable for part in message.slices] for message in held.messages]


def check_random(rank: int, arguments: dict[str, Any]) -> None:
    torch.manual_seed(1)
    theirs, mine = pair(Tied(), **arguments)
    for model in (theirs, mine):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
        for step in range(16):
            if (
                model is mine and step % 2 == 0
            ):  # each plan for two steps: reducers change after the first
                held = [
                    random_buckets(mine.module, step),
                    None,
                    random_buckets(mine.module, step),
                    mixed(mine.module, 2),
                ][step // 2 % 4]
                mine.synchronizer.load(held)
                assert (mine.synchronizer.native is not None) == (step // 2 % 2 == 0)
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            if step % 4 == 1 and not arguments.get("static_graph"):
                with model.no_sync():
                    loss_of(model, rank, 2 * step).backward()
            loss_of(model, rank, 2 * step + 1).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if model is mine and mine.synchronizer.native is not None:
                assert sent(mine.synchronizer) == planned(mine.synchronizer.plan)
    assert_close(list(mine.parameters()), list(theirs.parameters()))
    assert_close([b.float() for b in mine.buffers()], [b.float() for b in theirs.buffers()])


@pytest.mark.parametrize(
    "option",
    ["", "gradient_as_bucket_view", "find_unused_parameters", "static_graph", "batched_grad_copy"],
)
def test_random_buckets_train_like_ddp_in_planned_order(option: str) -> None:
    run_world(check_random, 2, {option: True} if option else {})


def check_unused(rank: int, as_view: bool) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(
        BranchingModel(), find_unused_parameters=True, gradient_as_bucket_view=as_view
    )
    plans = [
        random_buckets(mine.module, 1),
        None,
        random_buckets(mine.module, 2),
        mixed(mine.module, 2),
    ]
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


@pytest.mark.parametrize("as_view", [False, True])
def test_unused_parameters_are_treated_as_in_ddp_and_known_to_the_gate(as_view: bool) -> None:
    run_world(check_unused, 2, as_view)


def check_static_unused(rank: int) -> None:
    torch.manual_seed(0)
    theirs, mine = pair(BranchingModel(), static_graph=True)
    plans = [
        random_buckets(mine.module, 1),
        None,
        random_buckets(mine.module, 2),
        mixed(mine.module, 2),
    ]
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


def test_a_static_graph_is_learned_by_every_reducer_and_observed_from_its_first_pass() -> None:
    run_world(check_static_unused, 2)


def check_graph_set_static(rank: int) -> None:
    """The script sets the graph static after a plan was loaded, as under `autotune run`."""
    torch.manual_seed(0)
    theirs, mine = pair(Tied())
    held = random_buckets(mine.module, 3)
    mine.synchronizer.load(held)
    for model in (theirs, mine):
        model._set_static_graph()
        for step in range(4):
            torch.manual_seed(rank + step)
            model.zero_grad()
            loss_of(model, rank, step).backward()
    assert_close(gradients(mine), gradients(theirs))
    mine.synchronizer.load(None)
    for model in (theirs, mine):
        torch.manual_seed(rank)
        model.zero_grad()
        loss_of(model, rank, 5).backward()
    assert_close(gradients(mine), gradients(theirs))


def test_a_script_may_declare_its_graph_static_after_the_plan_was_loaded() -> None:
    run_world(check_graph_set_static, 2)


def check_attached(rank: int) -> None:
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
    assert_close(list(mine.parameters()), list(theirs.parameters()))
    assert_close([b.float() for b in mine.buffers()], [b.float() for b in theirs.buffers()])
    synchronizer.close()
    before = mine.gain.grad.clone()
    mine(torch.tensor([rank, rank + 1])).sum().backward()
    assert not torch.equal(before, mine.gain.grad), "no reducer is left"


def test_a_plain_module_is_driven_as_ddp_drives_its_own() -> None:
    run_world(check_attached, 2)


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

    def on_synchronized(self, kept: frozenset[int]) -> None:
        self.events.append(("synchronized", kept))


def check_observer(rank: int) -> tuple[list[Any], list[Any]]:
    """An observer's calls under buckets, and under the same buckets with our hooks."""
    found = []
    for native in (True, False):
        torch.manual_seed(0)
        model = PlannedDataParallel(Tied())
        held = random_buckets(model.module, 1)
        shape = held.messages[0]
        by_hooks = replace(
            held,
            messages=(
                replace(shape, synchronizer=uniform(model.module, 2, RS).messages[0].synchronizer),
                *held.messages[1:],
            ),
        )
        model.synchronizer.load(held if native else by_hooks)
        assert (model.synchronizer.native is not None) == native
        loss_of(model, rank, 0).backward()
        journal = Journal()
        model.synchronizer.observers.append(journal)
        for step in range(2):
            torch.autograd.grad(loss_of(model, rank, step), model.module.gain)  # a penalty, say
            journal.events.clear()
            with model.no_sync():
                loss_of(model, rank, step).backward()
            loss_of(model, rank, step).backward()
        model.synchronizer.observers.clear()
        loss_of(model, rank, 2).backward()
        found.append(journal.events)
    return found[0], found[1]


RS = Synchronizer.REDUCE_SCATTER_ALL_GATHER


def test_observers_get_the_same_calls_as_with_our_hooks() -> None:
    for native, ours in run_world(check_observer, 2):
        assert native == ours
        assert native[:4] == ["forward", "forward", ("output", 1), "start"]
        assert native[-2:] == ["computed", ("synchronized", frozenset())] and sorted(
            native[4:-2]
        ) == list(range(8))


def undivided(state: None, bucket: dist.GradBucket) -> Any:
    """A communication hook that returns the sum instead of the average."""
    return (
        dist.all_reduce(bucket.buffer(), async_op=True)
        .get_future()
        .then(lambda done: done.value()[0])
    )


undivided.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def check_gate(rank: int, wrong: bool) -> tuple[GateResult, bool]:
    torch.manual_seed(0)
    model = PlannedDataParallel(Tied())
    model.synchronizer.load(random_buckets(model.module, 5))
    assert model.synchronizer.native is not None
    if wrong:
        _register_comm_hook(model.synchronizer.native.reducer, None, undivided)
    gate = GradientGate(model.synchronizer)
    loss_of(model, rank, 0).backward()
    gate.arm()
    loss_of(model, rank, 1).backward()
    loss_of(model, rank, 2).backward()
    return gate.error(), any(
        parameter._post_accumulate_grad_hooks for parameter in model.parameters()
    )


def test_the_gate_checks_the_result_of_the_reducer() -> None:
    size = 2
    for result, hooked in run_world(check_gate, size, False):
        assert result.ok and result.relative_error == 0.0 and not hooked, (
            "without an observer there is no Python per gradient"
        )
    for result, _ in run_world(check_gate, size, True):
        assert not result.ok and result.relative_error > 0.1, "the sum is no average"


COUNTED: list[int] = []


def count_hook(state: None, bucket: dist.GradBucket) -> Any:
    COUNTED.append(bucket.index())
    return (
        dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        .get_future()
        .then(lambda done: done.value()[0])
    )


count_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def check_script_hook(rank: int) -> None:
    model = PlannedDataParallel(Tied())
    model.synchronizer.load(uniform(model.module, 2))
    loss_of(model, rank, 0).backward()
    model.register_comm_hook(None, count_hook)
    loss_of(model, rank, 1).backward()
    assert not COUNTED, "with a plan the plan synchronizes"
    model.synchronizer.load(None)
    loss_of(model, rank, 2).backward()
    assert COUNTED, "without one the script's own hook does"


def test_a_hook_that_the_script_registers_under_a_plan_stays_with_ddps_own_reducer() -> None:
    run_world(check_script_hook, 2)


def check_dead_rank(rank: int) -> str | None:
    model = PlannedDataParallel(
        Tied(), forward_sync_buffers=False
    )  # DDP's own broadcast would be the first to notice
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


def check_late_rank(rank: int) -> str:
    """The planned group's timeout applies, not the script's minute."""
    model = nn.Linear(3, 3)
    synchronizer = attach(model, None, timeout_s=2.0, agreement_timeout_s=2.0)
    synchronizer.load(uniform(model, 2))
    assert synchronizer.native is not None
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timeout|timed out"):
            model(torch.ones(3)).sum().backward()
    else:
        time.sleep(6.0)
    return "done"


def test_the_wait_for_a_missing_rank_ends_at_the_timeout_of_plans() -> None:
    assert run_world(check_late_rank, 2) == ["done", "done"]


def check_left_to_hooks(rank: int) -> None:
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


def test_mixed_types_sparse_gradients_and_profiling_are_left_to_our_hooks() -> None:
    run_world(check_left_to_hooks, 2)


def test_buckets_are_read_from_the_plan_alone() -> None:
    module = Tied()
    held = uniform(module, 2)
    assert buckets_of(held) == tuple(map(tuple, planned(held)))
    variables = assumed_workload(module).variables
    assert backend_of(held, variables) == "carried out by torch's own DDP reducer, 3 buckets"
    assert (
        backend_of(held, [replace(variables[0], sparse=True)])
        == "carried out by autotune's hooks, 3 messages"
    )
    for other in (
        uniform(module, 2, partitioned=True),
        uniform(module, 2, compressor=Compressor.FP16),
        uniform(module, 2, RS),
        uniform(Odd(), 2),
        replace(held, cross_step=True),
        replace(held, ring_order=(1, 0)),
        replace(held, messages=(replace(held.messages[0], hierarchical=True), *held.messages[1:])),
        replace(held, messages=(replace(held.messages[0], ranks=(0,)), *held.messages[1:])),
    ):
        assert buckets_of(other) is None
