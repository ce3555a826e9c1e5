"""Plans that cross the step against torch's own DDP: scripts see the same bits."""

from __future__ import annotations

import copy
import functools
import gc
import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_pair import gradients, pair
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_plans import Tied, loss_of, mixed, taken_in_when_read, uniform
from torch_world import on_ranks, run_world

from autotune.errors import InvalidStrategy
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.reads import is_watched
from runtime_rewriter.pytorch.under_way import MessagesUnderWay

Optimizers = list[torch.optim.Optimizer]
Script = Callable[[nn.Module, int], Iterator[Any]]
"""Trains a model on one rank and yields whatever it looks at, step by step."""


class Attentive(nn.Module):
    """Reads parameters unusually: attention, recurrence, a root parameter, a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.ones(6))
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)[None]
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = self.norm(self.recurrent(hidden)[0]) * self.gain
        return nn.functional.linear(hidden[0], self.embedding.weight)


def adam(model: nn.Module) -> Optimizers:
    return [torch.optim.AdamW(model.parameters(), 0.01)]


def several(model: nn.Module) -> Optimizers:
    """Two optimizers, parameter groups, momentum, weight decay."""
    parameters = list(model.parameters())
    decayed: dict[str, Any] = {"params": parameters[:2], "lr": 0.05, "weight_decay": 0.1}
    groups = [decayed, {"params": parameters[2:4]}]
    sgd = torch.optim.SGD(groups, 0.1, momentum=0.9, nesterov=True)
    return [sgd, torch.optim.Adam(parameters[4:], 0.01, amsgrad=True)]


def plain(model: nn.Module, rank: int, used: Optimizers, set_to_none: bool = True) -> Iterator[Any]:
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in used]
    for step in range(6):
        for optimizer in used:
            optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model, rank, step)
        loss.backward()
        for optimizer, schedule in zip(used, schedules, strict=True):
            optimizer.step()
            schedule.step()
        yield loss.detach()


def accumulating(model: nn.Module, rank: int) -> Iterator[Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    for step in range(5):
        for micro in range(3):
            with model.no_sync() if micro < 2 else nullcontext():  # type: ignore[operator]
                loss_of(model, rank, 3 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def curious(model: nn.Module, rank: int) -> Iterator[Any]:
    """Read gradients, weights, checkpoints, a weight average, a copy and an evaluation."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    parameters = list(model.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if step == 3:
            yield torch.stack([gradient.norm() for gradient in gradients])
        optimizer.step()
        if step == 4:
            yield [gradient.clone() for gradient in gradients]
        if step == 5:
            yield copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        if step == 6:
            saved = io.BytesIO()
            torch.save(model.state_dict(), saved)
            yield [p.detach().clone() for p in copy.deepcopy(model.module).parameters()]
        if step == 7:
            with torch.inference_mode():
                model.eval()
                logits = model(torch.arange(8))
            model.train()
            yield logits.clone()
        if step % 2:
            with torch.no_grad():
                for mean, parameter in zip(average, parameters, strict=True):
                    mean.lerp_(parameter, 0.5)
        yield [mean.clone() for mean in average]


