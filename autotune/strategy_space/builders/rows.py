"""Sparse gradients as rows in any strategy, as torch's DDP and Horovod send them by default."""

from __future__ import annotations

from dataclasses import replace

from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.strategy import (
    SPARSE_COMPRESSORS,
    SPARSE_SYNCHRONIZERS,
    Compressor,
    Shard,
    SparseHandling,
    Strategy,
    VariableStrategy,
)
from autotune.workload import Workload


def ddp_with_rows(workload: Workload) -> Strategy:
    """DDP's default buckets as torch sends them: sparse gradients alone, as rows."""
    return with_rows(ddp_default(workload), workload)


def with_rows(strategy: Strategy, workload: Workload, every: bool = True) -> Strategy:
    """Send `every` sparse gradient as rows by its synchronizers, or only those that must be rows.

    They stay dense if a synchronizer cannot send rows. Rows travel in one piece and flat, as the
    replay predicts them, and without a compressor that needs them dense.
    """
    rows = {one.name for one in workload.variables if (one.sparse if every else one.rows_only)}
    choices = tuple(
        _as_rows(choice) if choice.variable in rows else choice for choice in strategy.variables
    )
    return replace(strategy, variables=choices) if rows else strategy


def _as_rows(choice: VariableStrategy) -> VariableStrategy:
    used = {shard.synchronizer for shard in choice.shards}
    for handling in (SparseHandling.ALL_GATHER, SparseHandling.GATHER_SCATTER):
        if used <= set(SPARSE_SYNCHRONIZERS[handling]):
            shards = tuple(_of_rows(shard) for shard in choice.shards)
            return replace(choice, shards=shards, sparse=handling)
    return choice


def _of_rows(shard: Shard) -> Shard:
    flat = replace(shard, pieces=1, hierarchical=False)
    if flat.compressor in SPARSE_COMPRESSORS:
        return flat
    return replace(flat, compressor=Compressor.NONE, ratio=None, rank=None)
