"""Seconds that a plan costs the thread of a worker that packs, issues and writes back messages.

| symbol | meaning |
|---|---|
| V | variables, in backward order |
| M | messages, in issue order |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.messages import SliceTable
from autotune.lowering.pass_times import PassTimes, first_of_groups


@dataclass(frozen=True, eq=False)
class HostCosts:
    """Seconds that a plan costs a worker's own thread, by variable (V,) and by message (M,).

    `taken_s` (M,): CPU time of sending, taken from computation. `update_s`: the host's part of the
    update. `early_update`: share of the accelerator's update that passes before the forward pass if
    the plan crosses the step. `issued_at` (M,): backward position of the gradient that completes
    the message. A message waits for those before it.
    """

    hand_out_s: FloatArray
    fill_s: FloatArray
    issue_s: FloatArray
    taken_s: FloatArray
    write_s: FloatArray
    flush_s: FloatArray
    flush_each_s: FloatArray
    defer_s: float
    buffers_s: float
    update_s: float
    early_update: float
    issued_at: IntArray

    @staticmethod
    def of(
        times: PassTimes,
        slices: SliceTable,
        *,
        cast: BoolArray,
        prepare_s: FloatArray,
        taken_s: FloatArray,
        costs: RuntimeCosts,
        buckets: bool,
        results: int = 0,
    ) -> HostCosts:
        """`cast` (M,): rounded to 16 bits. `prepare_s` (M,): computed when the message is issued.

        `buckets`: torch's own reducer is the plan's backend. `results`: how many wait for norms.
        They are issued again, and each gradient is scaled when it has arrived.
        """
        fill_s, write_s = costs["fill_s"], costs["write_s"]
        if buckets:
            fill_s, write_s = costs["bucket_s"], 0.0
        s_per_byte = np.where(cast, costs["cast_s_per_byte"], costs["pack_s_per_byte"])
        count = len(times.ready_s)
        packed_s_per_byte = np.bincount(
            slices.variable,
            weights=times.share(slices) * s_per_byte[slices.message],
            minlength=count,
        )
        wake_s = costs["wake_s"]
        packed_s = packed_s_per_byte * times.grad_bytes
        flushed_s = costs["settle_s_per_byte"] * times.grad_bytes
        if results:
            flushed_s = flushed_s + costs["unpack_s_per_byte"] * times.grad_bytes
        workload = times.workload
        issued_at = np.maximum.accumulate(slices.last)
        first_issues = first_of_groups(times.ready_group[issued_at])
        read_group = np.full(len(issued_at), len(times.read_group))
        np.minimum.at(read_group, slices.message, times.read_group[slices.variable])
        flush_s: FloatArray = np.full(len(issued_at), costs["settle_s"])
        flush_s[first_of_groups(read_group)] += costs["settle_first_s"]
        wakes_read_s = wake_s * first_of_groups(times.read_group)
        return HostCosts(
            hand_out_s=costs["hand_out_s_per_byte"] * times.grad_bytes,
            fill_s=fill_s + wake_s * first_of_groups(times.ready_group) + packed_s,
            issue_s=costs["issue_s"] + costs["issue_first_s"] * first_issues + prepare_s,
            taken_s=taken_s,
            write_s=write_s + costs["unpack_s_per_byte"] * times.grad_bytes,
            flush_s=flush_s,
            flush_each_s=costs["settle_each_s"] + wakes_read_s + flushed_s,
            defer_s=costs["defer_s"] * count + costs["issue_s"] * results,
            buffers_s=costs["buffer_s"] * workload.buffers,
            update_s=costs["real_update"] * workload.update_s,
            early_update=costs["early_update"],
            issued_at=issued_at,
        )
