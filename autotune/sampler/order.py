"""The planned issue order of strategies that are still arrays of choices.

Thousands are drawn in a round, and a plan for each would be slow. So messages and their costs are
computed on the arrays, with two simplifications: PowerSGD's matrices count as square, and ring
orders count as the cluster's own, because they change the speed of all collectives equally.

| symbol | meaning |
|---|---|
| S | number of shards |
| M | number of messages |
"""

from __future__ import annotations

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.costs.issue_order import planned_order
from autotune.costs.row_traffic import ROW_NUMBER_BYTES, collective_share
from autotune.costs.sync_cost import MessageKind, Rates
from autotune.costs.timing import needed_times_s, ready_times_s
from autotune.sampler.draws import Context, Drawn, direct_index
from autotune.strategy_space.compressors import INT8_BLOCK
from autotune.strategy_space.space import CompressorSetting
from autotune.strategy_space.strategy import Compressor, SparseHandling
from autotune.workload import DTYPE_BYTES

NODES = 3
"""Orders tried for one strategy."""


class PlannedOrder:
    """Plans orders for strategies of one context."""

    def __init__(self, context: Context) -> None:
        workload, space = context.workload, context.space
        self.space = space
        self.ready_s, self.needed_s = ready_times_s(workload), needed_times_s(workload)
        self.start_s, self.forward_s = workload.backward_s + workload.update_s, workload.forward_s
        self.variables, self.ranks = workload.variables, context.cluster.world_size
        self.rates = Rates(context.cluster)
        known, dtypes = sorted(DTYPE_BYTES), [variable.dtype for variable in workload.variables]
        self.dtype = np.array([known.index(dtype) for dtype in dtypes], dtype=np.int64)
        self.element_bytes = np.array([DTYPE_BYTES[dtype] for dtype in dtypes], dtype=np.int64)

    def priorities(self, drawn: Drawn) -> IntArray:
        """Place of each shard's message in the order, shape (S,)."""
        message, first = self._messages(drawn)
        count, owner = len(first), drawn.owner
        ready_s, needed_s = np.zeros(count), np.full(count, np.inf)
        np.maximum.at(ready_s, message, self.ready_s[owner])
        np.minimum.at(needed_s, message, self.needed_s[owner])
        columns = (drawn.synchronizer, drawn.placement, drawn.hierarchical, owner, drawn.pieces)
        rows = np.column_stack([column[first] for column in columns]).tolist()
        synchronizers, direct = self.space.synchronizers, direct_index(self.space)
        kinds = [
            MessageKind(
                synchronizers[kind],
                None if rank < 0 else rank,
                bool(two_level),
                drawn.sparse[variable],
                shares=drawn.shares if kind == direct else None,
                pieces=pieces,
            )
            for kind, rank, two_level, variable, pieces in rows
        ]
        wire_bytes = np.zeros(count)
        np.add.at(wire_bytes, message, self._wire_bytes(drawn))
        cost_s = self.rates.costs(kinds, wire_bytes).channel_s
        order = planned_order(ready_s, cost_s, needed_s, self.start_s, self.forward_s, NODES).order
        place = np.empty(count, dtype=np.int64)
        place[order] = np.arange(count)
        return place[message]

    def _messages(self, drawn: Drawn) -> tuple[IntArray, IntArray]:
        """(message of each shard (S,), a shard of each message (M,)), as `plan()` forms them."""
        dense = np.array([kind is SparseHandling.DENSE for kind in drawn.sparse])[drawn.owner]
        code = drawn.group.copy()
        compressed = (drawn.compressor, drawn.parameter)
        dtype = self.dtype[drawn.owner]
        for column in (drawn.synchronizer, *compressed, drawn.hierarchical, drawn.pieces, dtype):
            code = code * (int(column.max()) + 1) + column
        alone = (drawn.group < 0) | ~dense
        code[alone] = -1 - np.arange(int(alone.sum()))
        _, first, message = np.unique(code, return_index=True, return_inverse=True)
        return message, first

    def _wire_bytes(self, drawn: Drawn) -> FloatArray:
        """c(m) of each shard, shape (S,)."""
        element_bytes = self.element_bytes[drawn.owner]
        elements = drawn.shard_bytes / element_bytes
        wire_bytes = drawn.shard_bytes.astype(np.float64)
        for index, kind in enumerate(self.space.compressors):
            if kind is Compressor.NONE:
                continue
            for number, setting in enumerate(self.space.settings_of(kind)):
                at = np.flatnonzero((drawn.compressor == index) & (drawn.parameter == number))
                if len(at):
                    compressed = _compressed_bytes(setting, elements[at], element_bytes[at])
                    wire_bytes[at] = np.minimum(compressed, wire_bytes[at])
        for position, handling in enumerate(drawn.sparse):
            if handling is not SparseHandling.DENSE:
                variable, mask = self.variables[position], drawn.owner == position
                rows = drawn.shard_bytes[mask] * variable.rows / max(variable.grad_bytes, 1)
                share = collective_share(variable, handling, self.ranks)
                wire_bytes[mask] = share * (wire_bytes[mask] + rows * ROW_NUMBER_BYTES)
        return wire_bytes


def _compressed_bytes(
    setting: CompressorSetting, elements: FloatArray, element_bytes: IntArray
) -> FloatArray:
    if setting.ratio is not None:
        return elements * setting.ratio * (element_bytes + 4)
    if setting.rank is not None:
        return 2 * np.sqrt(elements) * setting.rank * element_bytes
    if setting.compressor is Compressor.INT8:
        return elements * (1 + 4 / INT8_BLOCK)
    if setting.compressor.description.wire_dtype is not None:
        return elements * 2
    payload_bytes = setting.compressor.description.payload_bytes
    assert payload_bytes is not None, "top-k and PowerSGD have parameters"
    pairs = zip(elements, element_bytes.tolist(), strict=True)
    return np.array([payload_bytes(round(count), size) for count, size in pairs], dtype=np.float64)