def dropping(model: nn.Module, rank: int) -> Iterator[Any]:
    """Drop a gradient, skip a step, step twice, and overwrite a weight."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    first = next(model.parameters())
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step == 2:
            first.grad = None
        if step != 3:
            optimizer.step()
        if step == 4:
            optimizer.step()
            with torch.no_grad():
                first.mul_(0.5)
        yield step


SCRIPTS: dict[str, Script] = {
    "adam": lambda model, rank: plain(model, rank, adam(model)),
    "several optimizers": lambda model, rank: plain(model, rank, several(model)),
    "zeroed gradients": lambda model, rank: plain(model, rank, adam(model), set_to_none=False),
    "accumulation": accumulating,
    "curious": curious,
    "dropping": dropping,
}


RS = Synchronizer.REDUCE_SCATTER_ALL_GATHER


def crossing(plan: Plan) -> Plan:
    return replace(plan, cross_step=True)


def backwards(plan: Plan) -> Plan:
    """Issue the last ready gradient first, so that every message is late."""
    return replace(plan, messages=plan.messages[::-1])


def assert_same_bits(mine: nn.Module, theirs: nn.Module) -> None:
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def check_script(rank: int, script: Script, module: nn.Module) -> bool:
    """Compare both runs step by step; return whether any update was deferred."""
    attentive = isinstance(module, Attentive)
    models = pair(module, find_unused_parameters=attentive)
    mine = models[1].synchronizer
    whole = crossing(backwards(mixed(module, 2)))
    cut = crossing(uniform(module, 2, RS, partitioned=True))
    direct = crossing(uniform(module, 2, Synchronizer.DIRECT_EXCHANGE, partitioned=True))
    pieces = tuple(replace(message, pieces=3) for message in backwards(direct).messages)
    if attentive:  # cuDNN wants an LSTM's weights in one piece, which a copy has not
        for model in models:
            model.module.recurrent.flatten_parameters()
    mine.load(whole)
    deferred = False
    runs = [script(model, rank) for model in models]
    for step in range(100):
        views = []
        for run in runs:
            torch.manual_seed(10 * step + rank)
            views.append(next(run, math.inf))
        deferred |= any(is_watched(parameter) for parameter in module.parameters())
        if step == 2:
            mine.load(replace(direct, messages=pieces, in_flight=8))
        if step == 3:
            mine.load(replace(cut, in_flight=2))
        torch.testing.assert_close(views[1], views[0], rtol=0, atol=0)
        if views[0] is math.inf:
            break
    assert_same_bits(models[1], models[0])
    mine.close()
    return deferred


def check_scripts(rank: int, build: type[nn.Module]) -> set[str]:
    """The scripts in which updates were deferred."""
    deferred = set()
    for name, script in SCRIPTS.items():
        torch.manual_seed(0)
        if check_script(rank, script, build()):
            deferred.add(name)
        gc.collect()  # until then threads of gloo's closed process groups wake up every 10 ms
    return deferred


@pytest.mark.parametrize("build", [Tied, pytest.param(Attentive, marks=pytest.mark.slow)])
def test_a_script_sees_the_bits_of_ddp(build: type[nn.Module]) -> None:
    """One that looks at everything may meet nothing but messages that have arrived."""
    deferred = set.union(*run_world(check_scripts, 2, build, timeout_s=300.0))
    assert deferred >= SCRIPTS.keys() - {"curious"}


@on_ranks(2)
def test_clipping_by_the_global_norm_is_refused_without_results(rank: int) -> None:
    """Without a plan, and with one from the start, which would send whole messages across."""
    torch.manual_seed(0)
    module = Tied()
    models: list[Any] = [*pair(copy.deepcopy(module)), PlannedDataParallel(module)]
    plan = crossing(mixed(module, 2))
    models[2].synchronizer.load(plan)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for step in range(4):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss_of(model, rank, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if number == 2 and step == 0:
                with pytest.warns(RuntimeWarning, match="clipping by the global norm"):
                    optimizer.step()
            else:
                optimizer.step()
        assert not any(is_watched(parameter) for parameter in module.parameters())
    for model in models[1:]:
        assert_same_bits(model, models[0])
    with pytest.raises(
        InvalidStrategy, match=r"cannot cross the step(.|\n)*clipping by the global norm"
    ):
        models[1].synchronizer.load(plan)
    models[1].synchronizer.load(replace(plan, cross_step=False))


class Coupled(torch.optim.SGD):
    """A script's own optimizer, which scales every update by the global norm."""

    def step(self, closure: Any = None) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        super().step()


@contextmanager
def step_replaced_in_class() -> Iterator[None]:
    """A script's own step in torch's class, with the name and module of torch's."""
    torchs_step = torch.optim.SGD.step

    @functools.wraps(torchs_step)
    def step(self: torch.optim.SGD, closure: Any = None) -> Any:
        return torchs_step(self, closure)

    torch.optim.SGD.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.SGD.step = torchs_step  # type: ignore[method-assign]


COUPLING = {
    "own optimizer": "Coupled may couple variables",
    "class": "the script replaced step of its optimizer SGD",
    "hook": "hooks around the step of the optimizer SGD",
    "closure": r"step\(\) is given a closure",
    "scaler": r"between backward\(\) and step\(\)",
    "norms": "as clipping by the global norm does",
    "logging": r"gradients are read between backward\(\) and step\(\)",
}


@on_ranks(2, each=COUPLING)
def test_updates_that_couple_variables_are_refused_with_the_reason(rank: int, kind: str) -> None:
    with step_replaced_in_class() if kind == "class" else nullcontext():
        check_coupling(rank, kind)


