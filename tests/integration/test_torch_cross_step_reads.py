"""Scripts that cross-step synchronization must survive: unusual reads, modes, exceptions, exits."""

from __future__ import annotations

import copy
import io
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from torch_plans import mixed, taken_in_when_read, uniform
from torch_world import on_ranks, seeded

from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel

Models = list[Any]
Scenario = Callable[[Models, int], list[Any]]
"""Trains torch's DDP and ours in the same way; what it saw of each, to be compared."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def data(rank: int, step: int) -> Tensor:
    return torch.randn(5, 6, generator=seeded(1000 * rank + step))


class Ballasted(nn.Module):
    """A large variable, read last, delays the messages behind its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.ballast = nn.Parameter(torch.zeros(2**19))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0 * self.ballast[0]


def crossing(plan: Plan) -> Plan:
    """A plan in the worst order: the ballast first, and the first variable read last."""
    light_last = sorted(
        plan.messages[::-1], key=lambda m: all(part.variable != "ballast" for part in m.slices)
    )
    return replace(plan, cross_step=True, messages=tuple(light_last))


def both(make: Callable[[], nn.Module], **options: Any) -> Models:
    """The same model under torch's DDP and under ours; not a copy, which some cannot be."""
    models: list[Any] = []
    for wrap in (DistributedDataParallel, PlannedDataParallel):
        torch.manual_seed(0)
        models.append(wrap(make(), **options))
    return models


def train(model: Any, optimizer: Any, rank: int, steps: int, loss: Any = None) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        (model(data(rank, step)).square().mean() if loss is None else loss(model, step)).backward()
        optimizer.step()


def two_losses(models: Models, rank: int) -> list[Any]:
    """A second backward pass over the same graph adds to gradients that are under way."""
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer, rank, 4)
        optimizer.zero_grad()
        out = model(data(rank, 9))
        out.square().mean().backward(retain_graph=True)
        out.sum().backward()
        optimizer.step()
    return []


def autocast(models: Models, rank: int) -> list[Any]:
    """An update is not cast because the forward pass that reads the variable is."""

    def loss(model: Any, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(data(rank, step))
        return out.float().square().mean()

    for model in models:
        train(model, torch.optim.Adafactor(model.parameters(), 0.1), rank, 5, loss)
    return []


def changed_betas(models: Models, rank: int) -> list[Any]:
    """Updates use the hyperparameters at the time of step()."""
    for model in models:
        betas = torch.tensor(0.9), torch.tensor(0.99)
        optimizer = torch.optim.Adam(model.parameters(), 0.1, betas=betas, foreach=False)
        for step in range(6):
            train(model, optimizer, rank, 1, lambda m, _: m(data(rank, step)).square().mean())  # noqa: B023
            betas[0].mul_(0.5)
    return []


def counted(models: Models, rank: int) -> list[Any]:
    """A mode around the forward pass sees the forward pass and no update."""
    counts = []
    for model in models:
        optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], 0.1)
        train(model, optimizer, rank, 4)
        with FlopCounterMode(display=False) as counter:
            model(data(rank, 9))
        counts.append(counter.get_total_flops())
    return counts


def sum_of(model: nn.Module) -> float:
    return sum(float(parameter.detach().sum()) for parameter in model.parameters())


def read_by_threads(models: Models, rank: int) -> list[Any]:
    values = []
    for model in models:
        train(model, torch.optim.SGD(model.parameters(), 0.1), rank, 4)
        with ThreadPoolExecutor(4) as readers:
            values.append(list(readers.map(sum_of, [model] * 4, timeout=80)))
    return values


class Functional(nn.Module):
    """Differentiates by its input inside its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda z: self.net(z).square().sum())(x) + 0 * self.net(x).sum()


class Failing(nn.Module):
    """Has a layer with undetected reads, after a place where it can fail."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.b = torch.jit.script(nn.Linear(8, 8))
        self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.fails:
            raise MemoryError
        return self.c(self.b(hidden))


def failed_forward(models: Models, rank: int) -> list[Any]:
    """The forward pass that learns the reads is interrupted."""
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer, rank, 1)
        model.module.inner.fails = True
        with pytest.raises(MemoryError):
            model(data(rank, 1))
        model.module.inner.fails = False
        train(model, optimizer, rank, 5)
    return []


def plain(models: Models, rank: int) -> list[Any]:
    for model in models:
        train(model, torch.optim.AdamW(model.parameters(), 0.1), rank, 5)
    return []


def without_listeners(models: Models, rank: int) -> list[Any]:
    """Steps without a plan do not prevent crossing the step later; only the first are examined."""
    models[1].synchronizer.load(None)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer, rank, 5)
        if model is models[1]:
            model.synchronizer.load(crossing(mixed(model.module, 2)))
        train(model, optimizer, rank, 5)
    return []


