"""Plans that cross the step against torch's own DDP: scripts see the same bits."""

from __future__ import annotations

import copy
import gc
import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_plans import Tied, loss_of, mixed, uniform
from torch_world import run_world

from autotune.errors import InvalidStrategy
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Compressor, Synchronizer
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.reads import is_watched

Optimizers = list[torch.optim.Optimizer]
Script = Callable[[nn.Module, int], Iterator[Any]]
"""Trains a model on one rank and yields whatever it looks at, step by step."""


class Attentive(nn.Module):
    """Reads parameters in unusual ways: attention, recurrence, a root parameter, a shared
    weight."""

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
    groups: list[dict[str, Any]] = [
        {"params": parameters[:2], "lr": 0.05, "weight_decay": 0.1},
        {"params": parameters[2:4]},
    ]
    return [
        torch.optim.SGD(groups, 0.1, momentum=0.9, nesterov=True),
        torch.optim.Adam(parameters[4:], 0.01, amsgrad=True),
    ]


def plain(
    model: nn.Module,
    rank: int,
    optimizers: Callable[[nn.Module], Optimizers],
    set_to_none: bool = True,
) -> Iterator[Any]:
    used = optimizers(model)
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
            yield [
                parameter.detach().clone() for parameter in copy.deepcopy(model.module).parameters()
            ]
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
    "adam": lambda model, rank: plain(model, rank, adam),
    "several optimizers": lambda model, rank: plain(model, rank, several),
    "zeroed gradients": lambda model, rank: plain(model, rank, adam, set_to_none=False),
    "accumulation": accumulating,
    "curious": curious,
    "dropping": dropping,
}


def crossing(plan: Plan) -> Plan:
    return replace(plan, cross_step=True)


def backwards(plan: Plan) -> Plan:
    """Issue the last ready gradient first, so that every message is late."""
    return replace(plan, messages=plan.messages[::-1])


def check_script(rank: int, name: str, attentive: bool) -> bool:
    """Compare both runs step by step; return whether any update was deferred."""
    torch.manual_seed(0)
    module = Attentive() if attentive else Tied()
    unused: dict[str, Any] = {"find_unused_parameters": attentive}
    models = (
        DistributedDataParallel(copy.deepcopy(module), **unused),
        PlannedDataParallel(module, **unused),
    )
    whole = crossing(backwards(mixed(module, 2)))
    cut = replace(
        crossing(uniform(module, 2, Synchronizer.REDUCE_SCATTER_ALL_GATHER, Compressor.NONE, True)),
        in_flight=2,
    )
    if attentive:  # cuDNN wants an LSTM's weights in one piece, which a copy has not
        for model in models:
            model.module.recurrent.flatten_parameters()
    models[1].synchronizer.load(whole)
    put_off = False
    runs = [SCRIPTS[name](model, rank) for model in models]
    for step in range(100):
        seen = []
        for run in runs:
            torch.manual_seed(10 * step + rank)
            seen.append(next(run, math.inf))
        put_off |= any(is_watched(parameter) for parameter in module.parameters())
        if step == 3:
            models[1].synchronizer.load(cut)
        torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)
        if seen[0] is math.inf:
            break
    theirs, mine = (copy.deepcopy(model.state_dict()) for model in models)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    return put_off


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("attentive", [False, True])
def test_a_script_sees_the_bits_of_ddp(name: str, attentive: bool) -> None:
    put_off = run_world(check_script, 2, name, attentive)
    assert any(put_off) or name == "curious", (
        "one that looks at everything may meet nothing but messages that have arrived"
    )


