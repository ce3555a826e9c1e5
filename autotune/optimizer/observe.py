"""The search's side of the lowering: one workload on one cluster, its steps and its messages alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.cluster import Cluster
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.dfg.replay import Timeline, replay
from autotune.lowering.lower import Lowering
from autotune.lowering.network import Sent
from autotune.strategy_space.plan import Message, Plan
from autotune.workload import Workload

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Observed:
    """One replayed step from the start of its backward pass: spans of the messages, shape (M,), and which of them are critical."""

    step_s: float
    start_s: FloatArray
    end_s: FloatArray
    critical: tuple[int, ...]


class LoweredSteps:
    """`symmetric`: one of equal workers is written down, and the ports that decide; otherwise all of both.

    `taken_share`: as of `Lowering`.
    """

    def __init__(self, workload: Workload, cluster: Cluster, symmetric: bool = True, taken_share: float = 0.0) -> None:
        self._symmetric = symmetric
        self._lowering = Lowering(workload, cluster, taken_share=taken_share)

    def step_s(self, plan: Plan) -> float:
        return replay(self._lowering.period(plan, self._symmetric)).makespan_s

    def timeline(self, plan: Plan) -> Timeline:
        return replay(self._lowering.period(plan, self._symmetric))

    def observe(self, plan: Plan) -> Observed:
        dfg, sent = self._lowering.drawn(plan, self._symmetric)
        timeline = replay(dfg)
        message = message_of_op(dfg, sent)
        own = message >= 0
        start_s = np.full(len(plan.messages), np.inf)
        np.minimum.at(start_s, message[own & (dfg.kind != Kind.VIRTUAL)], timeline.start_s[own & (dfg.kind != Kind.VIRTUAL)])
        end_s = timeline.end_s[sent.ends]
        path = [int(message[op]) for op in critical_ops(timeline)]
        critical = tuple(dict.fromkeys(number for number in path if number >= 0))
        return Observed(timeline.makespan_s, np.minimum(start_s, end_s), end_s, critical)

    def sync_s(self, messages: Sequence[Message], across: bool) -> float:
        """Partial replay: these messages alone, all issued at once in their order; `across` steps one thread sends them one by one."""
        return replay(self._lowering.message_graph(messages, one_by_one=across)).makespan_s


def message_of_op(dfg: Dfg, sent: Sent) -> NDArray[np.int64]:
    """The number of the message that each op belongs to, NONE for the others; shape (N,)."""
    found = np.full(dfg.ops, NONE, dtype=np.int64)
    for number, (first, last) in enumerate(zip(sent.starts.tolist(), sent.ends.tolist(), strict=True)):
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
