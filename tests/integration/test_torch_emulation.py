"""Emulated accelerators in real processes: recorded gradients at profiled times, for every kind of model, under DDP and plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_plans import Tied, loss_of, mixed, uniform
from torch_world import run_world

from autotune.errors import AutotuneError
from autotune.strategy_space.strategy import Synchronizer
from autotune.workload import Workload
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.ddp import PlannedDataParallel, attach
from runtime_rewriter.pytorch.emulation import MOST_RECORDINGS, EmulatedAccelerator
from runtime_rewriter.pytorch.hooks import GradientSynchronizer


def profile_of(module: nn.Module, forward_s: float = 0.0, backward_s: float = 1e-4, update_s: float = 0.0) -> Workload:
    """Gradients in definition order (the reverse of a real pass), evenly over the backward pass."""
    assumed = assumed_workload(module)
    count = len(assumed.variables)
    timed = tuple(replace(v, ready_s=backward_s * (i + 1) / (count + 1)) for i, v in enumerate(reversed(assumed.variables)))
    return replace(assumed, variables=timed, forward_s=forward_s, backward_s=backward_s, update_s=update_s)


def emulated(synchronizer: GradientSynchronizer, **times: float) -> EmulatedAccelerator:
    accelerator = EmulatedAccelerator(synchronizer, timetable_of(profile_of(synchronizer.module, **times)))
    synchronizer.emulate(accelerator)
    return accelerator


def gradients_of(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.to_dense().clone() for p in module.parameters()]


def assert_same(mine: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


class Forbidden(nn.Module):
    """Computes until it is told not to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.computed = inner, 0

    def forward(self, *inputs: Any) -> Any:
        self.computed += 1
        return self.inner(*inputs)


# -- gradients -------------------------------------------------------------------------------------


@dataclass
class Shaped:
    logits: Tensor
    hidden: dict[str, Any]


class Cache:
    """A class of the script's own, with tensors that DDP cannot find."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class Many(nn.Module):
    """Several outputs in a dataclass, with a tensor of indices, a constant and an object of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Shaped:
        hidden = torch.tanh(self.a(x))
        return Shaped(self.b(hidden), {"hidden": [hidden], "best": hidden.argmax(1), "cache": Cache(hidden * 2), "scale": 2.0})


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x))


class Partly(nn.Module):
    """`which` branch a rank uses; the third is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](x)


class Reduced(nn.Module):
    """float64, bfloat16, complex and empty parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.wide * self.narrow).sum() + (x * self.turn).abs().sum() + self.empty.sum()


def many_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    out = model(ones(rank))
    return out.logits.square().sum() * out.hidden["scale"] + out.hidden["hidden"][0].sum() + out.hidden["cache"].keys.sum()


def ones(rank: int) -> Tensor:
    return torch.full((2, 4), 1.0 + rank)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int, int], Tensor], dict[str, Any]]] = {
    "tied": (Tied, loss_of, {}),
    "outputs": (Many, many_loss, {}),
    "sparse": (Sparse, lambda model, rank, step: model(torch.tensor([rank, 2, 2])).square().sum(), {}),
    "unused": (Partly, lambda model, rank, step: model(ones(rank), rank % 2).sum(), {"find_unused_parameters": True}),
    "static": (Tied, loss_of, {"static_graph": True}),
    "views": (Tied, loss_of, {"gradient_as_bucket_view": True}),
    "dtypes": (Reduced, lambda model, rank, step: model(torch.full((3,), 1.0 + rank)), {}),
}


def check_gradients(rank: int, kind: str) -> None:
    """The recorded step's averages come back from every later step, under DDP, under plans and back again."""
    build, loss, options = KINDS[kind]
    torch.manual_seed(0)
    model = PlannedDataParallel(Forbidden(build()), bucket_cap_mb=0.0001, **options)
    for _ in range(3):  # DDP settles its buckets
        model.zero_grad()
        loss(model, rank, 0).backward()
    emulated(model.synchronizer)
    model.zero_grad()
    loss(model, rank, 0).backward()
    recorded, computed = gradients_of(model), model.module.computed
    plans = [None, uniform(model.module, 2), mixed(model.module, 2), uniform(model.module, 2, Synchronizer.PARAMETER_SERVER), None]
    for plan in plans:
        model.synchronizer.load(plan)
        for _ in range(2):
            model.zero_grad()
            loss(model, rank, 0).backward()
            assert_same(gradients_of(model), recorded)
    assert model.module.computed == computed, "nothing was computed after the recorded step"
    model.synchronizer.emulate(None)
    model.zero_grad()
    loss(model, rank, 0).backward()
    assert model.module.computed == computed + 1


