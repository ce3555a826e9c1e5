"""Emulated steps in real processes take the profile's times, whatever else the script does."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from emulated_models import Forbidden, emulated
from torch import Tensor, nn
from torch_plans import uniform
from torch_world import on_ranks

from runtime_rewriter.pytorch.ddp import PlannedDataParallel


class SlowStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class StepTimes:
    """Records the times of boundaries, and whether the steps before them were clean."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.clean: list[bool] = []

    def on_boundary(self, now_s: float, clean: bool) -> None:
        self.at_s.append(now_s)
        self.clean.append(clean)

    def on_backward_end(self) -> None:
        pass


TIMES = {"forward_s": 0.05, "backward_s": 0.07, "update_s": 0.03}


@on_ranks(2, each=[False, True])
def test_a_step_takes_at_least_its_profiled_time_and_gradients_follow_its_order(
    rank: int, planned: bool
) -> None:
    model = PlannedDataParallel(SlowStack())
    steps = StepTimes()
    model.synchronizer.listeners.append(steps)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if planned:
        model.synchronizer.load(uniform(model.module, 2))
    accelerator = emulated(model.synchronizer, **TIMES)
    order: list[str] = []
    ready_s: list[float] = []

    def ready(name: str, parameter: Tensor) -> None:
        order.append(name)
        ready_s.append(time.perf_counter())

    for name, parameter in model.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(ready, name))
    for _ in range(5):
        optimizer.zero_grad()
        order.clear()
        ready_s.clear()
        loss = model(torch.ones(4, 8)).sum()
        start_s = time.perf_counter()
        loss.backward()
        end_s = time.perf_counter()
        optimizer.step()
    model(torch.ones(4, 8))
    durations = [b - a for a, b in pairwise(steps.at_s)]
    assert steps.clean == [False, True, True, True, True], "only the recorded step is unclean"
    assert all(duration >= 0.149 for duration in durations[1:])
    definition = [name for name, _ in SlowStack().named_parameters()]
    assert order == definition, "the profile's order, which is the reverse of the real one"
    for number, at in enumerate(ready_s, start=1):
        assert at - start_s >= 0.07 * number / 7, "none is ready before its time"
    assert end_s - start_s >= 0.07
    assert 0 <= accelerator.overrun * 0.15 <= 3 * durations[-1], "three waits of one step"


@on_ranks(2)
def test_work_that_takes_longer_than_the_profile_is_reported_as_overrun(rank: int) -> None:
    model = PlannedDataParallel(SlowStack())
    accelerator = emulated(model.synchronizer, forward_s=0.02, backward_s=0.02, update_s=0.01)
    overruns = []
    for step in range(6):
        loss = model(torch.ones(4, 8)).sum()
        overruns.append(accelerator.overrun)
        loss.backward()
        if step > 2:  # an optimizer that takes 6 times its time in the profile
            end_s = time.thread_time() + 0.06
            while time.thread_time() < end_s:
                pass
    assert overruns[5] >= 0.99, "50 ms too long in a step of 50 ms"
    assert overruns[3] >= 0


@on_ranks(2)
def test_the_passes_of_an_accumulated_step_share_its_forward_time(rank: int) -> None:
    """Four passes of 0.25 s each would take a second."""
    model = PlannedDataParallel(SlowStack())
    steps = StepTimes()
    model.synchronizer.listeners.append(steps)
    emulated(model.synchronizer, forward_s=0.2, backward_s=0.05, update_s=0.0)
    for _ in range(4):
        with model.no_sync():
            for _ in range(3):
                model(torch.ones(4, 8)).sum().backward()
        model(torch.ones(4, 8)).sum().backward()
    model(torch.ones(4, 8))
    assert 0.249 <= min(b - a for a, b in pairwise(steps.at_s[1:])) < 0.95


@on_ranks(2)
def test_a_new_batch_shape_is_recorded_once_and_validation_is_computed(rank: int) -> None:
    model = PlannedDataParallel(Forbidden(SlowStack()))
    steps = StepTimes()
    model.synchronizer.listeners.append(steps)
    emulated(model.synchronizer)
    for step in range(6):
        size = 3 if step in (2, 4) else 8  # the last batch of an epoch
        output = model(torch.ones(size, 8))
        assert output.shape == (size, 8)
        output.mul_(2.0).sum().backward()  # the script may write into what it gets
        if step == 5:
            model(torch.ones(8, 8))  # a pass that no backward pass follows
            with torch.no_grad():
                model(torch.ones(8, 8))
    model(torch.ones(8, 8)).sum().backward()
    model(torch.ones(8, 8))
    assert steps.clean == [False, True, False, True, True, True, False]
    assert model.module.computed == 3


@on_ranks(2)
def test_an_update_across_the_step_takes_its_time_when_its_average_is_flushed(rank: int) -> None:
    """The forward pass is later by the waits for messages and, in all, by the update."""
    model = PlannedDataParallel(SlowStack())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    cross_step = model.synchronizer.cross_step

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    step()
    model.synchronizer.load(replace(uniform(model.module, 2), cross_step=True))
    accelerator = emulated(model.synchronizer, **TIMES)
    # Messages, however fast, are taken in only when a variable is read.
    cross_step._under_way.next_arrived = lambda: False  # type: ignore[method-assign]
    for _ in range(2):
        step()
    assert accelerator._pending_updates_s() == pytest.approx(TIMES["update_s"])
    later_s: list[float] = []
    read = accelerator._read_variables

    def reads() -> None:
        assert accelerator._step_start_s is not None
        began_s, waited_s = accelerator._step_start_s, cross_step.waited_s
        read()
        waited_s = cross_step.waited_s - waited_s
        later_s.append(accelerator._step_start_s - began_s - waited_s)

    accelerator._read_variables = reads  # type: ignore[method-assign]
    step()
    assert later_s == [pytest.approx(TIMES["update_s"], rel=1e-6)]
    model.synchronizer.close()
