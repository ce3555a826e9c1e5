"""The precision in which products and convolutions of a trace compute, by types and kernels."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

import numpy as np

from autotune.arrays import BoolArray
from autotune.dfg.graph import NONE
from autotune.errors import InvalidInput
from autotune.whatif.base import Base

HALF_TYPES = ("c10::BFloat16", "c10::Half")
"""As torch's profiler writes the types of an operator's inputs."""
_HALF = re.compile(
    r"f16|fp16|__half|Half|[Bb][Ff]loat16|hgemm|[_\W]h(?:884|1688|16816)"
    r"|nvjet\w*?_[ht]s[hts]_|\bCijk_A[a-z]+_B[a-z]+_[HB][HBS]*_"
)
"""Kernels of cuBLAS, cuDNN, CUTLASS and rocBLAS, whose names state the types of a product."""
_TF32 = re.compile(r"tf32|tensorop_s1688gemm")
"""CUTLASS names `s1688gemm` without another type for TF32."""


UNKNOWN_MEMORY = (
    "the memory under autocast is not predicted from that in fp32; record the training under "
    "autocast and leave this what-if out"
)


class Precision(StrEnum):
    """Precisions of products below fp32."""

    HALF = "16 bit"
    TF32 = "TF32"


@lru_cache(maxsize=100_000)
def precision_of(kernel: str) -> Precision | None:
    """The precision that a product's kernel names, None for fp32 and for names that state none."""
    if _HALF.search(kernel):
        return Precision.HALF
    return Precision.TF32 if _TF32.search(kernel) else None


def refuse_precision(base: Base, products: BoolArray, *refused: Precision) -> None:
    """Raise `InvalidInput` if most of the time of `products` (N,) has one of these precisions.

    Most of the time decides: attention and copies may use 16 bit in the midst of fp32.
    """
    if base.precision:
        raise InvalidInput(
            "the precision of products changes once, but a what-if before lets them compute in "
            f"{base.precision}; name only one of them"
        )
    ops = np.flatnonzero(products)
    total_s = float(base.duration_s[ops].sum())
    for precision in refused:
        reached = np.array([_precision(base, op) is precision for op in ops.tolist()], np.bool_)
        share = float(base.duration_s[ops[reached]].sum()) / max(total_s, 1e-12)
        if share > 0.5:
            longest = ops[reached][np.argmax(base.duration_s[ops[reached]])]
            raise InvalidInput(
                f"the change needs products in fp32, but the trace already computes in {precision} "
                f"in {share:.0%} of their time, as in {base.names.ops[longest][:80]!r}; record "
                "the training without it"
            )


def _precision(base: Base, op: int) -> Precision | None:
    call = int(base.operator[op])
    inputs = None if call == NONE else base.names.operators[call].inputs
    if inputs is not None and any(one in HALF_TYPES for one in inputs.types):
        return Precision.HALF
    return precision_of(base.names.ops[op])
