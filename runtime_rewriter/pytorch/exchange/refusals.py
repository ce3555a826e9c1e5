"""What this runtime cannot enact, told before any step."""

from __future__ import annotations

from autotune.strategy_space.plan import Message, Plan, Primitive
from autotune.strategy_space.strategy import Compressor, SparseHandling

ENACTED_COMPRESSORS = (Compressor.NONE, Compressor.FP16, Compressor.BF16)
ROW_COMPRESSORS = (Compressor.NONE, Compressor.FP16, Compressor.BF16)
"""Of sparse gradients that travel as rows."""
_ROOTED = (Primitive.PUSH_PULL, Primitive.REDUCE_BROADCAST)


def why_refused(plan: Plan) -> str | None:
    """The rule that keeps this runtime from enacting `plan`, or None; needs no model and no process group."""
    if plan.ring_order is not None and sorted(plan.ring_order) != list(range(plan.world_size)):
        return f"ring_order must name each of the {plan.world_size} ranks once, but is {plan.ring_order}"
    for number, message in enumerate(plan.messages):
        reason = _why_message_refused(message, plan.world_size)
        if reason is not None:
            return f"message {number} ({describe(message)}): {reason}"
    return None


def _why_message_refused(message: Message, world_size: int) -> str | None:
    compressed = message.compressor is not Compressor.NONE
    if message.compressor not in ENACTED_COMPRESSORS:
        return f"compressor must be none, fp16 or bf16, but is {message.compressor}"
    if compressed and message.dtype.startswith("complex"):
        return f"complex gradients travel uncompressed, but the compressor is {message.compressor}"
    if message.sparse is not SparseHandling.DENSE:
        reason = _why_rows_refused(message)
        if reason is not None:
            return reason
    if message.ranks:
        return f"every rank takes part in a message, but the plan names {message.ranks}"
    if message.primitive in _ROOTED and (message.owner is None or not 0 <= message.owner < world_size):
        return f"the owner must be a rank below {world_size}, but is {message.owner}"
    return None


def _why_rows_refused(message: Message) -> str | None:
    if message.compressor not in ROW_COMPRESSORS:
        return f"rows of a sparse gradient travel as they are or as fp16 or bf16, but the compressor is {message.compressor}"
    if len(message.slices) != 1 or message.slices[0].axis not in (None, 0):
        return f"rows of a sparse gradient travel alone, whole or cut along axis 0, but the message holds {len(message.slices)} slice(s)"
    if (message.primitive is Primitive.PUSH_PULL) != (message.sparse is SparseHandling.GATHER_SCATTER) or (
        message.primitive is Primitive.REDUCE_BROADCAST
    ):
        return f"a sparse gradient is gathered by all, or by a parameter server and scattered, but the message asks for {message.sparse}"
    return None


def describe(message: Message) -> str:
    """For error messages: the primitive and the first variables."""
    names = list(dict.fromkeys(part.variable for part in message.slices))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{message.primitive} of {', '.join(names[:3])}{more}"
