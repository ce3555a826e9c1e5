"""Plans in a script of `tf.distribute.MultiWorkerMirroredStrategy`.

Each worker runs its own graph, so workers meet in collectives of all of them only. Rows of a sparse
gradient reach the script's optimizer as the script gathers them, with every row of every worker.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autotune.strategy_space.enactable import describe
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import CASTS, Compressor, SparseHandling, Synchronizer

MIRRORED = "MultiWorkerMirroredStrategy"
MIRRORED_LIMITS = (
    f"workers of {MIRRORED} meet in all-reduces and gathered rows within the step, so no plan has "
    "servers, hierarchical messages, ring orders, or compressors other than casts"
)
_UNCAST = (Compressor.NONE, *CASTS)


def mirrored_space(space: SearchSpace) -> SearchSpace:
    """Return the part of `space` that the workers of such a script can enact."""
    return replace(
        space,
        synchronizers=(Synchronizer.ALL_REDUCE,),
        compressors=tuple(kind for kind in space.compressors if kind in _UNCAST),
        sparse=(SparseHandling.DENSE, SparseHandling.ALL_GATHER),
        dense_rows=False,
        hierarchical=False,
        ring_orders=False,
    )


def mirrored_refusal(plan: Plan, sparse: Collection[str]) -> str | None:
    """Return why workers cannot enact the plan, or None. `sparse`: variables with rows."""
    if plan.cross_step:
        return "a step ends with its updates, but cross_step lets messages continue into the next"
    if plan.ring_order is not None:
        return f"TensorFlow's ring follows the workers, but ring_order is {plan.ring_order}"
    for number, message in enumerate(plan.messages):
        rows = any(part.variable in sparse for part in message.slices)
        if reason := _message_refusal(message, rows):
            return f"message {number} ({describe(message)}): {reason}"
    return None


def _message_refusal(message: Message, rows: bool) -> str | None:
    if message.synchronizer is not Synchronizer.ALL_REDUCE:
        return "each worker runs its own graph, so workers meet in all-reduces only; use all_reduce"
    if message.hierarchical:
        return "its rings span all workers; set hierarchical = false"
    if rows and message.sparse is not SparseHandling.ALL_GATHER:
        return "the script's optimizer expects the rows of all workers; set sparse = all_gather"
    if message.compressor not in _UNCAST:
        return f"the compressor must be none, fp16 or bf16, but is {message.compressor}"
    return None
