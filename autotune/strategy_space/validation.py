"""Rules about one variable that every runtime has; `plan()` checks them before a trial is spent."""

from __future__ import annotations

from autotune.errors import InvalidStrategy
from autotune.strategy_space.strategy import (
    CASTS,
    SPARSE_COMPRESSORS,
    SPARSE_SYNCHRONIZERS,
    Compressor,
    Partition,
    Shard,
    VariableStrategy,
)
from autotune.workload import Variable

FEEDBACK_DTYPES = ("float32", "float64")


def check_shard(shard: Shard, variable: Variable, world_size: int) -> None:
    """Raise `InvalidStrategy` if a shard of `variable` cannot be sent like this."""
    if shard.placement is not None and shard.placement >= world_size:
        raise InvalidStrategy(
            f"placement of {variable.name!r} must be a rank below the world size {world_size}, "
            f"but is {shard.placement}"
        )
    if shard.shares is not None and len(shard.shares) != world_size:
        raise InvalidStrategy(
            f"shares of {variable.name!r} must be one for each of the {world_size} ranks, "
            f"but are {len(shard.shares)}"
        )
    _check_compressor(shard.compressor, variable)


def _check_compressor(compressor: Compressor, variable: Variable) -> None:
    if compressor is Compressor.NONE:
        return
    if compressor.error_feedback and variable.dtype not in FEEDBACK_DTYPES:
        raise InvalidStrategy(
            f"compressor {compressor} keeps its rounding errors in the gradient's dtype and needs "
            f"{' or '.join(FEEDBACK_DTYPES)}, but {variable.name!r} is {variable.dtype}; "
            "send it with none"
        )
    if compressor in CASTS and variable.dtype.startswith("complex"):
        raise InvalidStrategy(
            "complex gradients are sent uncompressed, "
            f"but {variable.name!r} is {variable.dtype} and has {compressor}"
        )


def check_sparse(variable: Variable, choice: VariableStrategy) -> None:
    """Raise `InvalidStrategy` if a variable's gradient cannot be sent as rows like this."""
    if not variable.sparse:
        raise InvalidStrategy(
            f"sparse handling {choice.sparse} needs a variable with sparse gradients, "
            f"but those of {variable.name!r} are dense; set sparse = dense"
        )
    allowed = SPARSE_SYNCHRONIZERS[choice.sparse]
    for shard in choice.shards:
        if shard.synchronizer not in allowed:
            raise InvalidStrategy(
                f"sparse handling {choice.sparse} needs the synchronizer {' or '.join(allowed)}, "
                f"but {variable.name!r} has {shard.synchronizer}; change one of them"
            )
        if shard.compressor not in SPARSE_COMPRESSORS:
            raise InvalidStrategy(
                "rows of a sparse gradient are sent as they are or as fp16 or bf16, "
                f"but {variable.name!r} has {shard.compressor}; change it or set sparse = dense"
            )
        if shard.pieces != 1:
            raise InvalidStrategy(
                "rows of a sparse gradient travel in one piece, "
                f"but {variable.name!r} has {shard.pieces}; set pieces = 1 or sparse = dense"
            )


def check_partition(variable: Variable, partition: Partition) -> None:
    """Raise `InvalidStrategy` if `partition` does not fit the variable."""
    if partition.axis >= len(variable.shape):
        raise InvalidStrategy(
            f"partition axis {partition.axis} needs a tensor of more dimensions, "
            f"but {variable.name!r} has shape {variable.shape}"
        )
    extent = variable.shape[partition.axis]
    if sum(partition.sizes) != extent:
        raise InvalidStrategy(
            f"partition sizes along axis {partition.axis} must sum to {extent}, but those of "
            f"{variable.name!r} with shape {variable.shape} sum to {sum(partition.sizes)}"
        )
    if variable.sparse and partition.axis != 0:
        raise InvalidStrategy(
            f"the sparse variable {variable.name!r} can be cut along axis 0 only, "
            f"but the partition axis is {partition.axis}"
        )
