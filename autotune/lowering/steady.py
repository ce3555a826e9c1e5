"""Some steps of a plan in the steady state: each from the start of a forward pass to the next one.

| symbol | meaning |
|---|---|
| S, M | steps, messages |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray
from autotune.dfg.graph import Kind
from autotune.dfg.replay import Timeline, replay
from autotune.dfg.utilisation import covered_s
from autotune.lowering.lower import Lowering
from autotune.lowering.network import MessageOps
from autotune.strategy_space.plan import Plan

DEVICE = "r0 device"
COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)


@dataclass(frozen=True, eq=False)
class SteadySteps:
    """A replay of worker 0 and the links that decide, from `begin_s` to `end_s`, of `count` steps.

    `began_s`, `arrived_s` (S + 2, M): when each message begins and has arrived, also in the steps
    before and after. `exposed_s` of a step: the time in which worker 0 computes nothing, because it
    waits for messages or packs them.
    """

    timeline: Timeline
    begin_s: float
    count: int
    step_s: float
    computation_s: float
    began_s: FloatArray
    arrived_s: FloatArray

    @property
    def end_s(self) -> float:
        return self.begin_s + self.count * self.step_s

    @property
    def exposed_s(self) -> float:
        return self.step_s - self.computation_s


def steady_steps(lowering: Lowering, plan: Plan, count: int) -> SteadySteps:
    """Replay `count` steps between a first and a last one, which differ from the others.

    Raises `InvalidInput` as `Lowering.graph` does.
    """
    dfg, message_ops = lowering.graph_with_messages(plan, count + 2)
    timeline = replay(dfg)
    device = dfg.names.queues.index(DEVICE)
    computes = np.flatnonzero(np.isin(dfg.kind, COMPUTES) & (dfg.queue == device))
    updates = dfg.kind[computes] == Kind.UPDATE
    # Reads of the script may cut an update into parts.
    last_parts = computes[updates & ~np.append(updates[1:], False)]
    begin_s, end_s = (float(timeline.end_s[last_parts[step]]) for step in (0, count))
    started_s, ended_s = (
        np.clip(times_s[computes], begin_s, end_s) for times_s in (timeline.start_s, timeline.end_s)
    )
    return SteadySteps(
        timeline,
        begin_s,
        count,
        step_s=(end_s - begin_s) / count,
        computation_s=covered_s(started_s, ended_s) / count,
        began_s=np.stack([_began_s(timeline, ops) for ops in message_ops]),
        arrived_s=np.stack([timeline.end_s[ops.ends] for ops in message_ops]),
    )


def _began_s(timeline: Timeline, ops: MessageOps) -> FloatArray:
    """When each message's first op that takes time begins, wake-ups of threads aside; (M,)."""
    takes_time = (timeline.duration_s > 0) & (timeline.dfg.kind != Kind.VIRTUAL)
    began_s = np.where(takes_time, timeline.start_s, np.inf)
    spans = zip(ops.starts.tolist(), ops.sums.tolist(), strict=True)
    first_s = np.array([began_s[first : last + 1].min() for first, last in spans])
    earliest_s: FloatArray = np.minimum(first_s, timeline.end_s[ops.ends])
    return earliest_s
