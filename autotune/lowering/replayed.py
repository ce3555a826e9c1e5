"""One workload on one cluster: its steps and its messages alone, lowered and replayed. What the search and the scorer ask.

A step is remembered by its plan, so that what one of them has replayed costs the other nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.dfg.replay import Timeline, replay
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.lower import Lowering
from autotune.lowering.network import Sent
from autotune.strategy_space.plan import Message, Plan
from autotune.workload import Workload

REMEMBERED = 500
"""Plans whose step is remembered, those asked for last: at 0.1 MB for a plan of two hundred messages."""


@dataclass(frozen=True, eq=False)
class Observed:
    """One replayed step from the start of its backward pass: spans of the messages, shape (M,), and which of them are critical."""

    step_s: float
    start_s: FloatArray
    end_s: FloatArray
    critical: tuple[int, ...]


class LoweredSteps:
    """`symmetric`: one of equal workers is written down, and the ports that decide; otherwise all of both.

    `taken_share`, `costs`: as of `Lowering`. `replayed`: steps that were replayed, not remembered. `ops`: of the graph that was asked for
    last, the same whether it was replayed or remembered.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        symmetric: bool = True,
        taken_share: float = 0.0,
        costs: RuntimeCosts | None = None,
    ) -> None:
        self.workload, self.cluster, self.taken_share, self.costs = (
            workload,
            cluster,
            taken_share,
            costs,
        )
        self.replayed = self.ops = 0
        self._symmetric = symmetric
        self._lowering = Lowering(workload, cluster, costs, taken_share)
        self._known: OrderedDict[object, tuple[float, int]] = OrderedDict()

    def step_s(self, plan: Plan) -> float:
        """Predicted seconds per step in the steady state."""
        key = _key(plan)
        if key not in self._known:
            self._remember(key, self.timeline(plan))
        self._known.move_to_end(key)
        step_s, self.ops = self._known[key]
        return step_s

    def _remember(self, key: object, timeline: Timeline) -> None:
        self._known[key] = timeline.makespan_s, timeline.dfg.ops
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def timeline(self, plan: Plan) -> Timeline:
        self.replayed += 1
        return self._replay(self._lowering.period(plan, self._symmetric))

    def observe(self, plan: Plan) -> Observed:
        dfg, sent = self._lowering.drawn(plan, self._symmetric)
        timeline = self._replay(dfg)
        self.replayed += 1
        self._remember(_key(plan), timeline)
        message = message_of_op(dfg, sent)
        own = message >= 0
        start_s = np.full(len(plan.messages), np.inf)
        np.minimum.at(
            start_s,
            message[own & (dfg.kind != Kind.VIRTUAL)],
            timeline.start_s[own & (dfg.kind != Kind.VIRTUAL)],
        )
        end_s = timeline.end_s[sent.ends]
        path = [int(message[op]) for op in critical_ops(timeline)]
        critical = tuple(dict.fromkeys(number for number in path if number >= 0))
        return Observed(timeline.makespan_s, np.minimum(start_s, end_s), end_s, critical)

    def sync_s(self, messages: Sequence[Message], limit: int | None) -> float:
        """Partial replay: these messages alone, all issued at once in their order; `limit` as in `Plan`."""
        return self._replay(self._lowering.message_graph(messages, limit=limit)).makespan_s

    def _replay(self, dfg: Dfg) -> Timeline:
        self.ops = dfg.ops
        return replay(dfg)


def _key(plan: Plan) -> object:
    """All of a plan that its step depends on; a plan's id takes longer than many a replay."""
    return plan.messages, plan.limit, plan.ring_order


def message_of_op(dfg: Dfg, sent: Sent) -> IntArray:
    """The number of the message that each op belongs to, NONE for the others; shape (N,)."""
    found = np.full(dfg.ops, NONE, dtype=np.int64)
    for number, (first, last) in enumerate(
        zip(sent.starts.tolist(), sent.ends.tolist(), strict=True)
    ):
        found[first : last + 1] = number
    return found


def critical_ops(timeline: Timeline) -> list[int]:
    """The critical path of the execution graph, from its first op to the last."""
    if not timeline.dfg.ops:
        return []
    op, path = int(np.argmax(timeline.end_s)), []
    while op != NONE:
        path.append(op)
        op = int(timeline.cause[op])
    return path[::-1]
