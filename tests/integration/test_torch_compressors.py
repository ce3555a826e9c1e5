"""Error feedback of int8, top-k, PowerSGD and a plugin between real ranks: no gradient is lost."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_plans import Tied, loss_of, uniform
from torch_world import on_ranks, run_world, seeded, set_host

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
        self.synchronizer = synchronizer
        self.sent = [torch.zeros(0, dtype=torch.float64)] * len(synchronizer.names)
        synchronizer.observers.append(self)

    def on_ready(self, index: int, gradient: Tensor | None) -> None:
        self.sent[index] = residual(self.synchronizer, index)
        if gradient is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            self.sent[index] = self.sent[index] + dense.double() / self.synchronizer.ranks.size


def residual(synchronizer: GradientSynchronizer, index: int) -> Tensor:
    value = synchronizer.residuals.of(synchronizer.names[index])
    return (torch.zeros_like(synchronizer.parameters[index]) if value is None else value).double()


def assert_nothing_lost(local: Local, case: object) -> None:
    """The gradient is the sum over r of g_r / w + e_r - e'_r, with equal bits on all ranks.

    Residuals have the shape, strides and dtype of their variables.
    """
    synchronizer = local.synchronizer
    for index, parameter in enumerate(synchronizer.parameters):
        name = synchronizer.names[index]
        waiting = synchronizer.residuals.of(name)
        layout = (parameter.shape, parameter.stride(), parameter.dtype)
        assert waiting is None or (waiting.shape, waiting.stride(), waiting.dtype) == layout
        expected = local.sent[index] - residual(synchronizer, index)
        scale = local.sent[index].abs().amax()
        dist.all_reduce(expected)
        dist.all_reduce(scale)
        assert parameter.grad is not None
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        worst = float((gradient.double() - expected).abs().amax())
        roundoff = torch.finfo(parameter.dtype).eps
        assert worst <= 16 * roundoff * float(scale), (case, name, worst, float(scale))
        first = gradient.clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, 0)
        assert torch.equal(first, gradient), (case, name)


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


def check_everything(rank: int, partitions: tuple[bool, ...], names: tuple[str, ...]) -> None:
    """Residuals remain from one combination to the next, so plan switches are tested, too."""
    torch.manual_seed(0)
    model = PlannedDataParallel(OddShapes())
    synchronizer, size = model.synchronizer, dist.get_world_size()
    local, gate, step = Local(synchronizer), GradientGate(synchronizer), 0
    for kind, cut, name in itertools.product(Synchronizer, partitions, (*names, "none")):
        compressor = Compressor(name)
        synchronizer.load(uniform(model.module, size, kind, compressor, cut))
        for _ in range(2):
            gate.arm()
            model.zero_grad(set_to_none=bool(step % 2))
            step += 1
            model(images(rank, step)).square().sum().backward()
            case = (kind, cut, compressor, gate.error())
            assert gate.error().ok, case
            assert_nothing_lost(local, case)
            if compressor is Compressor.NONE:
                assert not synchronizer.residuals, case
            else:
                residual = synchronizer.residuals.of("mix.weight")
                assert residual is not None and float(residual.abs().amax()) > 0, case


@pytest.mark.parametrize(
    ("size", "partitions"), [pytest.param(2, (True,), marks=pytest.mark.slow), (4, (False, True))]
)
def test_no_compressor_loses_gradients_by_any_synchronizer_and_partition(
    size: int, partitions: tuple[bool, ...]
) -> None:
    run_world(check_everything, size, partitions, FED_BACK)


def check_plugin(rank: int) -> dict[str, float]:
    check_everything(rank, (False, True), ("four_bit",))
    check_not_finite(rank, ("four_bit",))
    return check_convergence(rank, Compressor("four_bit"), 16.0)


@pytest.mark.slow
def test_a_compressor_of_a_plugin_passes_the_numerics_gate_and_trains(
    monkeypatch: pytest.MonkeyPatch, example_plugin: Path
) -> None:
    monkeypatch.syspath_prepend(str(example_plugin))  # the ranks inherit the path
    assert_feedback_trains(run_world(check_plugin, 2)[0])


@on_ranks(1)
def test_a_rank_alone_sends_nothing_and_loses_nothing(rank: int) -> None:
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


@on_ranks(4, each=[(2, 2), (3, 1)])
def test_only_leaders_of_hosts_hold_residuals_of_hierarchical_messages(
    rank: int, layout: tuple[int, ...]
) -> None:
    leads = set_host(rank, layout) == 0
    torch.manual_seed(0)
    model = PlannedDataParallel(OddShapes())
    synchronizer = model.synchronizer
    local, gate, step = Local(synchronizer), GradientGate(synchronizer), 0
    kinds = (Synchronizer.ALL_REDUCE, Synchronizer.PARAMETER_SERVER)
    for kind, compressor in itertools.product(kinds, FED_BACK):
        flat = uniform(model.module, 4, kind, compressor)
        owner = None if kind is Synchronizer.ALL_REDUCE else 0
        messages = tuple(replace(m, hierarchical=True, owner=owner) for m in flat.messages)
        plan = replace(flat, messages=messages)
        # Residuals on other ranks are sent to their leaders.
        for chosen in (flat, plan, replace(plan, ring_order=(2, 0, 3, 1))):
            synchronizer.load(chosen)
            gate.arm()
            model.zero_grad()
            step += 1
            model(images(rank, step)).square().sum().backward()
            assert gate.error().ok, (kind, compressor, gate.error())
            assert_nothing_lost(local, (kind, compressor))
        assert bool(synchronizer.residuals) == leads


# -- training


class QuadraticTarget(nn.Module):
    """A quadratic loss. Large gradients of some columns cancel between ranks, as with real data."""

    def __init__(self, disagreement: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20, 30))
        self.register_buffer("wanted", torch.randn(20, 30, generator=seeded(3)))
        self.wanted: Tensor
        self.disagreement = disagreement

    def forward(self, rank: int) -> Tensor:
        apart = (-1.0) ** rank * self.disagreement * self.weight[:, :4].sum()
        return 0.5 * (self.weight - self.wanted).square().sum() + apart

    def distance(self) -> float:
        return float((self.weight - self.wanted).detach().norm())


TRAININGS = ("uncompressed", "feedback", "none")


def check_convergence(
    rank: int, compressor: Compressor, disagreement: float, names: tuple[str, ...] = TRAININGS
) -> dict[str, float]:
    distances = {}
    for name in names:
        module = QuadraticTarget(disagreement)
        applied = apply(module)
        used = Compressor.NONE if name == "uncompressed" else compressor
        applied.synchronizer.load(uniform(module, dist.get_world_size(), compressor=used))
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        for _ in range(200):
            optimizer.zero_grad()
            module(rank).backward()
            optimizer.step()
            if name == "none":
                applied.synchronizer.residuals.clear()
        distances[name] = module.distance()
    return distances


def assert_feedback_trains(distances: dict[str, float]) -> None:
    start = QuadraticTarget(0.0).distance()
    assert distances["feedback"] < 0.2 * start < 0.5 * start < distances["none"], distances


def check_convergences(rank: int) -> list[dict[str, float]]:
    """Without a compressor, PowerSGD's training is that of top-k."""
    return [
        check_convergence(rank, Compressor.INT8, 300.0),
        check_convergence(rank, Compressor.TOP_K, 6.0),
        check_convergence(rank, Compressor.POWER_SGD, 6.0, ("feedback",)),
    ]


