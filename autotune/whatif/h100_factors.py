"""Factors of one NVIDIA H100 80GB HBM3, torch 2.11, from `datasets/gpu_traces/h100`."""

from __future__ import annotations

from autotune.whatif.factors import FactorTable, Roofline
from autotune.whatif.kernel_classes import KernelClass
from autotune.whatif.question import Factor
from autotune.whatif.recording_cost import RecordingCost

_SOURCE = "H100 recordings of five models"
H100 = FactorTable(
    device="NVIDIA H100 80GB HBM3",
    products={
        KernelClass.CONVOLUTION: Roofline(800e12, 2.6e12, 5e-6, 8.0, Factor(1, 0.8, 1.2, _SOURCE)),
        KernelClass.GEMM: Roofline(800e12, 2.6e12, 3e-6, 8.0, Factor(1, 0.8, 1.2, _SOURCE)),
    },
    layout_bytes_per_s=2e12,
    layout_s=5e-6,
    classes={},
    tf32=Factor(0.95, 0.85, 1.05, _SOURCE),
    cast_bytes_per_s=2.4e12,
    cast_s=1.5e-6,
    cast_host_s=Factor(12e-6, 6e-6, 25e-6, _SOURCE),
    fixed_s=Factor(8e-6, 2e-6, 12e-6, _SOURCE),
    fused=Factor(0.55, 0.4, 1.0, _SOURCE),
    each_s=3.5e-6,
    each_host_s=Factor(12e-6, 3e-6, 24e-6, _SOURCE),
    recording=RecordingCost(
        Factor(3.6e-6, 2.5e-6, 4.7e-6, _SOURCE), Factor(2.7e-6, 1.5e-6, 4.5e-6, _SOURCE)
    ),
)