@pytest.mark.parametrize("kind", KINDS)
def test_emulated_steps_give_the_average_of_the_recorded_gradients_bitwise(kind: str) -> None:
    run_world(check_gradients, 2, kind)


def check_accumulation(rank: int) -> None:
    torch.manual_seed(0)
    model = PlannedDataParallel(nn.Linear(4, 4))

    def step() -> list[Tensor | None]:
        model.zero_grad()
        with model.no_sync():
            model(ones(rank)).sum().backward()
        model(ones(rank)).sum().backward()
        return gradients_of(model)

    real = step()
    emulated(model.synchronizer)
    for plan in (None, uniform(model.module, 2)):
        model.synchronizer.load(plan)
        for _ in range(3):
            assert_same(step(), real)


def test_accumulated_gradients_are_those_of_real_accumulation() -> None:
    run_world(check_accumulation, 2)


def check_attached(rank: int) -> None:
    torch.manual_seed(0)
    module = Forbidden(Tied())
    synchronizer = attach(module, uniform(module, 2))
    emulated(synchronizer)
    seen = []
    for _ in range(3):
        module.zero_grad()
        loss_of(module, rank, 0).backward()
        seen.append(gradients_of(module))
    assert module.computed == 1
    assert_same(seen[0], seen[1])
    assert_same(seen[0], seen[2])
    with torch.no_grad():
        module(torch.arange(8))
    assert module.computed == 2, "validation is computed"
    synchronizer.close()
    assert "forward" not in vars(module)
    loss_of(module, rank, 0).backward()
    assert module.computed == 3


def test_a_module_without_ddp_is_emulated_and_gets_its_own_forward_back() -> None:
    run_world(check_attached, 2)


def check_compiled(rank: int) -> None:
    torch.manual_seed(0)
    inner = Forbidden(nn.Linear(4, 4))
    for model in (torch.compile(PlannedDataParallel(inner), backend="eager"), PlannedDataParallel(torch.compile(inner, backend="eager"))):
        model(ones(rank)).sum().backward()
        synchronizer = model.synchronizer if isinstance(model, PlannedDataParallel) else model._orig_mod.synchronizer
        emulated(synchronizer)
        seen = []
        for _ in range(3):
            model.zero_grad()
            model(ones(rank)).sum().backward()
            seen.append(gradients_of(model))
        assert_same(seen[0], seen[1])
        assert_same(seen[0], seen[2])
        synchronizer.emulate(None)


def test_compiled_models_are_emulated() -> None:
    run_world(check_compiled, 2)


