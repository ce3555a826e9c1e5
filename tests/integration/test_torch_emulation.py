"""Emulated accelerators in real processes: recorded gradients at profiled times, for every kind of
model, under DDP and plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from emulated_models import Forbidden, emulated, profile_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_plans import Tied, loss_of, mixed, uniform
from torch_world import run_world

from autotune.errors import AutotuneError
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.pytorch import emulation
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.emulation import MOST_RECORDED_PASSES, EmulatedAccelerator
from runtime_rewriter.pytorch.reads import is_watched


def gradients_of(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.to_dense().clone() for p in module.parameters()]


def assert_same(mine: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


# -- gradients


@dataclass
class Shaped:
    logits: Tensor
    hidden: dict[str, Any]


class Cache:
    """A script's own class, with tensors that DDP cannot find."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class Many(nn.Module):
    """Several outputs in a dataclass, with a tensor of indices, a constant and an object of the
    script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Shaped:
        hidden = torch.tanh(self.a(x))
        return Shaped(
            self.b(hidden),
            {
                "hidden": [hidden],
                "best": hidden.argmax(1),
                "cache": Cache(hidden * 2),
                "scale": 2.0,
            },
        )


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x))


class Partly(nn.Module):
    """`which`: the branch that a rank uses; no rank uses the third."""

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
    return (
        out.logits.square().sum() * out.hidden["scale"]
        + out.hidden["hidden"][0].sum()
        + out.hidden["cache"].keys.sum()
    )


def ones(rank: int) -> Tensor:
    return torch.full((2, 4), 1.0 + rank)


KINDS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int, int], Tensor], dict[str, Any]]
] = {
    "tied": (Tied, loss_of, {}),
    "outputs": (Many, many_loss, {}),
    "sparse": (
        Sparse,
        lambda model, rank, step: model(torch.tensor([rank, 2, 2])).square().sum(),
        {},
    ),
    "unused": (
        Partly,
        lambda model, rank, step: model(ones(rank), rank % 2).sum(),
        {"find_unused_parameters": True},
    ),
    "static": (Tied, loss_of, {"static_graph": True}),
    "views": (Tied, loss_of, {"gradient_as_bucket_view": True}),
    "dtypes": (Reduced, lambda model, rank, step: model(torch.full((3,), 1.0 + rank)), {}),
}


def check_gradients(rank: int, kind: str) -> None:
    """Every later step returns the recorded step's averages, under DDP, under plans and back
    again."""
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
    plans = [
        None,
        uniform(model.module, 2),
        mixed(model.module, 2),
        uniform(model.module, 2, Synchronizer.PARAMETER_SERVER),
        None,
    ]
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


def test_a_plain_module_is_emulated_and_its_forward_restored() -> None:
    run_world(check_attached, 2)


def check_compiled(rank: int) -> None:
    torch.manual_seed(0)
    inner = Forbidden(nn.Linear(4, 4))
    models: tuple[Any, ...] = (
        torch.compile(PlannedDataParallel(inner), backend="eager"),
        PlannedDataParallel(torch.compile(inner, backend="eager")),
    )
    for model in models:
        model(ones(rank)).sum().backward()
        synchronizer = (
            model.synchronizer
            if isinstance(model, PlannedDataParallel)
            else model._orig_mod.synchronizer
        )
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


# -- times


# -- batches and evaluations


# -- refusals


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
        return checkpoint(
            self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True
        )


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
        for size in range(1, MOST_RECORDED_PASSES + 3):
            shapes(torch.ones(size, 4)).sum().backward()

    told["shapes"] = refusal(every_shape)
    twice = fresh(nn.Linear(4, 4))
    twice(ones(rank)).sum().backward()

    def both() -> None:
        (twice(ones(rank)).sum() + twice(ones(rank)).sum()).backward()

    told["both"] = refusal(both)
    return told


def test_modules_that_cannot_be_emulated_are_refused_with_the_reason() -> None:
    for told in run_world(check_refusals, 2):
        assert "transfers of its own" in told["transfers"]
        assert "input of the model requires a gradient; detach it" in told["input"]
        assert "use checkpoint(use_reentrant=False)" in told["reentrant"]
        assert f"at most {MOST_RECORDED_PASSES} kinds of batches" in told["shapes"]
        assert "several forward passes" in told["both"]


def check_other_profile(rank: int) -> str:
    model = PlannedDataParallel(nn.Linear(4, 4))
    timetable = timetable_of(profile_of(model.module))
    renamed = replace(timetable, ready=tuple((f"old.{name}", at) for name, at in timetable.ready))
    return refusal(lambda: EmulatedAccelerator(model.synchronizer, renamed))


def test_the_profile_of_another_model_is_refused() -> None:
    assert all(
        "they differ in bias, old.bias, old.weight" in told
        for told in run_world(check_other_profile, 2)
    )


# -- updates


def check_updates(rank: int, crossing: bool) -> None:
    model = PlannedDataParallel(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def step() -> list[Tensor | None]:
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.step()
        model.synchronizer.cross_step.flush()
        return gradients_of(model.module)

    step()  # a plan that crosses the step must have seen one
    plan = uniform(model.module, 2)
    model.synchronizer.load(replace(plan, cross_step=crossing))
    accelerator = emulated(model.synchronizer)
    recorded = step()
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        assert_same(step(), recorded)
        assert_same([parameter.detach().clone() for parameter in model.parameters()], before)
    assert accelerator is model.synchronizer.accelerator
    model.synchronizer.emulate(None)
    step()
    assert not any(
        torch.equal(parameter, old)
        for parameter, old in zip(model.parameters(), before, strict=True)
    )
    model.synchronizer.close()


@pytest.mark.parametrize("crossing", [False, True])
def test_optimizers_find_no_gradients_under_emulation_but_scripts_do(crossing: bool) -> None:
    run_world(check_updates, 2, crossing)


def check_reads_are_last(rank: int) -> None:
    model = PlannedDataParallel(Tied())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.step()

    step()
    model.synchronizer.load(replace(uniform(model.module, 2), cross_step=True))
    accelerator = emulated(model.synchronizer)
    for _ in range(2):
        step()
    done: list[str] = []
    read, link, connect = (
        accelerator._read_variables,
        emulation._HandOut.apply,
        emulation._Outputs.apply,
    )
    waiting = [is_watched(parameter) for parameter in model.parameters()]

    def reads() -> None:
        assert (
            any(waiting) and [is_watched(parameter) for parameter in model.parameters()] == waiting
        )  # nothing was read before
        done.append("read")
        read()

    def linked(*args: object) -> Tensor:
        done.append("link")
        return link(*args)

    accelerator._read_variables = reads  # type: ignore[method-assign]

    def connected(*args: object) -> tuple[Tensor, ...]:
        done.append("outputs")
        return connect(*args)

    emulation._HandOut.apply = linked  # type: ignore[method-assign]
    emulation._Outputs.apply = connected  # type: ignore[method-assign]
    step()
    assert len(done) > 2 and done == ["link"] * (len(done) - 2) + ["outputs", "read"]
    model.synchronizer.close()


def test_a_played_pass_has_no_work_left_after_its_last_read() -> None:
    run_world(check_reads_are_last, 2)
