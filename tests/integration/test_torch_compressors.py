"""Error feedback of int8, top-k, PowerSGD and a plugin between real ranks: no gradient is lost."""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_plans import Tied, loss_of, uniform
from torch_world import run_world, seeded

from autotune.errors import InvalidInput, InvalidStrategy
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.hooks import GradientSynchronizer
from runtime_rewriter.pytorch.numerics import GradientGate
from runtime_rewriter.pytorch.observers import BackwardObserver
from runtime_rewriter.rank.apply import apply

FED_BACK = (Compressor.INT8, Compressor.TOP_K, Compressor.POWER_SGD)


class Local(BackwardObserver):
    """Records g_r / w + e_r of every rank in float64."""

    def __init__(self, synchronizer: GradientSynchronizer) -> None:
        self.synchronizer, self.sent = (
            synchronizer,
            [torch.zeros(0, dtype=torch.float64)] * len(synchronizer.names),
        )
        synchronizer.observers.append(self)

    def on_ready(self, index: int, gradient: Tensor | None) -> None:
        self.sent[index] = residual(self.synchronizer, index)
        if gradient is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            self.sent[index] = self.sent[index] + dense.double() / self.synchronizer.ranks.size


def residual(synchronizer: GradientSynchronizer, index: int) -> Tensor:
    found = synchronizer.residuals.of(synchronizer.names[index])
    return (
        torch.zeros_like(synchronizer.parameters[index], dtype=torch.float64)
        if found is None
        else found.double()
    )


def assert_nothing_lost(local: Local, case: object) -> None:
    """Assert that the gradient is the sum over r of g_r / w + e_r - e'_r, with equal bits on all
    ranks.

    Residuals have the shape, strides and dtype of their variables.
    """
    synchronizer = local.synchronizer
    for index, parameter in enumerate(synchronizer.parameters):
        kept = synchronizer.residuals.of(synchronizer.names[index])
        assert kept is None or (kept.shape, kept.stride(), kept.dtype) == (
            parameter.shape,
            parameter.stride(),
            parameter.dtype,
        )
        expected, scale = (
            local.sent[index] - residual(synchronizer, index),
            local.sent[index].abs().amax(),
        )
        dist.all_reduce(expected)
        dist.all_reduce(scale)
        assert parameter.grad is not None
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        worst = float((gradient.double() - expected).abs().amax())
        roundoff = torch.finfo(parameter.dtype).eps
        assert worst <= 16 * roundoff * float(scale), (
            case,
            synchronizer.names[index],
            worst,
            float(scale),
        )
        first = gradient.contiguous()
        dist.broadcast(first, 0)
        assert torch.equal(first, gradient), (case, synchronizer.names[index])


class OddShapes(nn.Module):
    """Channels-last convolutions, matrices of several int8 blocks, vectors, a scalar, float64."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.mix = nn.Linear(24, 91)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.precise = nn.Linear(91, 5, dtype=torch.float64)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.convolution(images).flatten(1) * self.gain
        return self.precise(torch.tanh(self.mix(hidden)).double())


def images(rank: int, step: int) -> Tensor:
    return torch.randn(5, 3, 4, 4, generator=seeded(100 * rank + step))


def check_everything(
    rank: int, partitions: tuple[bool, ...], names: tuple[str, ...] = (*FED_BACK, "none")
) -> None:
    """Residuals remain from one combination to the next, so plan switches are tested, too."""
    torch.manual_seed(0)
    model = PlannedDataParallel(OddShapes())
    synchronizer = model.synchronizer
    local, gate, step = Local(synchronizer), GradientGate(synchronizer), 0
    for kind, partitioned, name in itertools.product(Synchronizer, partitions, names):
        compressor = Compressor(name)
        synchronizer.load(
            uniform(model.module, dist.get_world_size(), kind, compressor, partitioned)
        )
        for _ in range(2):
            gate.arm()
            model.zero_grad(set_to_none=bool(step % 2))
            step += 1
            model(images(rank, step)).square().sum().backward()
            case = (kind, partitioned, compressor, gate.error())
            if compressor is Compressor.NONE:
                assert not synchronizer.residuals, case
            assert gate.error().ok, case
            assert_nothing_lost(local, case)
            if compressor is not Compressor.NONE:
                kept = synchronizer.residuals.of("mix.weight")
                assert kept is not None and float(kept.abs().amax()) > 0, case


@pytest.mark.parametrize(("size", "partitions"), [(2, (True,)), (4, (False, True))])
def test_no_compressor_loses_gradients_by_any_synchronizer_and_partition(
    size: int, partitions: tuple[bool, ...]
) -> None:
    run_world(check_everything, size, partitions)


def check_plugin(rank: int) -> dict[str, float]:
    check_everything(rank, (False, True), ("four_bit", "none"))
    check_not_finite(rank, ("four_bit",))
    return check_convergence(rank, Compressor("four_bit"), 16.0)


def test_a_compressor_of_a_plugin_passes_the_numerics_gate_and_trains(
    monkeypatch: pytest.MonkeyPatch, example_plugin: Path
) -> None:
    monkeypatch.syspath_prepend(str(example_plugin))  # the ranks inherit the path
    found = run_world(check_plugin, 2)[0]
    started = QuadraticTarget(0.0).distance()
    assert found["feedback"] < 0.2 * started < 0.5 * started < found["none"], found


def check_alone(rank: int) -> None:
    model = PlannedDataParallel(OddShapes())
    for compressor in FED_BACK:
        model.synchronizer.load(uniform(model.module, 1, compressor=compressor))
        model.zero_grad()
        model(images(0, 0)).square().sum().backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.module.zero_grad()
        model.module(images(0, 0)).square().sum().backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(got, model.parameters(), strict=True))
        assert not model.synchronizer.residuals


def test_a_rank_alone_sends_nothing_and_loses_nothing() -> None:
    run_world(check_alone, 1)


def place(rank: int, layout: tuple[int, ...]) -> int:
    """Set a launcher's variables for hosts of `layout` ranks; return the rank on its host."""
    for size in layout:
        if rank < size:
            os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(size)
            break
        rank -= size
    return rank