# -- times -----------------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Steps:
    """The times of boundaries and whether the steps before them were clean."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.clean: list[bool] = []

    def on_boundary(self, now_s: float, clean: bool) -> None:
        self.at_s.append(now_s)
        self.clean.append(clean)

    def on_backward_end(self, now_s: float) -> None:
        pass


TIMES = {"forward_s": 0.05, "backward_s": 0.07, "update_s": 0.03}


def check_times(rank: int, planned: bool) -> tuple[list[float], list[bool], list[str], list[float], float, float]:
    model = PlannedDataParallel(Stack())
    steps = Steps()
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
    durations = [b - a for a, b in zip(steps.at_s, steps.at_s[1:], strict=False)]
    return durations, steps.clean, list(order), [at - start_s for at in ready_s], end_s - start_s, accelerator.overrun


@pytest.mark.parametrize("planned", [False, True])
def test_a_step_takes_at_least_what_the_profile_says_and_gradients_come_in_its_order(planned: bool) -> None:
    for durations, clean, order, ready_s, backward_s, overrun in run_world(check_times, 2, planned):
        assert clean == [False, True, True, True, True], "only the recorded step is unclean"
        assert all(duration >= 0.149 for duration in durations[1:])
        definition = [name for name, _ in Stack().named_parameters()]
        assert order == definition, "the profile's order, which is the reverse of the real one"
        assert all(at >= 0.07 * (i + 1) / 7 for i, at in enumerate(ready_s)), "none before its time"
        assert backward_s >= 0.07
        assert 0 <= overrun < 10


def check_overrun(rank: int) -> tuple[float, float]:
    model = PlannedDataParallel(Stack())
    accelerator = emulated(model.synchronizer, forward_s=0.02, backward_s=0.02, update_s=0.01)
    seen = []
    for step in range(6):
        loss = model(torch.ones(4, 8)).sum()
        seen.append(accelerator.overrun)
        loss.backward()
        if step > 2:
            end_s = time.process_time() + 0.06
            while time.process_time() < end_s:  # an optimizer that takes 6 times what the profile gives it
                pass
    return seen[3], seen[5]


def test_work_that_takes_longer_than_the_profile_is_reported_as_overrun() -> None:
    for quiet, busy in run_world(check_overrun, 2):
        assert busy >= 0.99, "50 ms too long in a step of 50 ms"
        assert quiet >= 0


def check_accumulated_time(rank: int) -> float:
    model = PlannedDataParallel(Stack())
    steps = Steps()
    model.synchronizer.listeners.append(steps)
    emulated(model.synchronizer, forward_s=0.2, backward_s=0.05, update_s=0.0)
    for _ in range(4):
        with model.no_sync():
            for _ in range(3):
                model(torch.ones(4, 8)).sum().backward()
        model(torch.ones(4, 8)).sum().backward()
    model(torch.ones(4, 8))
    return min(b - a for a, b in zip(steps.at_s[1:], steps.at_s[2:], strict=False))


def test_the_passes_of_an_accumulated_step_share_its_forward_time() -> None:
    # Four passes of 0.25 s each would take a second.
    assert all(0.249 <= fastest < 0.95 for fastest in run_world(check_accumulated_time, 2))


# -- batches and evaluations -----------------------------------------------------------------------


def check_batches(rank: int) -> tuple[list[bool], int]:
    model = PlannedDataParallel(Forbidden(Stack()))
    steps = Steps()
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
    return steps.clean, model.module.computed


def test_a_batch_of_another_shape_is_recorded_when_it_first_comes_and_validation_is_computed() -> None:
    for clean, computed in run_world(check_batches, 2):
        assert clean == [False, True, False, True, True, True, False]
        assert computed == 3


# -- refusals --------------------------------------------------------------------------------------


class Exchanging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum().detach()
        torch.distributed.all_reduce(total)
        return self.layer(x) * total


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0 * self.layer.bias
        return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True)


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(AutotuneError) as caught:
        action()
    return str(caught.value)


def check_refusals(rank: int) -> dict[str, str]:
    told = {}

    def fresh(module: nn.Module, **options: Any) -> PlannedDataParallel:
        made = PlannedDataParallel(module, **options)
        emulated(made.synchronizer)
        return made

    told["transfers"] = refusal(lambda: fresh(Exchanging())(ones(rank)))
    told["input"] = refusal(lambda: fresh(nn.Linear(4, 4))(ones(rank).requires_grad_()))
    model = fresh(Reentrant(), static_graph=True)
    model(ones(rank)).sum().backward()
    told["reentrant"] = refusal(lambda: model(ones(rank)))
    shapes = fresh(nn.Linear(4, 4))

    def every_shape() -> None:
        for size in range(1, MOST_RECORDINGS + 3):
            shapes(torch.ones(size, 4)).sum().backward()

    told["shapes"] = refusal(every_shape)
    twice = fresh(nn.Linear(4, 4))
    twice(ones(rank)).sum().backward()

    def both() -> None:
        (twice(ones(rank)).sum() + twice(ones(rank)).sum()).backward()

    told["both"] = refusal(both)
    return told


def test_what_cannot_be_emulated_is_refused_with_its_reason() -> None:
    for told in run_world(check_refusals, 2):
        assert "transfers of its own" in told["transfers"]
        assert "input of the model requires a gradient; detach it" in told["input"]
        assert "use checkpoint(use_reentrant=False)" in told["reentrant"]
        assert f"at most {MOST_RECORDINGS} kinds of batches" in told["shapes"]
        assert "several forward passes" in told["both"]


def check_other_profile(rank: int) -> str:
    model = PlannedDataParallel(nn.Linear(4, 4))
    timetable = timetable_of(profile_of(model.module))
    renamed = replace(timetable, ready=tuple((f"old.{name}", at) for name, at in timetable.ready))
    return refusal(lambda: EmulatedAccelerator(model.synchronizer, renamed))


def test_the_profile_of_another_model_is_refused() -> None:
    assert all("they differ in bias, old.bias, old.weight" in told for told in run_world(check_other_profile, 2))
