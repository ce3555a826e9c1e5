"""Factors of one NVIDIA H100 80GB HBM3, torch 2.11, from `datasets/gpu_traces/h100`.

`python -m benchmarks.whatif_truth --fit` prints them; ranges hold the next model's value with 80 %.
`cast_s` and `each_s` are the times of the smallest kernels, the latter with the pause behind it.
"""

from __future__ import annotations

from autotune.whatif.kernels.factors import FactorTable, Roofline
from autotune.whatif.kernels.kernel_classes import KernelClass
from autotune.whatif.question import Factor
from autotune.whatif.recording.recording_cost import RecordingCost

_SOURCE = "five models recorded on an H100 (datasets/gpu_traces/h100)"


def _factor(expected: float, optimistic: float, pessimistic: float) -> Factor:
    return Factor(expected, optimistic, pessimistic, _SOURCE)


H100 = FactorTable(
    device="NVIDIA H100 80GB HBM3",
    products={
        KernelClass.CONVOLUTION: Roofline(
            flops_per_s=994e12,
            bytes_per_s=4.09e12,
            fixed_s=12.5e-6,
            unaligned=8.0,
            spread=_factor(1.0, 1.0, 1.149),
        ),
        KernelClass.GEMM: Roofline(
            flops_per_s=1369e12,
            bytes_per_s=3.06e12,
            fixed_s=2.48e-6,
            unaligned=10.4,
            spread=_factor(1.0, 0.933, 1.0),
        ),
    },
    layout_bytes_per_s=2.13e12,
    layout_s=4.48e-6,
    classes={
        KernelClass.ATTENTION: _factor(0.209, 0.051, 0.366),
        KernelClass.BATCH_NORM: _factor(1.268, 1.185, 1.351),
        KernelClass.CONVOLUTION: _factor(0.165, 0.081, 0.248),
        KernelClass.COPY: _factor(0.555, 0.307, 0.802),
        KernelClass.ELEMENTWISE: _factor(0.668, 0.429, 0.906),
        KernelClass.EMBEDDING: _factor(1.0, 1.0, 1.0),
        KernelClass.GEMM: _factor(0.174, 0.071, 0.278),
        KernelClass.LAYER_NORM: _factor(1.086, 1.031, 1.142),
        KernelClass.OPTIMIZER: _factor(1.0, 1.0, 1.0),
        KernelClass.POOLING: _factor(0.99, 0.969, 1.01),
        KernelClass.REDUCTION: _factor(0.714, 0.308, 1.12),
        KernelClass.SOFTMAX: _factor(0.752, 0.0, 2.075),
    },
    tf32=_factor(0.907, 0.745, 1.068),
    cast_bytes_per_s=1.96e12,
    cast_s=1.5e-6,
    cast_host_s=_factor(9.0e-6, 0.0, 66.7e-6),
    fixed_s=_factor(12.0e-6, 0.0, 30.7e-6),
    fused=_factor(0.572, 0.115, 1.03),
    each_s=3.5e-6,
    each_host_s=_factor(29.4e-6, 0.0, 64.4e-6),
    recording=RecordingCost(
        operator_s=_factor(3.30e-6, 2.01e-6, 5.06e-6), call_s=_factor(0.97e-6, 0.59e-6, 1.48e-6)
    ),
)
