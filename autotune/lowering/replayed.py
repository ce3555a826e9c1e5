"""Replayed steps and messages of one workload on one cluster, for the search and the scorer.

Steps are remembered by plan, so the search and the scorer share their replays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.dfg.critical_path import critical_ops
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.dfg.replay import Timeline, replay
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.kept import KEPT_SLICES, Kept
from autotune.lowering.lower import Lowering
from autotune.lowering.network import MessageOps
from autotune.lowering.shapes import CORES
from autotune.lowering.steady import SteadySteps, steady_steps
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.strategy import OpFusionSets
from autotune.workload import Workload

REMEMBERED = 500
"""Plans whose steps are remembered: 0.1 MB for a plan of 200 messages."""


@dataclass(frozen=True, eq=False)
class Observed:
    """One replayed step, from the start of its backward pass.

    `start_s`, `end_s` (M,): spans of the messages. `critical`: messages on the critical path.
    """

    step_s: float
    start_s: FloatArray
    end_s: FloatArray
    critical: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ReplayedPlan:
    """One replayed step and how it used the cluster.

    `start_s`, `end_s` (M,): spans of the messages, from the start of the backward pass.
    `cores_busy`: share of the step in which the busiest cores work; 0 if none are in the graph.
    """

    step_s: float
    start_s: FloatArray
    end_s: FloatArray
    cores_busy: float


class LoweredSteps:
    """Lowers and replays plans; `symmetric`, `taken_share`, `costs` as in `Lowering`.

    `fused`: the workloads of plans with these sets of fused ops; other sets change no time.
    `replayed`: replayed steps, without remembered ones. `ops`: ops of the graph that was used last,
    replayed or remembered.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        symmetric: bool = True,
        taken_share: float = 0.0,
        costs: RuntimeCosts | None = None,
        fused: Mapping[OpFusionSets, Workload] = {},
        lowering: Lowering | None = None,
    ) -> None:
        """`lowering`: that of this workload, if it exists."""
        self.workload = workload
        self.fused = fused
        self.cluster = cluster
        self.taken_share = taken_share
        self.costs = costs
        self.replayed = self.ops = 0
        self._symmetric = symmetric
        self._lowering = lowering or Lowering(workload, cluster, costs, taken_share)
        self._lowerings: dict[OpFusionSets, Lowering] = {}
        self._remembered: Kept[tuple[float, int]] = Kept(REMEMBERED, KEPT_SLICES)

    def retimed(self, workload: Workload) -> LoweredSteps:
        """Replay plans of the same variables with other times (`Lowering.retimed`)."""
        lowering = self._lowering.retimed(workload)
        how = (self._symmetric, self.taken_share, self.costs)
        return LoweredSteps(workload, self.cluster, *how, lowering=lowering)

    def step_s(self, plan: Plan) -> float:
        """Predicted seconds per step in the steady state."""
        remembered = self._remembered.get(_key(plan))
        if remembered is None:
            remembered = self._remember(plan, self.timeline(plan))
        step_s, self.ops = remembered
        return step_s

    def steady(self, plan: Plan, count: int) -> SteadySteps:
        """`count` steps in the steady state, for people."""
        return steady_steps(self._lowering_of(plan), plan, count)

    def timeline(self, plan: Plan) -> Timeline:
        self.replayed += 1
        return self._replay(self._lowering_of(plan).period(plan, self._symmetric))

    def observe(self, plan: Plan) -> Observed:
        timeline, message_ops = self._replayed(plan)
        message = message_ops.of_op(timeline.dfg.ops)
        start_s, end_s = message_spans(timeline, message, message_ops)
        on_path = message[critical_ops(timeline)]
        critical = tuple(dict.fromkeys(on_path[on_path != NONE].tolist()))
        return Observed(timeline.makespan_s, start_s, end_s, critical)

    def describe(self, plan: Plan) -> ReplayedPlan:
        """Replay a plan for its features."""
        timeline, message_ops = self._replayed(plan)
        message = message_ops.of_op(timeline.dfg.ops)
        start_s, end_s = message_spans(timeline, message, message_ops)
        return ReplayedPlan(timeline.makespan_s, start_s, end_s, cores_busy(timeline))

    def _replayed(self, plan: Plan) -> tuple[Timeline, MessageOps]:
        dfg, message_ops = self._lowering_of(plan).period_with_messages(plan, self._symmetric)
        timeline = self._replay(dfg)
        self.replayed += 1
        self._remember(plan, timeline)
        return timeline, message_ops

    def sync_s(
        self,
        messages: Sequence[Message],
        limit: int | None,
        in_flight: int = 1,
        ring_order: tuple[int, ...] | None = None,
    ) -> float:
        """Partial replay: these messages alone, all issued at once; the rest as in `Plan`."""
        graph = self._lowering.message_graph(messages, ring_order, limit, in_flight)
        return self._replay(graph).makespan_s

    def _lowering_of(self, plan: Plan) -> Lowering:
        workload = self.fused.get(plan.op_fusion) if plan.op_fusion else None
        if workload is None:
            return self._lowering
        if plan.op_fusion not in self._lowerings:
            self._lowerings[plan.op_fusion] = self._lowering.retimed(workload)
        return self._lowerings[plan.op_fusion]

    def _remember(self, plan: Plan, timeline: Timeline) -> tuple[float, int]:
        result = timeline.makespan_s, timeline.dfg.ops
        self._remembered.put(_key(plan), plan.slice_count, result)
        return result

    def _replay(self, dfg: Dfg) -> Timeline:
        self.ops = dfg.ops
        return replay(dfg)


def _key(plan: Plan) -> object:
    """The parts of a plan that decide its step; hashing its id would take longer than a replay."""
    order = plan.limit, plan.in_flight, plan.results
    return plan.messages, order, plan.ring_order, plan.op_fusion


def message_spans(
    timeline: Timeline, message: IntArray, message_ops: MessageOps
) -> tuple[FloatArray, FloatArray]:
    """(start, end) of each message, shape (M,); `message` (N,) as `MessageOps.of_op` returns it."""
    sends = (message != NONE) & (timeline.dfg.kind != Kind.VIRTUAL)
    start_s = np.full(len(message_ops.ends), np.inf)
    np.minimum.at(start_s, message[sends], timeline.start_s[sends])
    end_s = timeline.end_s[message_ops.ends]
    return np.minimum(start_s, end_s), end_s


def cores_busy(timeline: Timeline) -> float:
    """Share of the makespan in which the busiest queue of cores works; 0 without such a queue."""
    dfg = timeline.dfg
    cores = [number for number, name in enumerate(dfg.names.queues) if name.endswith(CORES)]
    if not cores or timeline.makespan_s <= 0:
        return 0.0
    busy_s = np.zeros(dfg.queues)
    for column in (dfg.queue, dfg.channel):
        used = column != NONE
        np.add.at(busy_s, column[used], timeline.duration_s[used])
    return float(busy_s[cores].max()) / timeline.makespan_s
