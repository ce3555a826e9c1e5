"""What-ifs of training on a processor, where ops of the host compute."""

from __future__ import annotations

import re

import numpy as np

from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.primitives import scale
from autotune.whatif.question import Factor, Question
from autotune.whatif.registry import what_if

MATRIX = re.compile(r"mm$|addmm|linear|conv|lstm|rnn|matmul|attention")
"""Names of operators that multiply matrices."""
_SOURCE = (
    "about the middle of what the four examples showed without and with the change, on two loaded "
    "cores of an AMD EPYC (benchmarks.whatif_truth.cpu_factors); single ones lay outside the range"
)
FUSED_OPTIMIZER = Factor(expected=0.5, optimistic=0.2, pessimistic=0.85, source=_SOURCE)
BF16_MATRIX = Factor(expected=0.65, optimistic=0.35, pessimistic=0.95, source=_SOURCE)


def _require_processor(base: Base) -> None:
    if base.on_device.any():
        raise InvalidInput(
            "this what-if is of training on a processor, but the trace has work of a device; use "
            "the one without _cpu"
        )


@what_if(
    "fused_adam_cpu",
    title="a fused optimizer on a processor",
    source="Daydream, Alg. 4, with a factor measured on a processor",
    enact="torch.optim.Adam(model.parameters(), fused=True)",
)
def fused_adam_cpu(base: Base, question: Question) -> Base:
    """The optimizer's ops take a share of their time (`FUSED_OPTIMIZER`); nothing else changes."""
    _require_processor(base)
    updates = (base.kind == Kind.UPDATE) & (base.queue != NONE)
    if not updates.any():
        raise InvalidInput(
            "a fused optimizer changes the ops of the optimizer, but the trace shows none; record "
            "with torch.profiler, which marks Optimizer.step"
        )
    return scale(base, updates, FUSED_OPTIMIZER.at(question.reading))


@what_if(
    "amp_cpu",
    title="autocast to bfloat16 on a processor",
    source="Daydream, Alg. 3, with a factor measured on a processor",
    enact='with torch.autocast("cpu", torch.bfloat16): loss = ...',
)
def amp_cpu(base: Base, question: Question) -> Base:
    """Operators that multiply matrices take a share of their time (`BF16_MATRIX`).

    What casts and other operators gain or lose is within the range of the factor. A processor
    without instructions for bf16 is slower than this.
    """
    _require_processor(base)
    names = np.array([bool(MATRIX.search(name)) for name in base.names.ops], dtype=np.bool_)
    chosen = names & (base.kind != Kind.UPDATE) & (base.queue != NONE)
    if not chosen.any():
        raise InvalidInput(
            "autocast speeds up matrix products and convolutions, but the trace shows none"
        )
    return scale(base, chosen, BF16_MATRIX.at(question.reading))