@pytest.mark.slow
def test_training_with_error_feedback_reaches_the_uncompressed_result() -> None:
    int8, top_k, power_sgd = run_world(check_convergences, 2)[0]
    assert all(losses["uncompressed"] < 1e-3 for losses in (int8, top_k))
    assert power_sgd["feedback"] < 0.02 * QuadraticTarget(0.0).distance(), power_sgd
    assert_feedback_trains(int8)
    assert_feedback_trains(top_k)


@on_ranks(2)
def test_nothing_is_lost_when_plans_are_switched(rank: int) -> None:
    """The gradients of all steps together have arrived once a plan without a compressor has run."""
    torch.manual_seed(0)
    module = nn.Linear(40, 30)
    applied = apply(module)
    size = dist.get_world_size()
    arrived, computed = torch.zeros(30, 40), torch.zeros(30, 40)
    for last in (Compressor.NONE, Compressor.FP16):
        for number, used in enumerate((*FED_BACK, Compressor.TOP_K, last)):
            cut = bool(number % 2)
            applied.synchronizer.load(uniform(module, size, compressor=used, partitioned=cut))
            for step in range(3 if used is not last else 1):
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


# -- checkpoints


def three_layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        module(torch.randn(6, 30, generator=seeded(10 * step + rank))).square().sum().backward()
        optimizer.step()