def check_hierarchical(rank: int, layout: tuple[int, ...]) -> None:
    leads = place(rank, layout) == 0
    torch.manual_seed(0)
    model = PlannedDataParallel(OddShapes())
    synchronizer = model.synchronizer
    local, gate, step = Local(synchronizer), GradientGate(synchronizer), 0
    for kind, compressor in itertools.product(
        (Synchronizer.ALL_REDUCE, Synchronizer.PARAMETER_SERVER), FED_BACK
    ):
        flat = uniform(model.module, 4, kind, compressor)
        plan = replace(
            flat,
            messages=tuple(
                replace(m, hierarchical=True, owner=None if m.owner is None else 0)
                for m in flat.messages
            ),
        )
        for chosen in (
            flat,
            plan,
            replace(plan, ring_order=(2, 0, 3, 1)),
        ):  # what waited on other ranks is sent to their leaders
            synchronizer.load(chosen)
            gate.arm()
            model.zero_grad()
            step += 1
            model(images(rank, step)).square().sum().backward()
            assert gate.error().ok, (kind, compressor, gate.error())
            assert_nothing_lost(local, (kind, compressor))
        assert bool(synchronizer.residuals) == leads


@pytest.mark.parametrize("layout", [(2, 2), (3, 1)])
def test_only_leaders_of_hosts_hold_residuals_of_hierarchical_messages(
    layout: tuple[int, ...],
) -> None:
    run_world(check_hierarchical, 4, layout)


# -- training


class QuadraticTarget(nn.Module):
    """A quadratic loss; the ranks' gradients of some columns are large and cancel, as with real
    data."""

    def __init__(self, disagreement: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20, 30))
        self.register_buffer("wanted", torch.randn(20, 30, generator=seeded(3)))
        self.wanted: Tensor
        self.disagreement = disagreement

    def forward(self, rank: int) -> Tensor:
        return (
            0.5 * (self.weight - self.wanted).square().sum()
            + (-1.0) ** rank * self.disagreement * self.weight[:, :4].sum()
        )

    def distance(self) -> float:
        return float((self.weight - self.wanted).detach().norm())


def check_convergence(rank: int, compressor: Compressor, disagreement: float) -> dict[str, float]:
    size, found = dist.get_world_size(), {}
    for name in ("uncompressed", "feedback", "none"):
        module = QuadraticTarget(disagreement)
        applied = apply(module)
        applied.synchronizer.load(
            uniform(
                module, size, compressor=Compressor.NONE if name == "uncompressed" else compressor
            )
        )
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        for _ in range(200):
            optimizer.zero_grad()
            module(rank).backward()
            optimizer.step()
            if name == "none":
                applied.synchronizer.residuals.clear()
        found[name] = module.distance()
    return found


@pytest.mark.parametrize(
    ("compressor", "disagreement"),
    [(Compressor.INT8, 300.0), (Compressor.TOP_K, 6.0), (Compressor.POWER_SGD, 6.0)],
)
def test_training_with_error_feedback_reaches_the_uncompressed_result(
    compressor: Compressor, disagreement: float
) -> None:
    found = run_world(check_convergence, 2, compressor, disagreement)[0]
    started = QuadraticTarget(0.0).distance()
    assert found["uncompressed"] < 1e-3
    if compressor is Compressor.POWER_SGD:
        assert found["feedback"] < 0.02 * started, found
    else:
        assert found["feedback"] < 0.2 * started < 0.5 * started < found["none"], found


