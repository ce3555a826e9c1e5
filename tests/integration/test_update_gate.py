"""The gate of updates that cross the step: sound ones pass, and every kind of wrong one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch_plans import Tied, loss_of, mixed
from torch_world import on_ranks

from runtime_rewriter.pytorch.cross_step import CrossStepUpdates
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.optimizer_guard import attributes_of
from runtime_rewriter.pytorch.update_gate import UpdateGate
from runtime_rewriter.pytorch.updates import DueUpdate
from runtime_rewriter.rank.activities import GATED_UPDATES, NumericsFailure, TrialRun

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, 0.01),
}


def crossing_model() -> PlannedDataParallel:
    model = PlannedDataParallel(Tied())
    model.synchronizer.load(replace(mixed(model.module, 2), cross_step=True))
    # Nothing is applied before it is read, however fast messages are.
    under_way = model.synchronizer.cross_step._under_way
    under_way.next_arrived = lambda: False  # type: ignore[method-assign]
    return model


def train(
    model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: int, first: int = 0
) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        schedule.step()


def gated(rank: int, build: Callable[[Any], torch.optim.Optimizer]) -> UpdateGate:
    torch.manual_seed(0)
    model = crossing_model()
    optimizer = build(model.parameters())
    train(model, optimizer, rank, 3)
    cross_step = model.synchronizer.cross_step
    cross_step.flush()
    names, buffers = model.synchronizer.names, lambda: list(model.module.buffers())
    gate = cross_step.gate = UpdateGate(names, buffers, 3)
    train(model, optimizer, rank, 5, first=3)
    model.synchronizer.close()
    return gate


@on_ranks(2, each=OPTIMIZERS)
def test_sound_updates_pass_and_all_are_compared(rank: int, name: str) -> None:
    gate = gated(rank, OPTIMIZERS[name])
    assert gate.mismatch is None and not gate.active
    checked, of_step = gate.checked, len(list(Tied().parameters()))
    assert checked == 3 * of_step, f"{checked} of {3 * of_step}"


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


_APPLY = DueUpdate.apply


def twice(self: DueUpdate, members: Any) -> None:
    _APPLY(self, members)
    _APPLY(self, members)


def with_later_rate(self: DueUpdate, members: Any) -> None:
    hyperparameters = tuple({**group, "lr": group["lr"] * 0.9} for group in self.hyperparameters)
    _APPLY(replace(self, hyperparameters=hyperparameters), members)


def with_own_state(self: DueUpdate, members: Any) -> None:
    _APPLY(self, members)
    for chosen in members.values():
        for parameter, _ in chosen:
            states = attributes_of(self.optimizer)["state"]
            states[parameter]["momentum_buffer"].mul_(1.5)


def never(self: DueUpdate, members: Any) -> None:
    """Apply nothing."""


WRONG = {
    "twice": (twice, "left another parameter"),
    "later learning rate": (with_later_rate, "left another parameter"),
    "state": (with_own_state, "left another optimizer state"),
    "never": (never, "left another parameter"),
}


@on_ranks(2, each=WRONG)
def test_wrong_updates_are_found(rank: int, name: str) -> None:
    apply, problem = WRONG[name]
    with changed(DueUpdate, "apply", apply):
        gate = gated(rank, OPTIMIZERS["momentum"])
    assert gate.mismatch is not None and problem in gate.mismatch


@on_ranks(2)
def test_updates_that_are_never_applied_are_counted(rank: int) -> None:
    def lost(self: CrossStepUpdates, done: Any) -> None:
        """Apply and report nothing."""

    with changed(CrossStepUpdates, "_update", lost):
        gate = gated(rank, OPTIMIZERS["momentum"])
    assert gate.mismatch is not None and "was never applied" in gate.mismatch


@on_ranks(2, each=[True, False])
def test_a_trial_fails_over_wrong_updates(rank: int, wrong: bool) -> None:
    torch.manual_seed(0)
    model = crossing_model()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    train(model, optimizer, rank, 3)
    trial = TrialRun(None, 1, 2, crossing=model.synchronizer)
    finished = []
    with changed(DueUpdate, "apply", twice if wrong else _APPLY):
        for step in range(1 + GATED_UPDATES + 1 + 2):
            train(model, optimizer, rank, 1, first=step)
            model.synchronizer.cross_step.forward_begins()
            model.synchronizer.cross_step.forward_ended()
            if wrong and step == 1:
                with pytest.raises(NumericsFailure, match="left another parameter"):
                    trial.step_finished(0.1, True)
                break
            finished.append(trial.step_finished(0.1, True))
    if not wrong:
        assert finished == [False] * (1 + GATED_UPDATES + 2) + [True]
        assert len(trial.answer().step_s) == 2, "gated steps are not timed"
    model.synchronizer.close()
