"""Estimated times of fused kernels that nobody measured (an `op_graph.FusedTime`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.profiling.op_graph import Op, summed

ASSUMED = "the time of fused kernels: the sum of their parts less a launch gap each"


@dataclass(frozen=True)
class LaunchGaps:
    """The sum of the parts less `gap_s` for every saved kernel, at least the longest part. Assumed.

    It ignores saved memory traffic, which is often larger, and losses by bad fusions. Above
    `most_ops` nothing more is saved, since compilers bound their clusters. A host takes about 5 us
    to start a CUDA kernel.
    """

    gap_s: float = 5e-6
    most_ops: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.gap_s < math.inf or self.most_ops < 1:
            raise InvalidInput(
                f"launch gaps need finite seconds of at least 0 and at least 1 op, but are {self}"
            )

    def __call__(self, ops: Sequence[Op], backward: bool) -> float:
        longest_s = max(op.backward_s if backward else op.forward_s for op in ops)
        saved_s = self.gap_s * (min(len(ops), self.most_ops) - 1)
        return max(longest_s, summed(ops, backward) - saved_s)
