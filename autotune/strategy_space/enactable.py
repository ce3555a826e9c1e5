"""Plans that the runtime refuses, by the plan alone.

Plans are checked before a trial is spent on them, and again before the ranks load them.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    ROOTED,
    SPARSE_COMPRESSORS,
    SPARSE_SYNCHRONIZERS,
    Compressor,
    SparseHandling,
    Synchronizer,
    direct_error,
    in_flight_error,
)
from autotune.workload import Workload

_FED_BACK = ("float32", "float64")
_MOST_INDICES = 2**31 - 1


def refusal_reason(plan: Plan, rewrites_graph: bool = False) -> str | None:
    """Return the rule that keeps the runtime from enacting `plan`, or None.

    `rewrites_graph`: whether the model's graph is rewritten, as that of TensorFlow is.
    """
    if not plan.local_copies and not rewrites_graph:
        return (
            "replicas read variables at a parameter server in TensorFlow only, but local_copies is "
            "false; set it to true"
        )
    if plan.op_fusion and not rewrites_graph:
        return (
            "sets of ops become one kernel in TensorFlow only, but the plan fuses "
            f"{', '.join(plan.op_fusion[0][:3])} ({len(plan.op_fusion)} sets); empty op_fusion"
        )
    if plan.ring_order is not None and sorted(plan.ring_order) != list(range(plan.world_size)):
        return (
            f"ring_order must name each of the {plan.world_size} ranks once, "
            f"but is {plan.ring_order}"
        )
    error = in_flight_error(plan.in_flight, plan.cross_step, plan.direct) or _results_error(plan)
    if error is not None:
        return error
    for number, message in enumerate(plan.messages):
        reason = _message_refusal(message, plan.world_size)
        if reason is not None:
            return f"message {number} ({describe(message)}): {reason}"
    return None


def _results_error(plan: Plan) -> str | None:
    """Return the rule that the order of the plan's results breaks, or None."""
    if plan.results is None:
        return None
    if not plan.cross_step or sorted(plan.results) != list(range(len(plan.messages))):
        return (
            f"results must name each of the {len(plan.messages)} messages of a plan with "
            f"cross_step once, but are {plan.results}, cross_step: {plan.cross_step}"
        )
    if any(message.sparse is not SparseHandling.DENSE for message in plan.messages):
        return (
            "norms are not known of gradients whose rows travel, but the plan has results and such "
            "a message; set sparse = dense"
        )
    return None


def _message_refusal(message: Message, world_size: int) -> str | None:
    compressed = message.compressor is not Compressor.NONE
    if message.compressor.error_feedback:
        reason = _feedback_refusal(message)
        if reason is not None:
            return reason
    if compressed and message.dtype.startswith("complex"):
        return f"complex gradients travel uncompressed, but the compressor is {message.compressor}"
    if message.sparse is not SparseHandling.DENSE:
        reason = _rows_refusal(message)
        if reason is not None:
            return reason
    if message.synchronizer is Synchronizer.DIRECT_EXCHANGE:
        reason = _direct_refusal(message, world_size)
        if reason is not None:
            return reason
    elif message.shares is not None or message.pieces != 1:
        return f"only a direct exchange has shares and pieces, but it is {message.synchronizer}"
    if message.ranks:
        return f"every rank takes part in a message, but the plan names {message.ranks}"
    if message.synchronizer in ROOTED and (
        message.owner is None or not 0 <= message.owner < world_size
    ):
        return f"the owner must be a rank below {world_size}, but is {message.owner}"
    return None


def _direct_refusal(message: Message, world_size: int) -> str | None:
    if message.shares is not None and len(message.shares) != world_size:
        return f"shares must be one for each of {world_size} ranks, but are {len(message.shares)}"
    if message.sparse is not SparseHandling.DENSE and message.pieces != 1:
        return f"rows of a sparse gradient travel in one piece, but it has {message.pieces}"
    return direct_error(message.compressor, message.shares, message.pieces)


def _feedback_refusal(message: Message) -> str | None:
    if message.dtype not in _FED_BACK:
        return (
            f"compressor {message.compressor} needs float32 or float64 gradients, "
            f"but these are {message.dtype}; use none, fp16 or bf16"
        )
    if message.compressor is Compressor.TOP_K and message.elements > _MOST_INDICES:
        return (
            f"top_k sends int32 indices, but the message has {message.elements} elements; "
            f"cut it to at most {_MOST_INDICES}"
        )
    return None


def dense_rows_refusal(plan: Plan, workload: Workload) -> str | None:
    """Return why a plan is refused that sends gradients dense which the script needs as rows."""
    rows_only = {variable.name for variable in workload.variables if variable.rows_only}
    for number, message in enumerate(plan.messages if rows_only else ()):
        dense = message.sparse is SparseHandling.DENSE
        if dense and not rows_only.isdisjoint(part.variable for part in message.slices):
            return (
                f"message {number} ({describe(message)}): the script must get rows of the sparse "
                "gradient, but the message is dense; set sparse = all_gather or gather_scatter"
            )
    return None


def scaled_refusal_reason(plan: Plan, byte_scale: float) -> str | None:
    """Return why a plan is refused while 1/`byte_scale` of each message is sent, or None."""
    messages = [message for message in plan.messages if message.compressor.error_feedback]
    if byte_scale == 1 or not messages:
        return None
    return (
        f"with bytes divided by {byte_scale:g} a compressor would work on a part of each message "
        "only and its cost be measured too low, but the plan has "
        f"{describe(messages[0])} with {messages[0].compressor}; "
        "use none, fp16 or bf16, or a byte scale of 1"
    )


def scaled_space(space: SearchSpace, byte_scale: float) -> SearchSpace:
    """Return the part of `space` that can be enacted with 1/`byte_scale` of each message."""
    if byte_scale == 1:
        return space
    return replace(
        space, compressors=tuple(kind for kind in space.compressors if not kind.error_feedback)
    )


def _rows_refusal(message: Message) -> str | None:
    if message.compressor not in SPARSE_COMPRESSORS:
        return (
            "rows of a sparse gradient travel as they are or as fp16 or bf16, "
            f"but the compressor is {message.compressor}; change it or set sparse = dense"
        )
    if len(message.slices) != 1 or message.slices[0].axis not in (None, 0):
        return (
            "rows of a sparse gradient travel alone, whole or cut along axis 0, "
            f"but the message holds {len(message.slices)} slice(s)"
        )
    allowed = SPARSE_SYNCHRONIZERS[message.sparse]
    if message.synchronizer not in allowed:
        return (
            f"sparse = {message.sparse} needs {' or '.join(allowed)}, "
            f"but the synchronizer is {message.synchronizer}"
        )
    return None


def describe(message: Message) -> str:
    """Describe a message in an error: its synchronizer and first variables."""
    names = list(dict.fromkeys(part.variable for part in message.slices))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{message.synchronizer} of {', '.join(names[:3])}{more}"
