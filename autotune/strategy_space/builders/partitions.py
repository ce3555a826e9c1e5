"""How hand-made strategies cut variables."""

from __future__ import annotations

from autotune.strategy_space.strategy import Partition
from autotune.workload import Variable

MAX_SHARDS = 40
"""AutoSync's bound. AutoDist has none where it looks for divisors, and cuts a prime number of rows into single ones."""


def even_partition(variable: Variable, axis: int, shards: int) -> Partition:
    """Shards whose extents differ by at most one row, the longer ones first."""
    rows, longer = divmod(variable.shape[axis], shards)
    return Partition(axis, (rows + 1,) * longer + (rows,) * (shards - longer))


def by_smallest_divisor(variable: Variable, axis: int) -> Partition | None:
    """Equal shards, as few as possible but two; None if the extent has no divisor up to `MAX_SHARDS`."""
    extent = variable.shape[axis]
    shards = next(
        (number for number in range(2, min(extent, MAX_SHARDS) + 1) if extent % number == 0), None
    )
    return even_partition(variable, axis, shards) if shards else None


def by_smallest_non_divisor(variable: Variable, axis: int) -> Partition | None:
    """Unequal shards, as few as possible; None where there are fewer than three rows."""
    extent = variable.shape[axis]
    shards = next((number for number in range(2, extent) if extent % number), None)
    return even_partition(variable, axis, shards) if shards else None


def in_pieces(
    variable: Variable, most_bytes: int, most_pieces: int | None = None
) -> Partition | None:
    """Even shards of at most `most_bytes`, as far as rows along the longest axis and `most_pieces` allow; sparse variables along axis 0."""
    if variable.grad_bytes <= most_bytes or not variable.shape:
        return None
    axis = (
        0
        if variable.sparse
        else max(
            range(len(variable.shape)),
            key=lambda candidate: (variable.shape[candidate], -candidate),
        )
    )
    shards = min(-(-variable.grad_bytes // most_bytes), variable.shape[axis])
    rows = -(-variable.shape[axis] // shards)
    row_bytes = variable.grad_bytes // variable.shape[axis]
    if rows * row_bytes > most_bytes and rows > 1:  # rows do not split exactly
        shards = -(-variable.shape[axis] // max(1, most_bytes // row_bytes))
    shards = shards if most_pieces is None else min(shards, most_pieces)
    return even_partition(variable, axis, shards) if shards > 1 else None
