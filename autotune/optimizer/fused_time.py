"""What a fused kernel takes where nobody measured it. The caller may give an estimate of its own (`op_graph.FusedTime`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.profiling.op_graph import Op, summed

ASSUMED = "the time of fused kernels: the sum of their parts less a launch gap each"


@dataclass(frozen=True)
class LaunchGaps:
    """The sum of the parts less `gap_s` for every kernel that is not started, and never less than the longest part. Assumed.

    It leaves out what fusion saves of memory traffic, which is often more, and what a bad fusion loses. From `most_ops` on nothing
    more is saved, as compilers bound their clusters. 5 us is about what starting a CUDA kernel takes its host.
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
        return max(
            longest_s, summed(ops, backward) - self.gap_s * (min(len(ops), self.most_ops) - 1)
        )