def check_coupling(rank: int, kind: str) -> None:
    torch.manual_seed(0)
    model = PlannedDataParallel(Tied())
    build: Any = Coupled if kind == "own optimizer" else torch.optim.SGD
    optimizer = build(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaler")
    if kind == "hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    for step in range(2):
        scaler.scale(loss_of(model, rank, step)).backward()
        if kind == "norms":
            torch.nn.utils.get_total_norm(gradients(model))
        if kind == "logging":
            sum(gradient.norm() for gradient in gradients(model))
        optimizer.step(lambda: 0.0) if kind == "closure" else scaler.step(optimizer)
        scaler.update()
    with pytest.raises(InvalidStrategy, match=COUPLING[kind]):
        model.synchronizer.load(crossing(mixed(model.module, 2)))


@on_ranks(2)
def test_the_end_of_a_process_group_flushes_what_crosses_the_last_step(rank: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    group = dist.new_group()
    attached = attach(module, crossing(backwards(uniform(module, 2))), process_group=group)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    watched = []
    with taken_in_when_read():
        for step in range(4):
            optimizer.zero_grad()
            module(torch.full((2, 6), step + rank + 1.0)).square().sum().backward()
            optimizer.step()
            watched.append(any(is_watched(parameter) for parameter in module.parameters()))
        assert watched[-1], "the last step is under way"
        dist.destroy_process_group(group)
    assert not any(is_watched(parameter) for parameter in module.parameters())
    attached.close()


@on_ranks(2)
def test_a_variable_waits_again_after_an_interrupted_wait(rank: int) -> None:
    models = pair(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    mine = models[1].synchronizer
    mine.load(crossing(backwards(uniform(models[1].module, 2))))
    received = MessagesUnderWay.receive
    optimizers = [torch.optim.AdamW(model.parameters(), 0.1) for model in models]

    def interrupted(self: MessagesUnderWay, number: int) -> None:
        raise KeyboardInterrupt

    with taken_in_when_read():
        for step in range(6):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.full((4, 6), float(rank + step))).square().sum().backward()
                optimizer.step()
            weight = models[1].module[0].weight
            if step > 3:
                assert is_watched(weight)
                MessagesUnderWay.receive = interrupted  # type: ignore[method-assign]
                try:
                    with pytest.raises(KeyboardInterrupt):
                        weight.sum()
                finally:
                    MessagesUnderWay.receive = received  # type: ignore[method-assign]
            assert torch.equal(weight, models[0].module[0].weight)
    mine.close()


def with_scripted_layer() -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # torch.jit is deprecated, and still in use.
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(6, 6))
    return nn.Sequential(nn.Embedding(11, 6), scripted, nn.Linear(6, 11))


@on_ranks(2)
def test_variables_without_detectable_reads_do_not_cross_the_step(rank: int) -> None:
    """A scripted module reads its parameters without any Python function."""
    theirs = DistributedDataParallel(with_scripted_layer())
    mine = PlannedDataParallel(with_scripted_layer())
    mine.synchronizer.load(crossing(backwards(mixed(mine.module, 2))))
    for step in range(5):
        for model in (theirs, mine):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    assert_same_bits(mine, theirs)
    unseen = mine.synchronizer.cross_step.conditions.unseen
    assert [n in unseen for n in range(5)] == [False, True, True, False, False]
    assert len(list(mine.parameters())) == 5


@on_ranks(2)
def test_compiled_models_do_not_cross_the_step(rank: int) -> None:
    torch.manual_seed(0)
    module = Tied()
    theirs, mine = pair(module)
    plan = crossing(backwards(mixed(module, 2)))
    mine.synchronizer.load(plan)
    models: list[Any] = [torch.compile(model, backend="eager") for model in (theirs, mine)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss_of(model, rank, step).backward()
            optimizer.step()
        assert not any(is_watched(parameter) for parameter in module.parameters())
    assert_same_bits(mine, theirs)
    with pytest.raises(InvalidStrategy, match=r"torch\.compile"):
        mine.synchronizer.load(plan)


# -- garbage


@on_ranks(2)
def test_objects_are_frozen_for_the_collector_only_under_cross_step_plans(rank: int) -> None:
    gc.enable()
    gc.unfreeze()  # what the process came with
    model = PlannedDataParallel(Tied())
    within = uniform(model.module, 2)
    frozen = []
    for wanted in (crossing(within), within, crossing(within)):
        model.synchronizer.load(wanted)
        frozen.append(gc.get_freeze_count() > 0)
    model.synchronizer.close()
    assert frozen == [True, False, True] and gc.get_freeze_count() == 0
