"""Sums the gradients of one step by the messages of a plan, as ops of the step that is traced.

The script's own collectives carry the messages. TensorFlow starts them one after the other, in the
order in which they are traced: each holds the strategy's ordering token until it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autotune.errors import InvalidStrategy
from autotune.strategy_space.enactable import describe, refusal_reason
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import CASTS, Compressor, SparseHandling, Synchronizer
from autotune.workload import Variable

STRATEGY = "MultiWorkerMirroredStrategy"
_WIRE = {Compressor.FP16: tf.float16, Compressor.BF16: tf.bfloat16}
_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Collectives:
    """The script's own: `all_reduce` sums a dense tensor, `gather` concatenates rows."""

    all_reduce: Callable[[Any], Any]
    gather: Callable[[Any], Any]
    world_size: int


def refuse(plan: Plan, variables: Sequence[Variable], world_size: int) -> None:
    """Raise `InvalidStrategy` for a plan that these collectives cannot enact."""
    if plan.world_size != world_size:
        raise InvalidStrategy(
            f"the plan is for {plan.world_size} ranks, but {world_size} workers train"
        )
    planned = {part.variable for message in plan.messages for part in message.slices}
    if planned != {one.name for one in variables}:
        different = sorted(planned ^ {one.name for one in variables})
        raise InvalidStrategy(
            f"a plan must name exactly the variables with gradients, but differs in {different[0]}"
        )
    if reason := refusal_reason(plan) or _refusal(plan, {one.name: one for one in variables}):
        raise InvalidStrategy(f"{STRATEGY} cannot enact this plan: {reason}")


def _refusal(plan: Plan, variables: Mapping[str, Variable]) -> str | None:
    if plan.cross_step:
        return "a step ends with its updates, but cross_step lets messages continue into the next"
    if plan.ring_order not in (None, tuple(range(plan.world_size))):
        return f"TensorFlow's ring follows the workers, but ring_order is {plan.ring_order}"
    for number, message in enumerate(plan.messages):
        sparse = any(variables[part.variable].sparse for part in message.slices)
        if reason := _message_refusal(message, sparse):
            return f"message {number} ({describe(message)}): {reason}"
    return None


def _message_refusal(message: Message, sparse: bool) -> str | None:
    if sparse:
        whole = len(message.slices) == 1 and message.slices[0].axis is None
        own = message.sparse is SparseHandling.ALL_GATHER and whole
        if own and message.compressor is Compressor.NONE:
            return None
        return "it gathers rows whole and as they are; set sparse = all_gather, compressor = none"
    if message.synchronizer is not Synchronizer.ALL_REDUCE:
        return "each worker runs its own graph, so workers meet in all-reduces only; use all_reduce"
    if message.hierarchical:
        return "its rings span all workers; set hierarchical = false"
    if message.dtype not in _DTYPES:
        return f"TensorFlow's collectives sum {', '.join(_DTYPES)}, but it is {message.dtype}"
    if message.compressor is not Compressor.NONE and message.compressor not in CASTS:
        return f"the compressor must be none, fp16 or bf16, but is {message.compressor}"
    return None


def summed(plan: Plan, gradients: Mapping[str, Any], collectives: Collectives) -> dict[str, Any]:
    """Return the sum over all workers of each gradient, by variable."""
    results: dict[str, Any] = {}
    pieces: dict[str, list[tuple[TensorSlice, Any]]] = defaultdict(list)
    for message in plan.messages:
        first = message.slices[0]
        if isinstance(gradients[first.variable], tf.IndexedSlices):
            results[first.variable] = collectives.gather(gradients[first.variable])
            continue
        parts = [_slice(gradients[part.variable], part) for part in message.slices]
        flat = tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
        total = _sent(flat, message.compressor, collectives)
        sizes = [part.elements for part in message.slices]
        for part, local, piece in zip(
            message.slices, parts, tf.split(total, sizes) if sizes[1:] else [total], strict=True
        ):
            pieces[part.variable].append((part, tf.reshape(piece, local.shape)))
    for name, of_variable in pieces.items():
        ordered = sorted(of_variable, key=lambda one: one[0].start)
        axis = ordered[0][0].axis
        tensors = [tensor for _, tensor in ordered]
        results[name] = tensors[0] if axis is None else tf.concat(tensors, axis)
    return results


def _slice(gradient: Any, part: TensorSlice) -> Any:
    if part.axis is None:
        return gradient
    begin, size = [0] * gradient.shape.rank, gradient.shape.as_list()
    begin[part.axis], size[part.axis] = part.start, part.stop - part.start
    return tf.slice(gradient, begin, size)


def _sent(flat: Any, compressor: Compressor, collectives: Collectives) -> Any:
    """Sum `flat`. What is cast is divided before, so that no sum leaves the range of the cast."""
    wire = _WIRE.get(compressor)
    if wire is None or wire == flat.dtype:
        return collectives.all_reduce(flat)
    shared = tf.cast(flat / collectives.world_size, wire)
    return tf.cast(collectives.all_reduce(shared), flat.dtype) * collectives.world_size
