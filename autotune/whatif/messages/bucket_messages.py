"""How DistributedDataParallel sends its buckets: names, bytes and times of the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.traffic import Collective
from autotune.whatif.messages.collective_times import CollectiveTimes
from autotune.whatif.messages.ddp_buckets import Bucket

METADATA_BYTES = 32
"""What every worker tells the others of its rows before it sends them: eight numbers of 4 bytes."""


@dataclass(frozen=True, eq=False)
class BucketMessages:
    """A message for each bucket, shape (B,). `size_bytes` as of `CollectiveTimes.seconds`."""

    names: tuple[str, ...]
    size_bytes: FloatArray
    seconds: FloatArray


def messages_of(
    buckets: Sequence[Bucket], times: CollectiveTimes, costs: RuntimeCosts
) -> BucketMessages:
    """Dense buckets are summed by an all-reduce. A sparse gradient's rows are gathered from all.

    Gathering takes three all-gathers: of the metadata, the row numbers, the rows. Each worker sorts
    its own rows first, and adds those of all in the end (gloo's `AsyncSparseAllreduceWork`).
    """
    sparse = np.array([bucket.rows_bytes is not None for bucket in buckets], dtype=np.bool_)
    rows_bytes = np.array([bucket.rows_bytes or 0.0 for bucket in buckets])
    workers = times.cluster.world_size
    sizes = np.where(
        sparse, workers * rows_bytes, np.array([bucket.size_bytes for bucket in buckets])
    )
    seconds = np.zeros(len(buckets))
    seconds[~sparse] = times.seconds(Collective.ALL_REDUCE, sizes[~sparse])
    if sparse.any():
        small = np.full(int(sparse.sum()), float(workers * METADATA_BYTES))
        numbers = np.zeros(len(small))  # their bytes are among those of the rows
        seconds[sparse] = (
            times.seconds(Collective.ALL_GATHER, small)
            + times.seconds(Collective.ALL_GATHER, numbers)
            + times.seconds(Collective.ALL_GATHER, sizes[sparse])
            + costs["rows_take_s_per_byte"] * rows_bytes[sparse]
            + costs["rows_add_s_per_byte"] * sizes[sparse]
        )
    names = tuple(
        f"all_gather of rows, bucket {number}" if rows else f"all_reduce bucket {number}"
        for number, rows in enumerate(sparse.tolist())
    )
    return BucketMessages(names, sizes, seconds)