def check_switches(rank: int) -> None:
    """The gradients of all steps together have arrived once a plan without a compressor has run."""
    torch.manual_seed(0)
    module = nn.Linear(40, 30)
    applied = apply(module)
    size = dist.get_world_size()
    arrived, computed = torch.zeros(30, 40), torch.zeros(30, 40)
    for last in (Compressor.NONE, Compressor.FP16):
        for number, compressor in enumerate((*FED_BACK, Compressor.TOP_K, last)):
            applied.synchronizer.load(
                uniform(module, size, compressor=compressor, partitioned=bool(number % 2))
            )
            for step in range(3 if compressor is not last else 1):
                x = torch.randn(4, 40, generator=seeded(100 * number + 10 * step + rank))
                module.zero_grad()
                with applied.no_sync():
                    module(x).square().sum().backward()
                computed += module.weight.grad / size
                module.zero_grad()
                module(x).square().sum().backward()
                arrived += module.weight.grad
        assert not applied.synchronizer.residuals
    dist.all_reduce(computed)
    rounding = 2.0**-10 * float(computed.abs().amax())  # of the one step in fp16
    torch.testing.assert_close(arrived, computed, rtol=0, atol=rounding)


def test_nothing_is_lost_when_plans_are_switched() -> None:
    run_world(check_switches, 2)


# -- checkpoints


def check_checkpoint(rank: int) -> None:
    size = dist.get_world_size()
    for compressor in FED_BACK:

        def start(
            compressor: Compressor = compressor,
        ) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
            torch.manual_seed(1)
            module = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20))
            applied = apply(module)
            applied.synchronizer.load(
                uniform(module, size, Synchronizer.PARAMETER_SERVER, compressor, partitioned=True)
            )
            return module, applied, torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)

        def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
            for step in steps:
                optimizer.zero_grad()
                module(
                    torch.randn(6, 30, generator=seeded(10 * step + rank))
                ).square().sum().backward()
                optimizer.step()

        module, applied, optimizer = start()
        train(module, optimizer, range(3))
        saved = io.BytesIO()
        torch.save(
            (module.state_dict(), optimizer.state_dict(), applied.compression_state()), saved
        )
        train(module, optimizer, range(3, 6))
        again, applied, optimizer = start()
        train(again, optimizer, range(50, 52))  # whatever was there before is replaced
        saved.seek(0)
        states = torch.load(saved, weights_only=True)
        again.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        applied.load_compression_state(states[2])
        train(again, optimizer, range(3, 6))
        assert all(
            torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True)
        ), compressor
        with pytest.raises(InvalidInput, match=f"is of rank {rank} of 5"):
            applied.load_compression_state(states[2] | {"world_size": 5})


def test_training_continues_from_a_checkpoint_with_the_same_bits() -> None:
    run_world(check_checkpoint, 2)


# -- what surrounds them


class OptionalBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(20, 30), nn.Linear(20, 30)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always(x) + self.sometimes(x) if both else self.always(x)


def check_unused(rank: int) -> None:
    torch.manual_seed(0)
    model = PlannedDataParallel(OptionalBranch(), find_unused_parameters=True)
    synchronizer = model.synchronizer
    index = synchronizer.names.index("sometimes.weight")
    parameter = synchronizer.parameters[index]
    for kind, compressor in itertools.product(Synchronizer, (*FED_BACK, Compressor.NONE)):
        first = compressor if compressor is not Compressor.NONE else Compressor.TOP_K
        for chosen, both in ((first, True), (compressor, False), (compressor, False)):
            before = residual(synchronizer, index)
            synchronizer.load(uniform(model.module, dist.get_world_size(), kind, chosen))
            model.zero_grad()
            model(images(rank, 1).flatten(1)[:, :20], both).square().sum().backward()
            if not both:
                assert parameter.grad is None, "a parameter that no rank used keeps its gradient"
                after = residual(synchronizer, index)
                dist.all_reduce(before)
                dist.all_reduce(after)
                assert float(before.abs().amax()) > 0
                torch.testing.assert_close(
                    after, before, rtol=0, atol=1e-5 * float(before.abs().amax())
                )


def test_the_residual_of_a_parameter_that_no_rank_uses_is_not_lost() -> None:
    run_world(check_unused, 2)


