"""A what-if: copies between host and device take no time."""

from __future__ import annotations

from autotune.dfg.graph import Kind
from autotune.whatif.base import Base
from autotune.whatif.primitives import scale, select
from autotune.whatif.question import Question
from autotune.whatif.registry import what_if


@what_if(
    "no_copies",
    title="no copies between host and device",
    source="ours",
    enact="keep the batches on the device",
)
def no_copies(base: Base, question: Question) -> Base:
    """Every copy takes no time. Its launch on the host stays."""
    return scale(base, select(base, kinds=[Kind.COPY], on_device=True), 0.0)
