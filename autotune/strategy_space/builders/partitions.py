"""How hand-made strategies cut variables."""

from __future__ import annotations

from autotune.strategy_space.strategy import Partition
from autotune.workload import Variable

MAX_SHARDS = 40
"""AutoSync's bound. AutoDist has none and cuts a prime number of rows into single rows."""


def even_partition(variable: Variable, axis: int, shards: int) -> Partition:
    """Cut into shards whose extents differ by at most one row, the longer ones first."""
    rows, longer = divmod(variable.shape[axis], shards)
    return Partition(axis, (rows + 1,) * longer + (rows,) * (shards - longer))


def by_smallest_divisor(variable: Variable, axis: int) -> Partition | None:
    """Cut into the fewest equal shards; None if no divisor up to `MAX_SHARDS` exists."""
    extent = variable.shape[axis]
    divisors = (number for number in range(2, min(extent, MAX_SHARDS) + 1) if extent % number == 0)
    shards = next(divisors, None)
    return even_partition(variable, axis, shards) if shards else None


def by_smallest_non_divisor(variable: Variable, axis: int) -> Partition | None:
    """Cut into the fewest unequal shards; None with fewer than three rows."""
    extent = variable.shape[axis]
    shards = next((number for number in range(2, extent) if extent % number), None)
    return even_partition(variable, axis, shards) if shards else None


def in_pieces(
    variable: Variable, most_bytes: int, most_pieces: int | None = None
) -> Partition | None:
    """Cut evenly along the longest axis into shards of at most `most_bytes`.

    Shards are larger if rows or `most_pieces` require it. Sparse variables are cut along axis 0.
    """
    if variable.grad_bytes <= most_bytes or not variable.shape:
        return None
    axis = 0 if variable.sparse else variable.shape.index(max(variable.shape))
    extent = variable.shape[axis]
    shards = min(-(-variable.grad_bytes // most_bytes), extent)
    rows = -(-extent // shards)
    row_bytes = variable.grad_bytes // extent
    if rows * row_bytes > most_bytes and rows > 1:  # rows do not split exactly
        shards = -(-extent // max(1, most_bytes // row_bytes))
    shards = shards if most_pieces is None else min(shards, most_pieces)
    return even_partition(variable, axis, shards) if shards > 1 else None