@on_ranks(2)
def test_training_continues_from_a_checkpoint_with_the_same_bits(rank: int) -> None:
    def start(compressor: Compressor) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        module = three_layers()
        applied = apply(module)
        applied.synchronizer.load(
            uniform(module, 2, Synchronizer.PARAMETER_SERVER, compressor, partitioned=True)
        )
        return module, applied, torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)

    for compressor in FED_BACK:
        module, applied, optimizer = start(compressor)
        train(module, optimizer, rank, range(3))
        saved = io.BytesIO()
        state = (module.state_dict(), optimizer.state_dict(), applied.compression_state())
        torch.save(state, saved)
        train(module, optimizer, rank, range(3, 6))
        again, applied, optimizer = start(compressor)
        train(again, optimizer, rank, range(50, 52))  # loading replaces what this leaves
        saved.seek(0)
        states = torch.load(saved, weights_only=True)
        again.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        applied.load_compression_state(states[2])
        train(again, optimizer, rank, range(3, 6))
        ends = zip(module.parameters(), again.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in ends), compressor
        with pytest.raises(InvalidInput, match=f"is of rank {rank} of 5"):
            applied.load_compression_state(states[2] | {"world_size": 5})


@on_ranks(2)
def test_a_plan_of_buckets_sends_the_residuals_of_a_checkpoint(rank: int) -> None:
    """torch's reducer executes it, and would never send them."""
    applied = apply(three_layers())
    applied.synchronizer.load(uniform(applied.synchronizer.module, 2, compressor=Compressor.TOP_K))
    optimizer = torch.optim.SGD(applied.synchronizer.parameters, 0.05)
    train(applied.synchronizer.module, optimizer, rank, range(2))
    state = applied.compression_state()
    again = apply(three_layers())
    assert again.synchronizer.native is not None
    again.load_compression_state(state)
    assert again.synchronizer.native is None and again.synchronizer.residuals
    local = Local(again.synchronizer)
    module = again.synchronizer.module
    module(torch.randn(6, 30, generator=seeded(rank))).square().sum().backward()
    assert_nothing_lost(local, "buckets")
    assert not again.synchronizer.residuals


# -- what surrounds them


class OptionalBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(20, 30), nn.Linear(20, 30)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always(x) + self.sometimes(x) if both else self.always(x)


@on_ranks(2)
def test_the_residual_of_a_parameter_that_no_rank_uses_is_not_lost(rank: int) -> None:
    torch.manual_seed(0)
    model = PlannedDataParallel(OptionalBranch(), find_unused_parameters=True)
    synchronizer = model.synchronizer
    index = synchronizer.names.index("sometimes.weight")
    x = images(rank, 1).flatten(1)[:, :20]
    used = (*FED_BACK, Compressor.NONE)
    for kind, compressor, kept in itertools.product(Synchronizer, used, (False, True)):
        first = compressor if compressor is not Compressor.NONE else Compressor.TOP_K
        for chosen, both in ((first, True), (compressor, False), (compressor, False)):
            before = residual(synchronizer, index)
            synchronizer.load(uniform(model.module, dist.get_world_size(), kind, chosen))
            model.zero_grad()
            parameter = synchronizer.parameters[index]
            if kept and not both:
                parameter.grad = torch.full_like(parameter, 3.0)
            model(x, both).square().sum().backward()
            if both:
                continue
            if kept:  # no rank used it: its gradient stays
                assert parameter.grad is not None and bool((parameter.grad == 3.0).all())
            else:
                assert parameter.grad is None
            after = residual(synchronizer, index)
            dist.all_reduce(before)
            dist.all_reduce(after)
            largest = float(before.abs().amax())
            assert largest > 0
            torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * largest)


