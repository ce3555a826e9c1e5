"""The numerics gate passes gradients within its derived bound and fails all others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_plans import Tied, loss_of, uniform
from torch_world import run_world

from autotune.strategy_space.strategy import Compressor, Synchronizer
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.numerics import GateResult, GradientGate, tolerance_of
from runtime_rewriter.pytorch.observers import BackwardObserver


class Steep(nn.Module):
    """One variable per magnitude of gradients."""

    def __init__(self, sizes: tuple[float, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in sizes)
        self.sizes = sizes

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(
            [(w * x).sum() * size for w, size in zip(self.weights, self.sizes, strict=True)]
        ).sum()


def gate_of(model: PlannedDataParallel, rank: int, compressor: Compressor) -> GateResult:
    model.synchronizer.load(
        uniform(model.module, dist.get_world_size(), Synchronizer.PARAMETER_SERVER, compressor)
    )
    gate = GradientGate(model.synchronizer)
    gate.arm()
    x = torch.tensor([1.0, 0.7, 0.3]) * (1 + rank)
    model(x).backward() if isinstance(model.module, Steep) else loss_of(model, rank, 0).backward()
    return gate.error()


def check_gate(rank: int) -> dict[str, GateResult]:
    torch.manual_seed(0)
    tied = PlannedDataParallel(Tied())
    results = {
        str(compressor): gate_of(tied, rank, compressor)
        for compressor in (Compressor.NONE, Compressor.FP16, Compressor.BF16)
    }
    steep = PlannedDataParallel(Steep((1.0, 1e6)))
    results["overflow"] = gate_of(steep, rank, Compressor.FP16)
    results["large"] = gate_of(steep, rank, Compressor.NONE)
    results["infinite"] = gate_of(
        PlannedDataParallel(Steep((1.0, float("inf")))), rank, Compressor.FP16
    )
    results["underflow"] = gate_of(PlannedDataParallel(Steep((1e-8, 1e-9))), rank, Compressor.FP16)
    results["noise"] = gate_of(PlannedDataParallel(Steep((1.0, 1e-8))), rank, Compressor.FP16)
    return results


def test_the_gate_passes_exact_and_rounded_gradients_and_fails_overflow_and_underflow() -> None:
    for size in (2, 3):
        answers = run_world(check_gate, size)
        assert all(answer == answers[0] for answer in answers), "all ranks agree"
        result = answers[0]
        assert result["none"].ok and result["none"].relative_error <= (0.0 if size == 2 else 1e-5)
        assert result["fp16"].ok and 0 < result["fp16"].relative_error <= tolerance_of(
            "float32", Compressor.FP16, size
        )
        assert (
            result["bf16"].ok
            and result["fp16"].relative_error < result["bf16"].relative_error < 0.05
        )
        assert not result["overflow"].ok and result["overflow"].relative_error == float("inf")
        assert result["overflow"].worst_variable == "weights.1"
        assert result["large"].ok
        assert result["infinite"].ok, "an infinite reference is what AMP skips by itself"
        assert not result["underflow"].ok
        assert result["noise"].ok, "far below the model's gradients there is only noise"


class Disturb(BackwardObserver):
    """Changes the averaged gradient on one rank."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def on_synchronized(self, kept: frozenset[int]) -> None:
        assert self.parameter.grad is not None
        self.parameter.grad.mul_(1 + 1e-6)


def check_difference(rank: int) -> GateResult:
    model = PlannedDataParallel(Tied())
    if rank == 1:
        model.synchronizer.observers.append(Disturb(model.module.back.weight))
    return gate_of(model, rank, Compressor.BF16)


def test_the_gate_fails_when_ranks_differ_by_one_bit_even_within_the_tolerance() -> None:
    for result in run_world(check_difference, 2):
        assert (
            not result.ok
            and result.worst_variable == "back.weight"
            and result.relative_error == float("inf")
        )


def test_tolerances_follow_the_roundoff_of_the_dtype() -> None:
    assert tolerance_of("float32", Compressor.NONE, 2) == 0.0
    assert tolerance_of("float32", Compressor.NONE, 4) == 8 * 2**-24 < 1e-5
    assert tolerance_of("float64", Compressor.NONE, 4) == 8 * 2**-53
    assert tolerance_of("float32", Compressor.FP16, 4) == 5 * 2**-11 + 8 * 2**-24
