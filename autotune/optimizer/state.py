"""What the search changes (`State`), what it is told about it (`CriticalPath`), and what makes proposals (`Pass`).

| symbol | meaning |
|---|---|
| M | messages of the plan, in issue order |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.optimizer.coarsen import tensor_groups
from autotune.profiling.op_graph import FusedTime, OpFusion, OpGraph, summed
from autotune.strategy_space.moves.draft import Draft
from autotune.strategy_space.plan import Message, Plan, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload


@dataclass(frozen=True)
class Speedups:
    """What makes the search fast (dPRO, sec. 5.3), each to be switched off for the ablation.

    `coarsened`: ops without a tensor join a layer, tensors of one op stay together. `partial`: a message's time is replayed alone and
    remembered by its kind and size, instead of with the whole step. `symmetry`: one of equal workers is replayed, and what is decided
    for a place in one block is decided for that place in all blocks that repeat it.
    """

    coarsened: bool = True
    partial: bool = True
    symmetry: bool = True


@dataclass(frozen=True)
class Problem:
    """What is optimized. With an op graph, `workload` must be the graph's own with nothing fused."""

    workload: Workload
    cluster: Cluster
    space: SearchSpace
    graph: OpGraph | None = None
    fused_s: FusedTime = summed
    speedups: Speedups = field(default_factory=Speedups)

    def __post_init__(self) -> None:
        if self.graph is not None and [v.name for v in self.workload.variables] != [
            v.name for v in self.graph.workload().variables
        ]:
            raise InvalidInput(
                f"the op graph of {self.graph.model!r} has other variables than the workload, or in another order"
            )

    def groups(self) -> list[list[int]]:
        """Positions of variables that are never separated: those of one op, or each alone without the coarsened view."""
        if self.speedups.coarsened:
            return tensor_groups(self.workload, self.graph)
        return [[position] for position in range(len(self.workload.variables))]

    def workload_of(self, state: State) -> Workload:
        """The workload with the times that the state's kernels give."""
        made = self.workload
        if self.graph is not None and (state.fusion.forward or state.fusion.backward):
            made = replace(
                self.graph.workload(state.fusion, self.fused_s), update_s=self.workload.update_s
            )
        return made if state.compute_factor == 1 else scaled(made, state.compute_factor)


@dataclass
class Known:
    """What was worked out of a state for one problem; no part of its identity."""

    plan: Plan | None = None
    planned_for: Problem | None = None
    draft: Draft | None = None
    drafted_for: Problem | None = None


@dataclass(frozen=True)
class State:
    """One point of the search. `compute_factor`: what forward and backward pass take, times what was measured; a pass that changes it
    must have been given it by the caller. `assumed`: which figures in it nobody measured.
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


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """What a replay of a state showed; times are seconds from the start of the backward pass.

    - `ops`: numbers of the graph's ops whose backward parts bound the step, in the order of their execution; () without a graph.
    - `messages`: numbers of the messages on the critical path, in its order.
    - `ready_s`, `start_s`, `end_s`, shape (M,): when the last gradient of a message is there, and when it is under way.
    - `sync_s`: seconds of some messages that are sent one after the other and nothing else, by partial replay (t_sync).
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

    Each must be a state of the same workload whose strategy lies in the problem's space; others are dropped and counted. The
    replay decides: a pass need not know whether its proposals pay, but should make few (they are looked at in its order).
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
    """The state's plan, made once."""
    known = state.known
    if known.plan is None or known.planned_for is not problem:
        known.plan, known.planned_for = (
            plan(state.strategy, problem.workload, problem.cluster.world_size),
            problem,
        )
    return known.plan