def check_clipping(rank: int) -> tuple[str, str]:
    """A script that clips by the global norm, without a plan and with one from the start."""
    torch.manual_seed(0)
    module = Tied()
    models: list[Any] = [
        DistributedDataParallel(copy.deepcopy(module)),
        PlannedDataParallel(copy.deepcopy(module)),
        PlannedDataParallel(module),
    ]
    plan = crossing(mixed(module, 2))
    models[2].synchronizer.load(plan)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    told = ""
    for step in range(4):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss_of(model, rank, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if number == 2 and step == 0:
                with pytest.warns(RuntimeWarning) as caught:
                    optimizer.step()
                told = str(caught[0].message)
            else:
                optimizer.step()
        assert not any(is_watched(parameter) for parameter in module.parameters())
    for model in models[1:]:
        torch.testing.assert_close(model.state_dict(), models[0].state_dict(), rtol=0, atol=0)
    with pytest.raises(InvalidStrategy) as refusal:
        models[1].synchronizer.load(plan)
    models[1].synchronizer.load(replace(plan, cross_step=False))
    return told, str(refusal.value)


def test_clipping_by_the_global_norm_is_refused_with_the_reason() -> None:
    for told, refusal in run_world(check_clipping, 2):
        assert "clipping by the global norm" in told
        assert "cannot cross the step" in refusal and "clipping by the global norm" in refusal


class Coupled(torch.optim.SGD):
    """A script's own optimizer, which scales every update by the global norm."""

    def step(self, closure: Any = None) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        super().step()


def check_refusals(rank: int) -> list[str]:
    reasons = []
    for kind in ("own optimizer", "hook", "closure", "scaler", "logging"):
        torch.manual_seed(0)
        model = PlannedDataParallel(Tied())
        optimizer: Any = (
            Coupled(model.parameters(), 0.1)
            if kind == "own optimizer"
            else torch.optim.SGD(model.parameters(), 0.1)
        )
        scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaler")
        if kind == "hook":
            optimizer.register_step_pre_hook(lambda *_: None)
        for step in range(2):
            scaler.scale(loss_of(model, rank, step)).backward()
            if kind == "logging":
                torch.nn.utils.get_total_norm(
                    [
                        parameter.grad
                        for parameter in model.parameters()
                        if parameter.grad is not None
                    ]
                )
            optimizer.step(lambda: 0.0) if kind == "closure" else scaler.step(optimizer)
            scaler.update()
        with pytest.raises(InvalidStrategy) as refusal:
            model.synchronizer.load(crossing(mixed(model.module, 2)))
        reasons.append(str(refusal.value))
    return reasons


def test_updates_that_couple_variables_are_refused_with_the_reason() -> None:
    for own, hook, closure, scaler, logging in run_world(check_refusals, 2):
        assert "Coupled may couple variables" in own
        assert "hooks around the step of the optimizer SGD" in hook
        assert "step() is given a closure" in closure
        assert "between backward() and step()" in scaler
        assert "gradients are read between backward() and step()" in logging


def with_scripted_layer() -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # torch.jit is on its way out, and still in use
        return nn.Sequential(
            nn.Embedding(11, 6), torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 11)
        )


def check_unseen_reads(rank: int) -> list[bool]:
    """A scripted module reads its parameters without any Python function."""
    theirs, module = with_scripted_layer(), with_scripted_layer()
    models = DistributedDataParallel(theirs), PlannedDataParallel(module)
    models[1].synchronizer.load(crossing(backwards(mixed(module, 2))))
    for step in range(5):
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0)
    return [
        position in models[1].synchronizer.cross_step.unseen
        for position in range(len(list(module.parameters())))
    ]


def test_variables_without_detectable_reads_do_not_cross_the_step() -> None:
    for embedding, scripted_weight, scripted_bias, weight, bias in run_world(check_unseen_reads, 2):
        assert scripted_weight and scripted_bias
        assert not (embedding or weight or bias)


def check_compiled(rank: int) -> str:
    torch.manual_seed(0)
    module = Tied()
    theirs, mine = DistributedDataParallel(copy.deepcopy(module)), PlannedDataParallel(module)
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
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    with pytest.raises(InvalidStrategy) as refusal:
        mine.synchronizer.load(plan)
    return str(refusal.value)


def test_compiled_models_do_not_cross_the_step() -> None:
    for refusal in run_world(check_compiled, 2):
        assert "torch.compile" in refusal


# -- garbage


def check_garbage(rank: int) -> None:
    gc.unfreeze()  # what the process came with
    model = PlannedDataParallel(Tied())
    within = uniform(model.module, 2)
    frozen = []
    for wanted in (replace(within, cross_step=True), within, replace(within, cross_step=True)):
        model.synchronizer.load(wanted)
        frozen.append(gc.get_freeze_count() > 0)
    model.synchronizer.close()
    assert frozen == [True, False, True] and gc.get_freeze_count() == 0


def test_objects_are_frozen_for_the_collector_only_under_cross_step_plans() -> None:
    run_world(check_garbage, 2)
