"""How kernels change with precision, batch and optimizer: one table per device, with its sources.

The numbers for the H100 are what `python -m benchmarks.whatif_truth --fit` prints: fits to the
recordings and step times in `datasets/gpu_traces/h100`, on all of its models. The benchmark itself
predicts each model with a table that was fitted on the other ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.lowering.device_costs import memory_bytes_per_s
from autotune.whatif.base import Base
from autotune.whatif.kernels.kernel_classes import KernelClass
from autotune.whatif.kernels.operator_work import ProductWork
from autotune.whatif.question import Factor, Reading
from autotune.whatif.recording.recording_cost import RecordingCost

ARITHMETIC = (KernelClass.CONVOLUTION, KernelClass.GEMM, KernelClass.ATTENTION)
"""Classes that arithmetic limits; their gain depends on a device's tensor cores."""
PAPER_SHARE = 1 / 3
"""Time of these classes in 16 bit over that in fp32 (Daydream, Alg. 3)."""


@dataclass(frozen=True)
class Roofline:
    """Time of a product on tensor cores in 16 bit: the sum of arithmetic, traffic and a fixed part.

    `unaligned`: factor on the arithmetic of products with odd sizes, whose elements are read one by
    one; reading two at once halves it. `spread`: factor on the whole.
    """

    flops_per_s: float
    bytes_per_s: float
    fixed_s: float
    unaligned: float
    spread: Factor

    def seconds(self, work: ProductWork, scale: float = 1.0) -> float:
        """In 16 bit; `scale`: factor on all but the fixed part, for other precisions."""
        slower = max(1.0, self.unaligned / work.alignment)
        flops_s = work.flops / self.flops_per_s * slower
        bytes_s = 2 * work.elements / self.bytes_per_s
        return scale * (flops_s + bytes_s) + self.fixed_s * work.directions


@dataclass(frozen=True)
class FactorTable:
    """Measured on one device; `on` gives what is assumed for another one.

    - `products`: of convolutions and matrix products; empty where none was measured.
      `layout_bytes_per_s`, `layout_s`: traffic and fixed time, per direction, of changes of layout.
    - `classes`: time of other kernels under autocast to bf16 over that in fp32; for products where
      shapes are unknown, too. `tf32`: time of products in TF32, without the fixed part, over twice
      that in bf16.
    - `cast_bytes_per_s`, `cast_s`: of a cast on the device; `cast_host_s`: of its call.
    - `fixed_s`: the part of an operator's time that does not depend on the batch.
    - `fused`, `each_s`, `each_host_s`: time of a fused optimizer over the traffic's; time of a
      small kernel of an optimizer, and of its call.
    - `recording`: what the profiler of the recordings took.
    """

    device: str
    products: Mapping[KernelClass, Roofline]
    layout_bytes_per_s: float
    layout_s: float
    classes: Mapping[KernelClass, Factor]
    tf32: Factor
    cast_bytes_per_s: float
    cast_s: float
    cast_host_s: Factor
    fixed_s: Factor
    fused: Factor
    each_s: float
    each_host_s: Factor
    recording: RecordingCost

    def noted(self, base: Base) -> Base:
        """The base with a note that the factors are assumed, if it was recorded elsewhere."""
        if base.device == self.device:
            return base
        on = base.device or "a device that the trace does not name"
        note = f"factors on kernels: measured on {self.device}, assumed for {on}"
        return replace(base, notes=tuple(dict.fromkeys((*base.notes, note))))

    def on(self, device: str) -> FactorTable:
        """The table for a step of `device`; itself on its own device.

        A product's time on this table's device says nothing about another one, so products take
        `PAPER_SHARE` of their time. At best it is the measured share; at worst they are no faster,
        as TF32 is on GPUs of the RTX 30 series. Other classes, which memory limits, take the
        measured share. Casts take as much longer as the memory is slower, if its rate is known.
        """
        if device == self.device:
            return self
        here, there = (memory_bytes_per_s(name) for name in (device, self.device))
        ratio = here / there if here and there else 1.0
        best = {one: self.factor(one, Reading.OPTIMISTIC) for one in ARITHMETIC}
        assumed = {
            one: Factor(PAPER_SHARE, min(share, PAPER_SHARE), 1.0, "Daydream, Alg. 3")
            for one, share in best.items()
        }
        return replace(
            self,
            device=device,
            products={},
            classes={**self.classes, **assumed},
            cast_bytes_per_s=self.cast_bytes_per_s * ratio,
        )

    def layout_seconds(self, work: ProductWork, scale: float = 1.0) -> float:
        """In 16 bit; `scale` as in `Roofline.seconds`."""
        traffic_s = 4 * work.layout / self.layout_bytes_per_s
        return scale * traffic_s + self.layout_s * work.directions

    def factor(self, kind: KernelClass, reading: Reading) -> float:
        return self.classes[kind].at(reading) if kind in self.classes else 1.0
