"""Strategies from arrays of choices; the shards of the thousands in a round have few distinct
values.
"""

from __future__ import annotations

import numpy as np

from autotune.arrays import IntArray
from autotune.sampler.draws import Context, Drawn
from autotune.strategy_space.shares import Shares
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy

KEPT_SHARDS = 100_000  # distinct ones in the cache


class Writer:
    """Builds strategies from arrays of choices."""

    def __init__(self, context: Context) -> None:
        self.context = context
        names = [variable.name for variable in context.workload.variables]
        self.by_name = sorted(range(len(names)), key=names.__getitem__)
        self.settings = [context.space.settings_of(kind) for kind in context.space.compressors]
        self._shards: dict[bytes, Shard] = {}
        self._owners: dict[Shares | None, int] = {}

    def written(self, drawn: Drawn) -> Strategy:
        variables, partitions, sparse = (
            self.context.workload.variables,
            drawn.partitions,
            drawn.sparse,
        )
        number = self._owners.setdefault(drawn.shares, len(self._owners))
        table = drawn.table()
        shards = self._shards_of(np.column_stack([table, np.full(len(table), number)]))
        ends = np.searchsorted(drawn.owner, np.arange(-1, len(partitions)), side="right").tolist()
        choices = [
            VariableStrategy(
                variables[at].name, shards[ends[at] : ends[at + 1]], partitions[at], sparse[at]
            )
            for at in self.by_name
        ]
        crossing, ring = drawn.cross_step, drawn.ring_order
        return Strategy(tuple(choices), crossing, ring, in_flight=drawn.in_flight)

    def _shards_of(self, table: IntArray) -> tuple[Shard, ...]:
        """One shard per row; equal rows share an object."""
        if len(self._shards) > KEPT_SHARDS:
            self._shards.clear()
        shares = list(self._owners)
        known = self._shards
        text, width = table.tobytes(), table.itemsize * table.shape[1]
        keys = [text[start : start + width] for start in range(0, len(text), width)]
        for number, key in enumerate(keys):
            if key not in known:
                *columns, owners = table[number].tolist()
                known[key] = self._shard(shares[owners], *columns)
        return tuple([known[key] for key in keys])

    def _shard(
        self,
        shares: Shares | None,
        synchronizer: int,
        compressor: int,
        parameter: int,
        placement: int,
        group: int,
        priority: int,
        hierarchical: int,
        pieces: int,
    ) -> Shard:
        setting = self.settings[compressor][parameter]
        kind = self.context.space.synchronizers[synchronizer]
        return Shard(
            kind,
            setting.compressor,
            None if placement < 0 else placement,
            None if group < 0 else group,
            priority,
            bool(hierarchical),
            setting.ratio,
            setting.rank,
            shares=shares if kind is Synchronizer.DIRECT_EXCHANGE else None,
            pieces=pieces,
        )