SCENARIOS: dict[str, tuple[Callable[[], nn.Module], Scenario]] = {
    "two losses": (Mlp, two_losses),
    "autocast": (Mlp, autocast),
    "changed betas": (Mlp, changed_betas),
    "counted": (Mlp, counted),
    "threads": (Mlp, read_by_threads),
    "torch.func": (Functional, plain),
    "failed forward": (Failing, failed_forward),
    "without listeners": (Mlp, without_listeners),
}


@on_ranks(2, each=SCENARIOS)
def test_a_script_sees_the_bits_of_ddp(rank: int, name: str) -> None:
    make, scenario = SCENARIOS[name]
    models = both(lambda: Ballasted(make()), find_unused_parameters=make is Functional)
    models[1].synchronizer.load(crossing(mixed(models[1].module, 2)))
    reads = scenario(models, rank)
    if reads:
        torch.testing.assert_close(reads[1], reads[0], rtol=0, atol=0)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0)
    models[1].synchronizer.close()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.relu(self.body(x)))


@contextmanager
def handled_by(number: int, handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """A handler of the signal, in a run in which nothing is received before it is read."""
    before = signal.signal(number, handler)
    try:
        with taken_in_when_read():
            yield
    finally:
        signal.signal(number, before)


@on_ranks(2)
def test_a_signal_handler_saves_the_values_after_their_update(rank: int) -> None:
    """The signal arrives while the training waits for a message, or between two steps."""
    models = both(lambda: Ballasted(Mlp()))
    synchronizer = models[1].synchronizer
    synchronizer.load(crossing(mixed(models[1].module, 2)))
    saved: list[dict[str, Tensor]] = []
    handled = threading.Event()

    def save(number: int, frame: object) -> None:
        saved.append(copy.deepcopy(models[1].module.state_dict()))
        handled.set()

    def interrupt(positions: Sequence[int] = ()) -> None:
        synchronizer.cross_step.before_wait = None
        os.kill(os.getpid(), signal.SIGUSR1)

    with handled_by(signal.SIGUSR1, save):
        for step in range(6):
            for model in models:
                train(model, torch.optim.SGD(model.parameters(), 0.1), rank, 1)
            if step < 4:
                continue
            assert synchronizer.cross_step.pending
            if step == 4:
                synchronizer.cross_step.before_wait = interrupt
                models[1].module.inner.a.weight.sum()
            else:
                interrupt()
            assert handled.wait(60)
            handled.clear()
            expected = models[0].module.state_dict()
            torch.testing.assert_close(saved[-1], expected, rtol=0, atol=0)
            assert signal.getsignal(signal.SIGUSR1) is save
    assert len(saved) == 2
    synchronizer.close()


@on_ranks(2)
def test_ctrl_c_ends_no_update_in_the_middle(rank: int) -> None:
    """It arrives within an update, at a read of its value."""
    models = both(lambda: Ballasted(Mlp()))
    synchronizer = models[1].synchronizer
    synchronizer.load(crossing(mixed(models[1].module, 2)))

    class Interrupting:
        def before_updates(self, *_: object) -> None:
            synchronizer.cross_step.gate = None
            os.kill(os.getpid(), signal.SIGINT)

    with handled_by(signal.SIGINT, signal.default_int_handler):
        for step in range(6):
            optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, rank, 1)
            if step < 4:
                continue
            assert synchronizer.cross_step.pending
            synchronizer.cross_step.gate = Interrupting()
            with pytest.raises(KeyboardInterrupt):
                models[1].module.inner.a.weight.sum()
                threading.Event().wait(60)
            expected = models[0].module.state_dict()
            torch.testing.assert_close(models[1].module.state_dict(), expected, rtol=0, atol=0)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    synchronizer.close()


@on_ranks(2, each=[False, True])
def test_gradients_of_the_output_may_be_taken_before_the_backward_pass(
    rank: int, cross_step: bool
) -> None:
    """A gradient penalty with unused variables."""
    models = both(Heads, find_unused_parameters=True)
    plan = uniform(models[1].module, 2, Synchronizer.REDUCE_SCATTER_ALL_GATHER, groups=6)
    heads_first = sorted(plan.messages, key=lambda m: "heads" not in m.slices[0].variable)
    models[1].synchronizer.load(replace(plan, messages=tuple(heads_first), cross_step=cross_step))
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            x = data(rank, step).requires_grad_()
            out = model(x, (rank + step) % 2)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.square().mean() + slope.square().mean()).backward()
            optimizer.step()
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0)
    models[1].synchronizer.close()


@on_ranks(2)
def test_a_synchronized_module_can_be_copied_and_saved(rank: int) -> None:
    torch.manual_seed(0)
    module = Mlp()
    attach(module, crossing(mixed(module, 2)))
    train(module, torch.optim.SGD(module.parameters(), 0.1), rank, 4)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for copied in (copy.deepcopy(module), torch.load(saved, weights_only=False)):
        torch.testing.assert_close(copied.state_dict(), module.state_dict(), rtol=0, atol=0)
        copied(data(rank, 0)).sum().backward()  # local: a copy is synchronized by nobody
