"""Replays for the search: whole steps, partial replays and critical paths (`autotune.lowering`).

A lowering belongs to one workload on one cluster. Each set of kernels, and each factor of the
computation, has a workload of its own; the last few lowerings are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from autotune.cluster import Cluster
from autotune.costs.timing import ready_times_s
from autotune.dfg.replay import Timeline
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.state import CriticalPath, Problem, State, planned
from autotune.strategy_space.plan import Message, Plan, with_messages
from autotune.strategy_space.strategy import SparseHandling
from autotune.workload import Workload

LOWERINGS = 8
"""Lowerings that are kept."""

Lower = Callable[[Workload, Cluster, bool, LoweredSteps | None], LoweredSteps]
"""(workload, cluster, whether one of equal workers is replayed for all, the same with other times
if there is one) -> replayed steps."""


def lowered(
    workload: Workload,
    cluster: Cluster,
    symmetric: bool,
    like: LoweredSteps | None,
    costs: RuntimeCosts | None = None,
) -> LoweredSteps:
    """Replayed steps by `costs`; None: those of the workload's device."""
    if like is not None:
        return like.retimed(workload)
    return LoweredSteps(workload, cluster, symmetric, costs=costs)


class Replays:
    """Counts its `whole` steps, its `partial` replays, and the `ops` of both."""

    def __init__(self, problem: Problem, lower: Lower = lowered) -> None:
        self.problem = problem
        self._lower = lower
        self.whole = self.partial = self.ops = 0
        self._lowerings: OrderedDict[object, tuple[Workload, LoweredSteps]] = OrderedDict()
        self._sync_s: dict[object, float] = {}
        self._latest: tuple[State, CriticalPath] | None = None

    def plan_of(self, state: State) -> Plan:
        return planned(state, self.problem)

    def workload_of(self, state: State) -> Workload:
        """The workload with the times of the state's kernels, kept with its lowering."""
        return self._lowered(state)[0]

    def step_s(self, state: State, plan: Plan | None = None) -> float:
        self.whole += 1
        _, steps = self._lowered(state)
        step_s = steps.step_s(plan or self.plan_of(state))
        self.ops += steps.ops
        return step_s

    def timeline(self, state: State) -> Timeline:
        return self._lowered(state)[1].timeline(self.plan_of(state))

    def path(self, state: State) -> CriticalPath:
        """The critical path; that of the last state is remembered."""
        if self._latest is None or self._latest[0] is not state:
            self._latest = state, self._path(state)
        return self._latest[1]

    def _path(self, state: State) -> CriticalPath:
        self.whole += 1
        workload, steps = self._lowered(state)
        plan = self.plan_of(state)
        observed = steps.observe(plan)
        self.ops += steps.ops
        ready_of_variable_s = ready_times_s(workload)
        ready_s = [
            max(ready_of_variable_s[workload.index[part.variable]] for part in message.slices)
            for message in plan.messages
        ]
        sync_s = self._by_whole_steps(steps, plan)
        if self.problem.speedups.partial:
            sync_s = self._partial(steps, plan)
        return CriticalPath(
            problem=self.problem,
            plan=plan,
            workload=workload,
            step_s=observed.step_s,
            ops=self._critical_ops(plan, observed.critical),
            messages=observed.critical,
            ready_s=np.array(ready_s),
            start_s=observed.start_s,
            end_s=observed.end_s,
            sync_s=sync_s,
        )

    def _lowered(self, state: State) -> tuple[Workload, LoweredSteps]:
        key = (state.fusion, state.compute_factor, state.strategy.op_fusion)
        if key not in self._lowerings:
            workload = self.problem.workload_of(state)
            symmetric = self.problem.speedups.symmetry
            like = next((steps for _, steps in self._lowerings.values()), None)
            steps = self._lower(workload, self.problem.cluster, symmetric, like)
            self._lowerings[key] = workload, steps
            if len(self._lowerings) > LOWERINGS:
                self._lowerings.popitem(last=False)
        self._lowerings.move_to_end(key)
        return self._lowerings[key]

    def _critical_ops(self, plan: Plan, critical: Sequence[int]) -> tuple[int, ...]:
        """Backward ops up to the last gradient of the first critical message.

        All ops if no message is critical.
        """
        graph = self.problem.graph
        if graph is None:
            return ()
        last = 0
        if critical:
            parts = plan.messages[critical[0]].slices
            last = min(graph.op_of_variable[part.variable] for part in parts)
        return tuple(range(len(graph.ops) - 1, last - 1, -1))

    def _partial(self, steps: LoweredSteps, plan: Plan) -> Callable[[Sequence[Message]], float]:
        """t_sync by kinds and sizes, with the ring and as many in flight as in the plan.

        The variables in a message do not matter, except those of sparse rows.
        """

        def seconds(messages: Sequence[Message]) -> float:
            self.problem.deadline.check()
            kinds = tuple(_kind(message) for message in messages)
            key = plan.limit, plan.in_flight, plan.ring_order, kinds
            if key not in self._sync_s:
                self.partial += 1
                self._sync_s[key] = steps.sync_s(
                    messages, plan.limit, plan.in_flight, plan.ring_order
                )
                self.ops += steps.ops
            return self._sync_s[key]

        return seconds

    def _by_whole_steps(
        self, steps: LoweredSteps, plan: Plan
    ) -> Callable[[Sequence[Message]], float]:
        """t_sync without partial replay: the step with these messages instead of the plan's."""

        def seconds(messages: Sequence[Message]) -> float:
            self.problem.deadline.check()
            self.whole += 1
            workload = self.problem.workload
            names = {part.variable for message in messages for part in message.slices}
            others = [
                message
                for message in plan.messages
                if not any(part.variable in names for part in message.slices)
            ]
            observed = steps.observe(with_messages(plan, (*others, *messages), workload))
            self.ops += steps.ops
            return float((observed.end_s - observed.start_s)[len(others) :].sum())

        return seconds


def _kind(message: Message) -> object:
    """Everything that the time of a message depends on."""
    parts: object = len(message.slices)
    if message.rank is not None:  # PowerSGD sees every slice as a matrix
        parts = tuple((part.elements, part.rows) for part in message.slices)
    if message.sparse is not SparseHandling.DENSE:  # variables differ in their touched rows
        parts = message.sparse, tuple(part.variable for part in message.slices)
    return (
        message.elements,
        parts,
        message.synchronizer,
        message.compressor,
        message.dtype,
        message.owner,
        message.hierarchical,
        message.ratio,
        message.rank,
        message.shares,
        message.pieces,
    )
