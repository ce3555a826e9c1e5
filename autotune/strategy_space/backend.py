"""Which backend enacts a plan: torch's own DistributedDataParallel reducer, Horovod, or our hooks.

DDP's reducer averages flat buckets of whole variables with one all-reduce each, started in a fixed
order, as a plan's messages are. Bucket sizes alone determine its buckets if all variables have one
dtype and none is empty. In a Horovod script each all-reduce of all ranks is an operation of
Horovod.
"""

from __future__ import annotations

from collections.abc import Iterable

from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.strategy import Compressor, SparseHandling, Synchronizer
from autotune.workload import Library, Variable

_DTYPES_OF_HOROVOD = ("float16", "float32", "float64")
"""Gradients of other dtypes are unknown to `horovod.torch`."""


def buckets_of(plan: Plan) -> tuple[tuple[str, ...], ...] | None:
    """Return each bucket's variables, in the plan's order; None if it needs more than buckets."""
    one_dtype = len({message.dtype for message in plan.messages}) == 1
    if (
        plan.cross_step
        or plan.ring_order is not None
        or not one_dtype
        or not all(map(_is_bucket, plan.messages))
    ):
        return None
    return tuple(tuple(part.variable for part in message.slices) for message in plan.messages)


def backend_of(plan: Plan, variables: Iterable[Variable], library: Library = Library.DDP) -> str:
    """Describe the backend that enacts the plan of a model with these variables."""
    return backend_text(plan, sent_by_torch(plan, variables, library), library)


def sent_by_torch(
    plan: Plan, variables: Iterable[Variable], library: Library = Library.DDP
) -> bool:
    """Whether torch's reducer enacts the plan in a script that uses `library`.

    It never does with sparse gradients: torch sends them in a way that no plan describes.
    """
    if library is not Library.DDP:
        return False
    return buckets_of(plan) is not None and not any(variable.sparse for variable in variables)


def operations_of_horovod(plan: Plan) -> int:
    """The number of the plan's messages that are one operation of Horovod each."""
    if plan.ring_order is not None:
        return 0
    return sum(map(_is_operation, plan.messages))


def _is_operation(message: Message) -> bool:
    dtype = message.compressor.description.wire_dtype or message.dtype
    return (
        message.synchronizer is Synchronizer.ALL_REDUCE
        and not message.compressor.error_feedback
        and dtype in _DTYPES_OF_HOROVOD
        and message.sparse is SparseHandling.DENSE
        and not message.hierarchical
    )


def backend_text(plan: Plan, native: bool, library: Library = Library.DDP) -> str:
    """Describe the backend; `native` is torch's reducer."""
    count = len(plan.messages)
    if library is Library.HOROVOD:
        operations = operations_of_horovod(plan)
        if operations == count:
            return f"carried out by Horovod, {count} operation{'' if count == 1 else 's'}"
        if operations:
            return f"carried out by Horovod, {operations} of {count} messages, and autotune's hooks"
    who, what = ("torch's own DDP reducer", "bucket") if native else ("autotune's hooks", "message")
    return f"carried out by {who}, {count} {what}{'' if count == 1 else 's'}"


def _is_bucket(message: Message) -> bool:
    plain = (
        message.synchronizer is Synchronizer.ALL_REDUCE
        and message.compressor is Compressor.NONE
        and message.sparse is SparseHandling.DENSE
    )
    whole = all(part.axis is None and part.elements > 0 for part in message.slices)
    return plain and whole and not message.hierarchical and not message.ranks
