"""The numerics gate passes gradients within its derived bound and fails all others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_plans import Tied, loss_of, uniform
from torch_world import on_ranks, run_world

from autotune.strategy_space.strategy import Compressor, Synchronizer
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.numerics import GradientGate
from runtime_rewriter.pytorch.observers import BackwardObserver
from runtime_rewriter.tolerances import GateResult, tolerance_of


class Steep(nn.Module):
    """One variable per magnitude of gradients."""

    def __init__(self, sizes: tuple[float, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in sizes)
        self.sizes = sizes

    def forward(self, x: Tensor) -> Tensor:
        sized = zip(self.weights, self.sizes, strict=True)
        return torch.stack([(w * x).sum() * size for w, size in sized]).sum()


def gate_of(model: PlannedDataParallel, rank: int, compressor: Compressor) -> GateResult:
    size = dist.get_world_size()
    model.synchronizer.load(uniform(model.module, size, Synchronizer.PARAMETER_SERVER, compressor))
    gate = GradientGate(model.synchronizer)
    gate.arm()
    x = torch.tensor([1.0, 0.7, 0.3]) * (1 + rank)
    model(x).backward() if isinstance(model.module, Steep) else loss_of(model, rank, 0).backward()
    return gate.error()


def gate_of_steep(sizes: tuple[float, ...], rank: int) -> GateResult:
    return gate_of(PlannedDataParallel(Steep(sizes)), rank, Compressor.FP16)


def check_gate(rank: int) -> dict[str, GateResult]:
    torch.manual_seed(0)
    tied = PlannedDataParallel(Tied())
    exact_and_cast = (Compressor.NONE, Compressor.FP16, Compressor.BF16)
    steep = PlannedDataParallel(Steep((1.0, 1e6)))
    return {
        **{str(compressor): gate_of(tied, rank, compressor) for compressor in exact_and_cast},
        "overflow": gate_of(steep, rank, Compressor.FP16),
        "large": gate_of(steep, rank, Compressor.NONE),
        "infinite": gate_of_steep((1.0, float("inf")), rank),
        "underflow": gate_of_steep((1e-8, 1e-9), rank),
        "noise": gate_of_steep((1.0, 1e-8), rank),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_the_gate_passes_rounded_gradients_and_fails_overflow_and_underflow(size: int) -> None:
    answers = run_world(check_gate, size)
    assert all(answer == answers[0] for answer in answers), "all ranks agree"
    error = {name: result.relative_error for name, result in answers[0].items()}
    passed = {name for name, result in answers[0].items() if result.ok}
    # An infinite reference is what AMP skips by itself. Far below the model's gradients is noise.
    assert passed == {"none", "fp16", "bf16", "large", "infinite", "noise"}
    assert error["none"] <= (0.0 if size == 2 else 1e-5)
    assert 0 < error["fp16"] <= tolerance_of("float32", Compressor.FP16, size)
    assert error["fp16"] < error["bf16"] < 0.05
    assert error["overflow"] == float("inf")
    assert answers[0]["overflow"].worst_variable == "weights.1"


class Disturb(BackwardObserver):
    """Changes the averaged gradient on one rank."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def on_synchronized(self, unused: frozenset[int]) -> None:
        assert self.parameter.grad is not None
        self.parameter.grad.mul_(1 + 1e-6)


@on_ranks(2)
def test_the_gate_fails_when_ranks_differ_by_one_bit_even_within_the_tolerance(rank: int) -> None:
    model = PlannedDataParallel(Tied())
    if rank == 1:
        model.synchronizer.observers.append(Disturb(model.module.back.weight))
    result = gate_of(model, rank, Compressor.BF16)
    assert not result.ok and result.worst_variable == "back.weight"
    assert result.relative_error == float("inf")


def test_tolerances_follow_the_roundoff_of_the_dtype() -> None:
    assert tolerance_of("float32", Compressor.NONE, 2) == 0.0
    assert tolerance_of("float32", Compressor.NONE, 4) == 8 * 2**-24 < 1e-5
    assert tolerance_of("float64", Compressor.NONE, 4) == 8 * 2**-53
    assert tolerance_of("float32", Compressor.FP16, 4) == 5 * 2**-11 + 8 * 2**-24
