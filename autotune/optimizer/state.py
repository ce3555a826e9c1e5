"""The search's state, the critical path that a replay shows, and the interface of a pass.

| symbol | meaning |
|---|---|
| M | messages of the plan, in issue order |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.optimizer.budget import NO_DEADLINE, Deadline
from autotune.optimizer.coarsen import tensor_groups
from autotune.profiling.op_graph import FusedTime, OpFusion, OpGraph, summed
from autotune.strategy_space.moves.draft import Draft
from autotune.strategy_space.plan import Message, Plan, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import OpFusionSets, Strategy
from autotune.workload import Workload


@dataclass(frozen=True)
class Speedups:
    """Techniques that make the search fast (dPRO, sec. 5.3); the ablation switches each off.

    `coarsened`: ops without a tensor join a layer, and the tensors of one op stay together.
    `partial`: a message's time is replayed alone, and remembered by its kind and size. `symmetry`:
    one of equal workers is replayed, and a decision for a place in one block holds for that place
    in all repeated blocks.
    """

    coarsened: bool = True
    partial: bool = True
    symmetry: bool = True


@dataclass(frozen=True)
class Problem:
    """The input of a search. With an op graph, `workload` is the graph's own without fusion.

    `op_fusions`: the workloads of measured sets of ops, which TensorFlow can enact.
    `deadline`: when the search must end, for all that works on the problem.
    """

    workload: Workload
    cluster: Cluster
    space: SearchSpace
    graph: OpGraph | None = None
    fused_s: FusedTime = summed
    op_fusions: Mapping[OpFusionSets, Workload] = field(default_factory=dict)
    speedups: Speedups = field(default_factory=Speedups)
    deadline: Deadline = field(default=NO_DEADLINE, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.graph is not None and [v.name for v in self.workload.variables] != [
            v.name for v in self.graph.workload().variables
        ]:
            raise InvalidInput(
                f"the op graph of {self.graph.model!r} has other variables than the workload, "
                "or in another order"
            )

    def groups(self) -> list[list[int]]:
        """Positions of variables that are never separated.

        They are the variables of one op, or single ones without the coarsened view.
        """
        if self.speedups.coarsened:
            return tensor_groups(self.workload, self.graph)
        return [[position] for position in range(len(self.workload.variables))]

    def workload_of(self, state: State) -> Workload:
        """The workload with the times of the state's kernels."""
        workload = self.op_fusions.get(state.strategy.op_fusion, self.workload)
        if self.graph is not None and (state.fusion.forward or state.fusion.backward):
            fused = self.graph.workload(state.fusion, self.fused_s)
            workload = replace(fused, update_s=self.workload.update_s)
        return workload if state.compute_factor == 1 else scaled(workload, state.compute_factor)


@dataclass
class Known:
    """A state's plan and draft for one problem; not part of the state's identity."""

    plan: Plan | None = None
    planned_for: Workload | None = None
    draft: Draft | None = None
    drafted_for: Problem | None = None


@dataclass(frozen=True)
class State:
    """One point of the search.

    `compute_factor`: factor of the measured times of both passes; a pass that changes it must get
    it from the caller. `assumed`: figures behind the state that nobody measured.
    """

    strategy: Strategy
    fusion: OpFusion = field(default_factory=OpFusion)
    compute_factor: float = 1.0
    assumed: tuple[str, ...] = ()

    @cached_property
    def known(self) -> Known:
        return Known()

    def with_strategy(self, strategy: Strategy) -> State:
        return replace(self, strategy=strategy)

    def with_fusion(self, fusion: OpFusion) -> State:
        """This state with other kernels, which share its plan and draft."""
        state = replace(self, fusion=fusion)
        vars(state)["known"] = self.known
        return state


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """The critical path of a replayed state; times are seconds from the start of the backward pass.

    - `ops`: the graph's ops whose backward parts bound the step, in execution order; () without a
      graph.
    - `messages`: numbers of the messages on the critical path, in its order.
    - `ready_s`, `start_s`, `end_s` (M,): when the last gradient of a message is ready, and when the
      message starts and ends.
    - `sync_s`: seconds of some messages alone, one after the other, by partial replay (t_sync).
    """

    problem: Problem
    plan: Plan
    workload: Workload
    step_s: float
    ops: tuple[int, ...]
    messages: tuple[int, ...]
    ready_s: FloatArray
    start_s: FloatArray
    end_s: FloatArray
    sync_s: Callable[[Sequence[Message]], float]


class Pass(Protocol):
    """One optimization technique: from a state and its critical path to states that may be faster.

    Proposals have the same workload and a strategy in the problem's space; the search drops and
    counts others. The replay decides, so a pass need not know whether a proposal pays. It should
    propose few; the search replays them in their order.
    """

    @property
    def name(self) -> str: ...

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]: ...


def scaled(workload: Workload, factor: float) -> Workload:
    """The workload with all times of the forward and the backward pass times `factor`."""
    if not 0 < factor < float("inf"):
        raise InvalidInput(
            f"a factor of the computation's time must be finite and above 0, but is {factor}"
        )
    variables = tuple(
        replace(
            v,
            ready_s=None if v.ready_s is None else v.ready_s * factor,
            needed_s=None if v.needed_s is None else v.needed_s * factor,
        )
        for v in workload.variables
    )
    return replace(
        workload,
        variables=variables,
        forward_s=workload.forward_s * factor,
        backward_s=workload.backward_s * factor,
    )


def planned(state: State, problem: Problem) -> Plan:
    """The state's plan, which is computed once."""
    known, workload, ranks = state.known, problem.workload, problem.cluster.world_size
    if known.plan is None or known.planned_for is not workload or known.plan.world_size != ranks:
        known.plan = plan(state.strategy, workload, ranks)
        known.planned_for = workload
    return known.plan