@on_ranks(2)
def test_rows_of_a_sparse_gradient_carry_its_residual(rank: int) -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(12, 5, sparse=True, mode="sum")
    model = PlannedDataParallel(bag, find_unused_parameters=True)
    synchronizer = model.synchronizer
    local, gate = Local(synchronizer), GradientGate(synchronizer)
    kinds = (
        (Synchronizer.ALL_REDUCE, SparseHandling.ALL_GATHER),
        (Synchronizer.PARAMETER_SERVER, SparseHandling.GATHER_SCATTER),
    )
    for number, (kind, handling) in enumerate(kinds):
        dense = uniform(model.module, 2, kind, Compressor.TOP_K)
        flat = uniform(model.module, 2, kind)
        rows = replace(flat, messages=tuple(replace(m, sparse=handling) for m in flat.messages))
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


@on_ranks(2)
def test_messages_that_cross_the_step_keep_the_same_residuals(rank: int) -> None:
    def trained(compressor: Compressor, cross_step: bool) -> list[bytes]:
        module = three_layers()
        optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
        applied = apply(module, optimizer)
        train(module, optimizer, rank, range(2))  # shows where the optimizer reads
        plan = uniform(module, dist.get_world_size(), compressor=compressor)
        applied.synchronizer.load(replace(plan, cross_step=cross_step))
        train(module, optimizer, rank, range(2, 6))
        residuals = applied.compression_state()["residuals"]
        state = (*module.parameters(), *(residuals[name] for name in sorted(residuals)))
        return [tensor.detach().cpu().numpy().tobytes() for tensor in state]

    for compressor in FED_BACK:
        assert trained(compressor, False) == trained(compressor, True), compressor


def check_not_finite(rank: int, names: tuple[str, ...] = FED_BACK) -> None:
    model = PlannedDataParallel(OddShapes())
    kinds = (Synchronizer.ALL_REDUCE, Synchronizer.PARAMETER_SERVER)
    for kind, compressor in itertools.product(kinds, map(Compressor, names)):
        model.synchronizer.load(uniform(model.module, 2, kind, compressor))
        for value in (1.0, math.inf, math.nan, 1.0, 0.0):
            model.zero_grad()
            (model(images(rank, 0)).square().sum() * (value if rank else 1.0)).backward()
            finite = {n: bool(p.grad.isfinite().all()) for n, p in model.named_parameters()}
            assert all(finite.values()) == math.isfinite(value), (kind, compressor, value, finite)
            if not math.isfinite(value) and compressor is not Compressor.TOP_K:
                assert not any(finite.values()), "only top-k sends just some of the infinities"


def test_an_overflow_on_one_rank_is_seen_by_all_once() -> None:
    run_world(check_not_finite, 2)


def scaled_plan(module: nn.Module, compressor: Compressor, mode: str) -> Plan:
    """Every message compressed; where the plan crosses the step, one half of them."""
    kind = Synchronizer.ALL_REDUCE if mode != "across" else Synchronizer.REDUCE_BROADCAST
    flat = uniform(module, dist.get_world_size(), kind, compressor)
    if mode == "hierarchical":
        return replace(flat, messages=tuple(replace(m, hierarchical=True) for m in flat.messages))
    if mode != "across":
        return flat
    plain: dict[str, Any] = {"compressor": Compressor.NONE, "ratio": None, "rank": None}
    half, count = len(flat.messages) // 2, len(flat.messages)
    messages = (*flat.messages[:half], *(replace(m, **plain) for m in flat.messages[half:]))
    return replace(flat, messages=messages, cross_step=True, results=tuple(range(count)))