def check_rows(rank: int) -> None:
    torch.manual_seed(0)
    model = PlannedDataParallel(
        nn.EmbeddingBag(12, 5, sparse=True, mode="sum"), find_unused_parameters=True
    )
    synchronizer, size = model.synchronizer, dist.get_world_size()
    local, gate = Local(synchronizer), GradientGate(synchronizer)
    kinds = (
        (Synchronizer.ALL_REDUCE, SparseHandling.ALL_GATHER),
        (Synchronizer.PARAMETER_SERVER, SparseHandling.GATHER_SCATTER),
    )
    for number, (kind, handling) in enumerate(kinds):
        dense = uniform(model.module, size, kind, Compressor.TOP_K)
        flat = uniform(model.module, size, kind)
        rows = replace(
            flat, messages=tuple(replace(message, sparse=handling) for message in flat.messages)
        )
        for plan in (dense, rows, rows):
            synchronizer.load(plan)
            gate.arm()
            model.zero_grad()
            tokens = torch.tensor([[rank, rank + 4 + number, rank + 1]])
            model(tokens).square().sum().backward()
            assert gate.error().ok, gate.error()
            assert_nothing_lost(local, (kind, handling))
            assert model.module.weight.grad.is_sparse
            assert bool(synchronizer.residuals) == (plan is dense)


def test_rows_of_a_sparse_gradient_carry_its_residual() -> None:
    run_world(check_rows, 2)


def check_cross_step(rank: int) -> list[bytes]:
    """Messages that cross the step train like others, residuals included."""
    states = []
    for crosses, compressor in itertools.product((False, True), FED_BACK):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20))
        optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
        applied = apply(module, optimizer)
        plan = uniform(module, dist.get_world_size(), compressor=compressor)
        for step in range(6):
            if step == 2:  # the steps before show where the optimizer reads
                applied.synchronizer.load(replace(plan, cross_step=crosses))
            optimizer.zero_grad()
            module(torch.randn(6, 30, generator=seeded(10 * step + rank))).square().sum().backward()
            optimizer.step()
        state = applied.compression_state()
        kept = [state["residuals"][name] for name in sorted(state["residuals"])]
        states.append(
            b"".join(t.detach().cpu().numpy().tobytes() for t in (*module.parameters(), *kept))
        )
    return states


def test_messages_that_cross_the_step_keep_the_same_residuals() -> None:
    for states in run_world(check_cross_step, 2):
        assert states[:3] == states[3:]


def check_not_finite(rank: int, names: tuple[str, ...] = FED_BACK) -> None:
    model = PlannedDataParallel(OddShapes())
    for kind, compressor in itertools.product(
        (Synchronizer.ALL_REDUCE, Synchronizer.PARAMETER_SERVER), map(Compressor, names)
    ):
        model.synchronizer.load(uniform(model.module, 2, kind, compressor))
        for value, finite in (
            (1.0, True),
            (math.inf, False),
            (math.nan, False),
            (1.0, True),
            (0.0, True),
        ):
            model.zero_grad()
            (model(images(rank, 0)).square().sum() * (value if rank else 1.0)).backward()
            seen = {
                name: bool(p.grad.isfinite().all()) for name, p in model.module.named_parameters()
            }
            assert all(seen.values()) == finite, (kind, compressor, value, seen)
            assert finite or compressor is Compressor.TOP_K or not any(seen.values()), (
                "of a message of infinities top-k sends some"
            )


def test_an_overflow_on_one_rank_is_seen_by_all_once() -> None:
    run_world(check_not_finite, 2)


def check_tied(rank: int, size: int) -> None:
    """Tied weights, dropout, BatchNorm, accumulation; PowerSGD, top-k and whole messages in one
    plan."""
    torch.manual_seed(0)
    model = attach(Tied(), None)
    module = model.module
    plan: Plan = uniform(module, size, groups=4)
    kinds: tuple[dict[str, Any], ...] = (
        {"compressor": Compressor.POWER_SGD, "rank": 2},
        {"compressor": Compressor.TOP_K, "ratio": 0.2},
        {"compressor": Compressor.INT8},
        {},
    )
    messages = tuple(
        replace(message, **kinds[number % 4]) for number, message in enumerate(plan.messages)
    )
    model.load(replace(plan, messages=messages))
    local = Local(model)
    for step in range(4):
        module.zero_grad()
        with model.no_sync():
            loss_of(module, rank, 2 * step).backward()
        loss_of(module, rank, 2 * step + 1).backward()
        assert_nothing_lost(local, step)


def test_one_plan_may_mix_compressors_and_gradients_may_accumulate() -> None:
    run_world(check_tied, 2, 2)


def check_refused(rank: int) -> None:
    model = PlannedDataParallel(nn.Linear(20, 30))
    model.synchronizer.scale_bytes(4.0)
    refused: list[Callable[[], None]] = [
        lambda c=compressor: model.synchronizer.load(uniform(model.module, 2, compressor=c))  # type: ignore[misc]
        for compressor in FED_BACK
    ]
    for load in refused:
        with pytest.raises(
            InvalidStrategy, match="with bytes divided by 4 a compressor would work on a part"
        ):
            load()
    model.synchronizer.load(uniform(model.module, 2, compressor=Compressor.FP16))


def test_scaled_bytes_and_compressors_exclude_each_other() -> None:
    run_world(check_refused, 2)
