"""The messages that DistributedDataParallel sends, and where a recorded DDP step handles them.

DDP's reducer fills buckets in the order in which gradients become ready, from its second step on.
When a gradient is ready, it is scaled into its bucket (`mul_out`); when the bucket is full, it is
summed. Once the backward pass is over, every gradient is copied back (`copy_bucket_to_grad`).
A step that was recorded under DDP with one worker shows all of it, except the transfers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from autotune.arrays import IntArray
from autotune.dfg.graph import NONE
from autotune.strategy_space.builders.collectives import (
    DDP_BUCKET_BYTES,
    DDP_FIRST_BUCKET_BYTES,
    closed_buckets,
)
from autotune.whatif.base import Base
from autotune.whatif.question import Gradient
from autotune.workload import DTYPE_BYTES

PACK_MARK = "torch::distributed::reducer::mul_out"
UNPACK_MARK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together, by their positions in the order of the backward pass.

    `rows_bytes`: of the sparse gradient that the bucket consists of; None for dense ones.
    `element_bytes`: of one element.
    """

    positions: tuple[int, ...]
    size_bytes: float
    rows_bytes: float | None = None
    element_bytes: int = 4


def buckets_of(
    gradients: Sequence[Gradient],
    bucket_bytes: int = DDP_BUCKET_BYTES,
    first_bucket_bytes: int = DDP_FIRST_BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """DDP's buckets in the order in which they are sent: the first of 1 MiB, then of 25 MiB.

    A bucket is full once it holds its limit, so it may be larger. Each dtype has its own buckets,
    and each sparse gradient is a bucket of its own. No bucket waits for gradients behind an update.
    """
    buckets = []
    for _, same in groupby(enumerate(gradients), lambda one: one[1].updates_before):
        positions, ready = zip(*same, strict=True)
        sizes = [one.size_bytes for one in ready]
        keys = [one.dtype if one.rows_bytes is None else None for one in ready]
        for at in closed_buckets(sizes, keys, bucket_bytes, first_bucket_bytes):
            size_bytes = sum(sizes[place] for place in at)
            first = ready[at[0]]
            whole = tuple(positions[place] for place in at)
            element_bytes = DTYPE_BYTES[first.dtype]
            buckets.append(Bucket(whole, size_bytes, first.rows_bytes, element_bytes))
    return tuple(buckets)


@dataclass(frozen=True, eq=False)
class RecordedReducer:
    """Device ops of a step recorded under DDP, in the order of the host. On a CPU: host ops.

    - `packs` (V,): the copy of each gradient into its bucket; of a sparse one, which is not copied,
      the op that completes it.
    - `unpacks` (D,): the copies of dense gradients back, in the order of the buckets.
    """

    packs: IntArray
    unpacks: IntArray


def recorded_reducer(base: Base, gradients: Sequence[Gradient]) -> RecordedReducer | None:
    """The reducer's copies, None in a step without DDP.

    Also None if it does not copy each dense gradient (`gradient_as_bucket_view=True`).
    """
    dense = np.array([one.rows_bytes is None for one in gradients], dtype=np.bool_)
    copied, unpacks = (_copies(base, mark) for mark in (PACK_MARK, UNPACK_MARK))
    count = int(dense.sum())
    if len(copied) != count or len(unpacks) not in (0, count) or not count:
        return None
    packs = np.array([one.ready for one in gradients], dtype=np.int64)
    packs[dense] = copied
    return RecordedReducer(packs, unpacks)


_CHILD = re.compile(r"aten::|cuda|hip")


def _copies(base: Base, mark: str) -> IntArray:
    """What each event of this name does: the first device op that it launches, in order.

    On a CPU it is the first op inside the event. An event with children has a segment before them
    and usually one behind, which follows the last of them.
    """
    launched_by = {int(base.launch[op]): op for op in base.launched.tolist()}
    has_device = bool(base.on_device.any())
    names = base.names.ops
    marked = np.array([name == mark for name in names], dtype=np.bool_) & (base.queue != NONE)
    copies: list[int] = []
    for queue in np.unique(base.queue[marked]).tolist():
        waiting, inside, before = False, False, ""
        for op in np.flatnonzero(base.queue == queue).tolist():  # in the order of the thread
            if marked[op]:
                waiting = not (inside and _CHILD.match(before))
                inside = False
            elif waiting and (op in launched_by or not has_device):
                copies.append(launched_by.get(op, op))
                waiting, inside = False, True
            before = names[op]
    return np.array(copies, dtype=np.int64)
