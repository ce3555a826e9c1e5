"""Messages on a processor take cores from computation, and computation takes cores from them.

gloo copies, sums and sends in threads of its own, and the kernel's network stack runs on the same
cores. A probe of ranks that compute (`autotune probe`) shows both effects: how long an all-reduce
takes while every rank computes, and how many seconds of computation a rank loses to it
(`CollectiveFit.loaded`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.dfg.graph import COMPUTATION, NONE, Kind
from autotune.lowering.traffic import Collective
from autotune.whatif.base import Base, steady
from autotune.whatif.messages.accompanied import accompanied_share
from autotune.whatif.messages.cluster_size import training_cluster
from autotune.whatif.messages.collective_times import collective_of
from autotune.whatif.primitives import select
from autotune.whatif.question import Question, Reading

UNKNOWN = (
    "messages and computation share the processor's cores, which slows both; the cluster's fits do "
    "not show how much (autotune probe with computing ranks)"
)


def on_shared_cores(base: Base, question: Question) -> Base:
    """The step with all-reduces that what-ifs added, and computation that they accompany, slower.

    Messages have their times alone. For the share of a message that computation accompanies, it
    takes its time under load. The computation beside it loses what the probe's lost, evenly over
    the message. Optimistically neither happens. Traces of several ranks contain all this.
    """
    if question.reading is Reading.OPTIMISTIC or base.on_device.any():
        return base
    added = select(base, kinds=[Kind.COLLECTIVE]) & (base.queue != NONE) & (base.event == NONE)
    ops = np.flatnonzero(added & (base.size_bytes > 0))
    kinds = [collective_of(base.names.ops[op]) for op in ops.tolist()]
    ops = ops[np.array([kind is Collective.ALL_REDUCE for kind in kinds], dtype=np.bool_)]
    if question.cluster is None or not len(ops):
        return base
    cluster = training_cluster(question)
    name, workers = Collective.ALL_REDUCE.value, cluster.world_size
    alone, loaded = (cluster.fit(name, workers, loaded=computing) for computing in (False, True))
    if alone is None or loaded is None:
        return replace(base, notes=(*base.notes, UNKNOWN))
    sizes_bytes = base.size_bytes[ops]
    loaded_s = loaded.seconds_each(sizes_bytes)
    longer = np.maximum(loaded_s / alone.seconds_each(sizes_bytes), 1.0)
    lost = (loaded.cpu_alpha_s + loaded.cpu_beta_s_per_byte * sizes_bytes) / loaded_s
    computes = np.isin(base.kind, list(COMPUTATION)) & (base.queue != NONE)
    durations_s = base.duration_s.copy()
    durations_s[ops] *= 1.0 + (longer - 1.0) * accompanied_share(
        base, ops, computes, with_gaps=True
    )
    return _without_lost_time(
        replace(base, duration_s=durations_s), ops, np.minimum(lost, 1.0), computes
    )


def _without_lost_time(
    base: Base, messages: IntArray, lost: FloatArray, computes: BoolArray
) -> Base:
    """Computation takes longer by what it loses to the messages beside it.

    `lost` (K,): seconds of computation per second of each message.
    """
    replayed = steady(base)
    timeline, copies = replayed.timeline, replayed.copies
    sent = np.concatenate([messages + copy * base.ops for copy in range(copies)])
    lost_until_s = _integral(timeline.start_s[sent], timeline.end_s[sent], np.tile(lost, copies))
    shown = np.flatnonzero(computes) + (copies - 2) * base.ops
    busy_until_s = timeline.end_s[shown] + base.gap_s[computes]
    durations_s = base.duration_s.copy()
    durations_s[computes] += lost_until_s(busy_until_s) - lost_until_s(timeline.start_s[shown])
    return replace(base, duration_s=durations_s)


def _integral(
    begin_s: FloatArray, end_s: FloatArray, rate: FloatArray
) -> Callable[[FloatArray], FloatArray]:
    """The integral over time of the rates of all intervals, (K,), that contain the time."""
    at_s = np.concatenate([begin_s, end_s])
    order = np.argsort(at_s, kind="stable")
    at_s = at_s[order]
    slope = np.cumsum(np.concatenate([rate, -rate])[order])
    total = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(at_s))])
    return lambda times_s: np.interp(times_s, at_s, total)
