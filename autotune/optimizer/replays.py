"""What the search asks of the replay: whole steps, partial replays, critical paths. Nothing here simulates; `autotune.lowering` does.

A lowering belongs to one workload on one cluster, so each set of kernels (and each factor of the computation) has one of its own; the
last few are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from autotune.cluster import Cluster
from autotune.costs.timing import ready_times_s
from autotune.dfg.replay import Timeline
from autotune.lowering.replayed import LoweredSteps, Observed
from autotune.optimizer.state import CriticalPath, Problem, State, planned
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.strategy import SparseHandling
from autotune.workload import Workload

KEPT = 8
"""Lowerings that are kept."""


class Lowered(Protocol):
    """One workload on one cluster. `ops`: of the graph that was asked for last, replayed or remembered."""

    ops: int

    def step_s(self, plan: Plan) -> float: ...

    def sync_s(self, messages: Sequence[Message], limit: int | None) -> float:
        """Seconds of these messages, all ready at once, and nothing else; `limit` as in `Plan`."""

    def observe(self, plan: Plan) -> Observed: ...

    def timeline(self, plan: Plan) -> Timeline: ...


Lower = Callable[[Workload, Cluster, bool], Lowered]
"""(workload, cluster, whether one of equal workers is replayed for all)."""


def lowered(workload: Workload, cluster: Cluster, symmetric: bool) -> Lowered:
    """What the product replays."""
    return LoweredSteps(workload, cluster, symmetric)


class Replays:
    """Counts what it is asked for: `whole` steps, `partial` ones, and the `ops` of both."""

    def __init__(self, problem: Problem, lower: Lower) -> None:
        self.problem, self._lower = problem, lower
        self.whole = self.partial = self.ops = 0
        self._lowerings: OrderedDict[object, tuple[Workload, Lowered]] = OrderedDict()
        self._sync_s: dict[object, float] = {}
        self._latest: tuple[State, CriticalPath] | None = None

    def plan_of(self, state: State) -> Plan:
        return planned(state, self.problem)

    def step_s(self, state: State, plan: Plan | None = None) -> float:
        self.whole += 1
        lowered = self._of(state)[1]
        found = lowered.step_s(plan or self.plan_of(state))
        self.ops += lowered.ops
        return found

    def timeline(self, state: State) -> Timeline:
        return self._of(state)[1].timeline(self.plan_of(state))

    def path(self, state: State) -> CriticalPath:
        """Of the state that was asked for last it is known."""
        if self._latest is None or self._latest[0] is not state:
            self._latest = state, self._path(state)
        return self._latest[1]

    def _path(self, state: State) -> CriticalPath:
        self.whole += 1
        workload, lowered = self._of(state)
        plan = self.plan_of(state)
        seen = lowered.observe(plan)
        self.ops += lowered.ops
        ready_s = ready_times_s(workload)
        ready = np.array(
            [
                max(ready_s[workload.index[part.variable]] for part in message.slices)
                for message in plan.messages
            ]
        )
        ops = self._critical_ops(plan, seen.critical)
        partial = (
            self._partial(lowered, plan.limit)
            if self.problem.speedups.partial
            else self._by_whole_steps(lowered, plan)
        )
        return CriticalPath(
            self.problem,
            plan,
            workload,
            seen.step_s,
            ops,
            seen.critical,
            ready,
            seen.start_s,
            seen.end_s,
            partial,
        )

    def _of(self, state: State) -> tuple[Workload, Lowered]:
        key = (state.fusion, state.compute_factor)
        if key not in self._lowerings:
            workload = self.problem.workload_of(state)
            self._lowerings[key] = (
                workload,
                self._lower(workload, self.problem.cluster, self.problem.speedups.symmetry),
            )
            if len(self._lowerings) > KEPT:
                self._lowerings.popitem(last=False)
        self._lowerings.move_to_end(key)
        return self._lowerings[key]

    def _critical_ops(self, plan: Plan, critical: Sequence[int]) -> tuple[int, ...]:
        """Backward ops up to the one that makes the last gradient of the first critical message; all where no message is critical."""
        graph = self.problem.graph
        if graph is None:
            return ()
        last = 0
        if critical:
            last = min(
                graph.op_of_variable[part.variable] for part in plan.messages[critical[0]].slices
            )
        return tuple(range(len(graph.ops) - 1, last - 1, -1))

    def _partial(self, lowered: Lowered, limit: int | None) -> Callable[[Sequence[Message]], float]:
        """t_sync by kinds and sizes: what a message costs does not depend on which variables are in it, but for rows of sparse ones."""

        def seconds(messages: Sequence[Message]) -> float:
            key = limit, tuple(_kind(message) for message in messages)
            if key not in self._sync_s:
                self.partial += 1
                self._sync_s[key] = lowered.sync_s(messages, limit)
                self.ops += lowered.ops
            return self._sync_s[key]

        return seconds

    def _by_whole_steps(self, lowered: Lowered, plan: Plan) -> Callable[[Sequence[Message]], float]:
        """Without partial replay: the whole step is replayed with these messages in the place of those that hold their variables."""

        def seconds(messages: Sequence[Message]) -> float:
            self.whole += 1
            names = {part.variable for message in messages for part in message.slices}
            others = [
                m for m in plan.messages if not any(part.variable in names for part in m.slices)
            ]
            seen = lowered.observe(replace(plan, messages=(*others, *messages)))
            self.ops += lowered.ops
            return float((seen.end_s - seen.start_s)[len(others) :].sum())

        return seconds


def _kind(message: Message) -> object:
    """All that the time of a message depends on."""
    parts: object = len(message.slices)
    if message.rank is not None:  # PowerSGD sees every slice as a matrix
        parts = tuple((part.elements, part.rows) for part in message.slices)
    if (
        message.sparse is not SparseHandling.DENSE
    ):  # variables differ in how many of their rows a step touches
        parts = message.sparse, tuple(part.variable for part in message.slices)
    own = (
        message.synchronizer,
        message.compressor,
        message.dtype,
        message.owner,
        message.hierarchical,
        message.ratio,
        message.rank,
    )
    return message.elements, parts, own
