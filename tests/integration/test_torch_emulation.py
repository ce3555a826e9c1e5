"""Emulated accelerators in real processes: recorded gradients under DDP and under plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from emulated_models import Forbidden, emulated, profile_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.checkpoint import checkpoint
from torch_plans import Tied, loss_of, mixed, uniform
from torch_world import on_ranks

from autotune.errors import AutotuneError, InvalidStrategy
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


def assert_repeats(module: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Three steps give the same gradients."""
    steps = []
    for _ in range(3):
        module.zero_grad()
        loss().backward()
        steps.append(gradients_of(module))
    assert_same(steps[0], steps[1])
    assert_same(steps[0], steps[2])


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
    """Outputs in a dataclass: tensors, indices, a constant and an object of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Shaped:
        hidden = torch.tanh(self.a(x))
        more = {"best": hidden.argmax(1), "cache": Cache(hidden * 2), "scale": 2.0}
        return Shaped(self.b(hidden), {"hidden": [hidden], **more})


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
    hidden = out.hidden["hidden"][0].sum() + out.hidden["cache"].keys.sum()
    return out.logits.square().sum() * out.hidden["scale"] + hidden


def ones(rank: int) -> Tensor:
    return torch.full((2, 4), 1.0 + rank)


def rows_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(torch.tensor([rank, 2, 2])).square().sum()


def branch_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(ones(rank), rank % 2).sum()


def typed_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(torch.full((3,), 1.0 + rank))


Loss = Callable[[nn.Module, int, int], Tensor]
KINDS: dict[str, tuple[Callable[[], nn.Module], Loss, str]] = {
    "tied": (Tied, loss_of, ""),
    "outputs": (Many, many_loss, ""),
    "sparse": (Sparse, rows_loss, ""),
    "unused": (Partly, branch_loss, "find_unused_parameters"),
    "static": (Tied, loss_of, "static_graph"),
    "views": (Tied, loss_of, "gradient_as_bucket_view"),
    "batched": (Tied, loss_of, "batched_grad_copy"),
    "dtypes": (Reduced, typed_loss, ""),
}


@on_ranks(2, each=KINDS)
def test_emulated_steps_give_the_average_of_the_recorded_gradients_bitwise(
    rank: int, kind: str
) -> None:
    """Also under DDP after plans."""
    build, loss, option = KINDS[kind]
    options: dict[str, Any] = {option: True} if option else {}
    torch.manual_seed(0)
    model = PlannedDataParallel(Forbidden(build()), bucket_cap_mb=0.0001, **options)

    def step() -> list[Tensor | None]:
        model.zero_grad()
        loss(model, rank, 0).backward()
        return gradients_of(model)

    for _ in range(3):  # DDP arranges its buckets
        step()
    emulated(model.synchronizer)
    recorded, computed = step(), model.module.computed
    served = uniform(model.module, 2, Synchronizer.PARAMETER_SERVER)
    for plan in (None, uniform(model.module, 2), mixed(model.module, 2), served, None):
        model.synchronizer.load(plan)
        for _ in range(2):
            assert_same(step(), recorded)
    assert model.module.computed == computed, "nothing was computed after the recorded step"
    model.synchronizer.emulate(None)
    step()
    assert model.module.computed == computed + 1


@on_ranks(2)
def test_a_communication_hook_of_the_script_runs_in_emulated_steps(rank: int) -> None:
    model = PlannedDataParallel(Forbidden(Tied()))
    model.register_comm_hook(None, fp16_compress_hook)

    def step() -> list[Tensor | None]:
        model.zero_grad()
        loss_of(model, rank, 0).backward()
        return gradients_of(model)

    step()
    emulated(model.synchronizer)
    recorded, computed = step(), model.module.computed
    for _ in range(2):
        gradients = step()
        assert_same(gradients, recorded)
        assert all(torch.equal(one, one.half().float()) for one in gradients if one is not None)
    assert model.module.computed == computed
    with pytest.raises(InvalidStrategy, match="the script registered a communication hook"):
        model.synchronizer.load(uniform(model.module, 2))


@on_ranks(2)
def test_accumulated_gradients_are_those_of_real_accumulation(rank: int) -> None:
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


@on_ranks(2)
def test_a_plain_module_is_emulated_and_its_forward_restored(rank: int) -> None:
    torch.manual_seed(0)
    module = Forbidden(Tied())
    synchronizer = attach(module, uniform(module, 2))
    emulated(synchronizer)
    assert_repeats(module, lambda: loss_of(module, rank, 0))
    assert module.computed == 1
    with torch.no_grad():
        module(torch.arange(8))
    assert module.computed == 2, "validation is computed"
    synchronizer.close()
    assert "forward" not in vars(module)
    loss_of(module, rank, 0).backward()
    assert module.computed == 3


@on_ranks(2)
def test_compiled_models_are_emulated(rank: int) -> None:
    torch.manual_seed(0)
    inner = Forbidden(nn.Linear(4, 4))
    outside: Any = torch.compile(PlannedDataParallel(inner), backend="eager")
    inside = PlannedDataParallel(torch.compile(inner, backend="eager"))
    for model, planned in ((outside, outside._orig_mod), (inside, inside)):

        def loss(model: Any = model) -> Tensor:
            return model(ones(rank)).sum()

        loss().backward()
        emulated(planned.synchronizer)
        assert_repeats(model, loss)
        planned.synchronizer.emulate(None)


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
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(AutotuneError) as caught:
        action()
    return str(caught.value)


@on_ranks(2)
def test_modules_that_cannot_be_emulated_are_refused_with_the_reason(rank: int) -> None:
    def fresh(module: nn.Module, **options: Any) -> PlannedDataParallel:
        model = PlannedDataParallel(module, **options)
        emulated(model.synchronizer)
        return model

    assert "transfers of its own" in refusal(lambda: fresh(Exchanging())(ones(rank)))
    with_gradient = ones(rank).requires_grad_()
    reason = "input of the model requires a gradient; detach it"
    assert reason in refusal(lambda: fresh(nn.Linear(4, 4))(with_gradient))
    model = fresh(Reentrant(), static_graph=True)
    model(ones(rank)).sum().backward()
    assert "use checkpoint(use_reentrant=False)" in refusal(lambda: model(ones(rank)))
    shapes = fresh(nn.Linear(4, 4))

    def every_shape() -> None:
        for size in range(1, MOST_RECORDED_PASSES + 3):
            shapes(torch.ones(size, 4)).sum().backward()

    assert f"at most {MOST_RECORDED_PASSES} kinds of batches" in refusal(every_shape)
    twice = fresh(nn.Linear(4, 4))
    twice(ones(rank)).sum().backward()

    def both() -> None:
        (twice(ones(rank)).sum() + twice(ones(rank)).sum()).backward()

    assert "several forward passes" in refusal(both)


@on_ranks(2)
def test_the_profile_of_another_model_is_refused(rank: int) -> None:
    model = PlannedDataParallel(nn.Linear(4, 4))
    timetable = timetable_of(profile_of(model.module))
    renamed = replace(timetable, ready=tuple((f"old.{name}", at) for name, at in timetable.ready))
    error = refusal(lambda: EmulatedAccelerator(model.synchronizer, renamed))
    assert "they differ in bias, old.bias, old.weight" in error


# -- updates


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@on_ranks(2, each=[False, True])
def test_optimizers_find_no_gradients_under_emulation_but_scripts_do(
    rank: int, crossing: bool
) -> None:
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
        before = values(model)
        assert_same(step(), recorded)
        assert_same(values(model), before)
    assert accelerator is model.synchronizer.accelerator
    model.synchronizer.emulate(None)
    step()
    assert not any(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
    model.synchronizer.close()


@on_ranks(2)
def test_a_played_pass_has_no_work_left_after_its_last_read(rank: int) -> None:
    model = PlannedDataParallel(Tied())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.step()

    step()
    model.synchronizer.load(replace(uniform(model.module, 2), cross_step=True))
    accelerator = emulated(model.synchronizer)
    # Messages, however fast, are taken in only when a variable is read.
    under_way = model.synchronizer.cross_step._under_way
    under_way.next_arrived = lambda: False  # type: ignore[method-assign]
    for _ in range(2):
        step()
    done: list[str] = []
    read, link = accelerator._read_variables, emulation._HandOut.apply
    connect = emulation._Outputs.apply
    waiting = [is_watched(parameter) for parameter in model.parameters()]

    def reads() -> None:
        assert any(waiting), "nothing was read before"
        assert [is_watched(parameter) for parameter in model.parameters()] == waiting
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
