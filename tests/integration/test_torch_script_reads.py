"""A profile names the variables that the script itself reads between two steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from emulated_models import profile_of
from test_torch_profile import Profiling
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_plans import mixed, taken_in_when_read
from torch_world import on_ranks, run_world

from autotune.workload import Workload
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.emulation import EmulatedAccelerator

STEPS = 8


@dataclass
class Step:
    """What a script's own lines between two steps can use."""

    number: int
    rank: int
    net: nn.Sequential
    optimizer: Any
    kept: dict[str, Any]


def first(step: Step) -> Tensor:
    weight = step.net[0].weight
    assert isinstance(weight, Tensor)
    return weight


def average(step: Step) -> None:
    if not step.kept:
        step.kept["model"] = AveragedModel(step.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step.kept["model"].update_parameters(step.net)


def keep_data(step: Step) -> None:
    step.kept["data"] = first(step).data


def evaluate(step: Step) -> None:
    step.net[1].eval()(torch.ones(2, 4))
    step.net[1].train()


ALL = {"0.weight", "0.bias", "1.weight", "1.bias"}
AFTER: dict[str, tuple[Callable[[Step], object], set[str]]] = {
    "nothing": (lambda step: None, set()),
    "average": (average, ALL),
    "norm": (lambda step: first(step).norm(), {"0.weight"}),
    "norm on one rank": (lambda step: step.rank or first(step).norm(), {"0.weight"}),
    "norm now and then": (lambda step: step.number % 3 or first(step).norm(), set()),
    "gradient": (lambda step: step.net[1].bias.grad.norm(), {"1.bias"}),  # type: ignore[operator]
    "gradients set to zero": (lambda step: step.optimizer.zero_grad(set_to_none=False), ALL),
    "shapes": (lambda step: [parameter.shape for parameter in step.net.parameters()], set()),
    "state": (lambda step: step.optimizer.state[first(step)]["momentum_buffer"].norm(), ALL),
    "alias": (keep_data, {"0.weight"}),
    "evaluation of a part": (evaluate, ALL),
}


def profiled(rank: int, after: Callable[[Step], object], alone: bool = False) -> Workload:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = PlannedDataParallel(net)
    profiling = Profiling(model, 3, alone)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    kept: dict[str, Any] = {}
    for number in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        after(Step(number, rank, net, optimizer, kept))
    assert profiling.workload is not None
    assert type(optimizer) is torch.optim.SGD
    assert {type(p) for p in net.parameters()} == {nn.Parameter}, "nothing stays watched"
    model.synchronizer.close()
    return profiling.workload


def profiles(rank: int) -> dict[str, Workload]:
    found = {name: profiled(rank, after) for name, (after, _) in AFTER.items()}
    return found | {"alone": profiled(rank, average, alone=True)}


def test_a_profile_names_what_the_script_reads_between_steps() -> None:
    workloads, others = run_world(profiles, 2)
    assert workloads == others
    expected = {name: read for name, (_, read) in AFTER.items()} | {"alone": ALL}
    assert {name: reads(workload) for name, workload in workloads.items()} == expected
    for workload in workloads.values():
        times_s = [v.script_read_s for v in workload.variables if v.script_read_s is not None]
        assert all(0 <= at_s <= 10 * workload.update_s for at_s in times_s)


def reads(workload: Workload) -> set[str]:
    return {v.name for v in workload.variables if v.script_read_s is not None}


class Boundaries:
    """Times from the end of the emulated backward pass to that of the step, and waits of reads."""

    def __init__(self, accelerator: EmulatedAccelerator) -> None:
        self.accelerator = accelerator
        self._synchronized_s, self._waited_before_s = math.inf, 0.0
        self.after_s: list[float] = []
        self.waited_s: list[float] = []

    def on_backward_end(self) -> None:
        assert self.accelerator._synchronized_s is not None
        self._synchronized_s = self.accelerator._synchronized_s
        self._waited_before_s = self.accelerator._waited_before_s

    def on_boundary(self, now_s: float, clean: bool) -> None:
        waited_s = self.accelerator._synchronizer.cross_step.waited_s
        self.after_s.append(now_s - self._synchronized_s)
        self.waited_s.append(waited_s - self._waited_before_s)


@on_ranks(2)
def test_an_emulated_read_of_the_script_delays_what_follows_it(rank: int) -> None:
    """Rank 0 reads while it waits for rank 1, and then needs the rest of the profile's update."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = PlannedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    profile = profile_of(net, forward_s=0.01, backward_s=0.01, update_s=0.05)
    variables = tuple(replace(variable, script_read_s=0.02) for variable in profile.variables)
    timetable = timetable_of(replace(profile, variables=variables))
    boundaries = Boundaries(EmulatedAccelerator(model.synchronizer, timetable))
    with taken_in_when_read():
        for step in range(8):
            if step == 2:
                model.synchronizer.load(replace(mixed(net, 2), cross_step=True))
                model.synchronizer.emulate(boundaries.accelerator)
                model.synchronizer.listeners.append(boundaries)
            optimizer.zero_grad()
            begun_s = time.perf_counter()
            loss = model(torch.ones(3, 4)).sum()
            time.sleep(0.1 if rank == 1 and step < 7 else 0)
            loss.backward()
            optimizer.step()
            crosses = model.synchronizer.cross_step.pending
            first_weight = next(net.parameters())
            first_weight.norm()
            read_s = time.perf_counter()
            if step == 7 and rank == 0:
                assert crosses, "otherwise nothing was tested"
                # Each pass takes 0.01 s by the profile, and the read follows 0.02 s later.
                assert read_s >= begun_s + 0.039, "not before the profile's read"
        model(torch.ones(3, 4))
    waited_s, after_s = boundaries.waited_s[3:6], boundaries.after_s[3:6]
    assert rank or max(waited_s) > 0, "otherwise nothing was tested"
    for waited, after in zip(waited_s, after_s, strict=True):
        assert after >= waited + 0.05 - 1e-6, (waited_s, after_s)