def check_scaled(rank: int, compressor: Compressor, mode: str) -> None:
    """All gradients of steps that were not skipped have arrived, or are residuals.

    The sum of those that have arrived is in the parameters, which SGD has updated by it. Reading
    the gradients themselves would keep updates from crossing the step.
    """
    size, rate, batches = dist.get_world_size(), 2.0**-6, 2 if mode == "accumulated" else 1
    module, twin = three_layers(), three_layers()
    optimizer = torch.optim.SGD(module.parameters(), rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    synchronizer = apply(module, optimizer).synchronizer
    start = [parameter.detach().double() for parameter in module.parameters()]
    computed = [torch.zeros_like(parameter) for parameter in start]
    scales = set()
    for step in range(9):
        if step in (0, 4):
            synchronizer.load(scaled_plan(module, compressor, mode if step else "within"))
        twin.load_state_dict(module.state_dict())
        twin.zero_grad()
        optimizer.zero_grad()
        overflows = step in (2, 4, 8)
        for batch in range(batches):
            x = torch.randn(6, 30, generator=seeded(100 * step + 10 * batch + rank))
            twin(x).square().sum().backward()
            factor = math.inf if overflows and rank == 1 and batch == 0 else 1.0
            (scaler.scale(module(x).square().sum()) * factor).backward()
        if not overflows:
            for total, parameter in zip(computed, twin.parameters(), strict=True):
                total += parameter.grad / size
        scaler.step(optimizer)
        scaler.update()
        scales.add(scaler.get_scale())
    assert synchronizer.cross_step.conditions.defers == (mode == "across")
    assert min(scales) < 2.0**10 < max(scales)
    synchronizer.cross_step.flush()
    for index, total in enumerate(computed):
        waiting = residual(synchronizer, index) / scaler.get_scale()
        dist.all_reduce(total)
        dist.all_reduce(waiting)
        arrived = (start[index] - synchronizer.parameters[index].detach().double()) / rate
        largest = float(total.abs().amax())
        case = (compressor, mode, synchronizer.names[index])
        off = float((arrived + waiting - total).abs().amax())
        assert off <= 1e-4 * largest, (case, off, largest)
    synchronizer.close()


MODES = ("within", "accumulated", "hierarchical", "across")


@on_ranks(3)
def test_nothing_is_lost_or_counted_twice_when_a_scaler_skips_steps_and_changes_its_scale(
    rank: int,
) -> None:
    set_host(rank, (2, 1))
    for compressor, mode in itertools.product(FED_BACK, MODES):
        check_scaled(rank, compressor, mode)


class Spare(nn.Module):
    """A layer of it takes part in no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = nn.Linear(20, 30), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@on_ranks(2)
def test_an_overflow_does_not_stay_in_the_residual_of_an_unused_variable(rank: int) -> None:
    """A block of int8 runs across variables, so the overflow of one reaches the other."""
    model = PlannedDataParallel(Spare(), find_unused_parameters=True)
    x = images(rank, 1).flatten(1)[:, :20]
    for kind in (Synchronizer.ALL_REDUCE, Synchronizer.DIRECT_EXCHANGE):
        model.synchronizer.load(uniform(model.module, 2, kind, Compressor.INT8, groups=1))
        for value in (1.0, math.inf, 1.0):
            model.zero_grad()
            (model(x).square().sum() * (value if rank else 1.0)).backward()
            finite = [bool(p.grad.isfinite().all()) for p in model.module.layer.parameters()]
            assert all(finite) == math.isfinite(value), (kind, value)
            for index in range(len(model.synchronizer.names)):
                assert bool(residual(model.synchronizer, index).isfinite().all()), (kind, value)


@on_ranks(2)
def test_one_plan_may_mix_compressors_and_gradients_may_accumulate(rank: int) -> None:
    """Also with tied weights, dropout and BatchNorm."""
    torch.manual_seed(0)
    model = attach(Tied(), None)
    module = model.module
    plan = uniform(module, 2, groups=4)
    kinds: tuple[dict[str, Any], ...] = (
        {"compressor": Compressor.POWER_SGD, "rank": 2},
        {"compressor": Compressor.TOP_K, "ratio": 0.2},
        {"compressor": Compressor.INT8},
        {},
    )
    messages = [replace(message, **kinds[n % 4]) for n, message in enumerate(plan.messages)]
    model.load(replace(plan, messages=tuple(messages)))
    local = Local(model)
    for step in range(4):
        module.zero_grad()
        with model.no_sync():
            loss_of(module, rank, 2 * step).backward()
        loss_of(module, rank, 2 * step + 1).backward()
        assert_nothing_lost(local, step)


@on_ranks(2)
def test_scaled_bytes_and_compressors_exclude_each_other(rank: int) -> None:
    model = PlannedDataParallel(nn.Linear(20, 30))
    model.synchronizer.scale_bytes(4.0)
    rule = "with bytes divided by 4 a compressor would work on a part"
    for compressor in FED_BACK:
        with pytest.raises(InvalidStrategy, match=rule):
            model.synchronizer.load(uniform(model.module, 2, compressor=compressor))
    model.synchronizer.load(uniform(model.module, 2, compressor=Compressor.FP16))
