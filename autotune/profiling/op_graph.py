"""The operations of one replica with their durations: what a layer profile or an assumed device gives, and a trace can give too.

| symbol | meaning |
|---|---|
| O | number of ops, in the order in which the forward pass executes them |
| E | number of edges (i, j), i < j: op j reads what op i makes |

The backward pass executes the ops in reverse. An op reads its variables when its forward part starts, and their gradients are final
when its backward part ends. Neighbours in the order can be one kernel (`OpFusion`): it starts when the first would, needs all its
inputs by then, and all its results are there when it ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from autotune.errors import InvalidInput
from autotune.workload import Variable, Workload


@dataclass(frozen=True)
class Op:
    """`code`: what it does, with its parameters; ops of equal code are alike. `activation_bytes`: what it makes in forward."""

    name: str
    code: str
    forward_s: float
    backward_s: float
    activation_bytes: float = 0.0
    variables: tuple[Variable, ...] = ()

    def __post_init__(self) -> None:
        if not all(
            0 <= figure < math.inf
            for figure in (self.forward_s, self.backward_s, self.activation_bytes)
        ):
            figures = (self.forward_s, self.backward_s, self.activation_bytes)
            raise InvalidInput(
                f"op {self.name!r} needs finite times and sizes of at least 0, but has {figures}"
            )


@dataclass(frozen=True)
class OpFusion:
    """Which ops are one kernel with the op behind them, by their numbers: in the forward pass, and in the backward pass.

    Kernels are runs of the execution order, so that no fusion can make a cycle.
    """

    forward: frozenset[int] = frozenset()
    backward: frozenset[int] = frozenset()

    @staticmethod
    def runs(joined: frozenset[int], ops: int) -> list[tuple[int, int]]:
        """The kernels as (first op, op behind the last), in forward order."""
        starts = [number for number in range(ops) if number == 0 or number - 1 not in joined]
        return list(pairwise([*starts, ops]))


FusedTime = Callable[[Sequence[Op], bool], float]
"""(ops in execution order, whether of the backward pass) -> seconds of their kernel; of one op its own time."""


def summed(ops: Sequence[Op], backward: bool) -> float:
    """Fusion that saves nothing."""
    return math.fsum(op.backward_s if backward else op.forward_s for op in ops)


@dataclass(frozen=True)
class OpGraph:
    """`source` is "measured" or "assumed", as of a workload. Raises `InvalidInput` where an edge does not lead forward."""

    model: str
    ops: tuple[Op, ...]
    edges: tuple[tuple[int, int], ...] = ()
    update_s: float = 0.0
    device: str = "cuda"
    source: str = "assumed"

    def __post_init__(self) -> None:
        for edge in self.edges:
            if not 0 <= edge[0] < edge[1] < len(self.ops):
                raise InvalidInput(
                    f"edges of an op graph must be pairs i < j < {len(self.ops)}, but one is {edge}"
                )
        if not any(op.variables for op in self.ops):
            raise InvalidInput(
                f"the op graph of {self.model!r} needs an op with a variable, but has none"
            )

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Of every op those it reads from, shape (O,)."""
        found: list[list[int]] = [[] for _ in self.ops]
        for before, after in sorted(set(self.edges)):
            found[after].append(before)
        return tuple(tuple(own) for own in found)

    @cached_property
    def op_of_variable(self) -> dict[str, int]:
        return {
            variable.name: number for number, op in enumerate(self.ops) for variable in op.variables
        }

    def workload(self, fusion: OpFusion | None = None, fused_s: FusedTime = summed) -> Workload:
        """What this replica synchronizes, with the times that its kernels give; the variables stand as the backward pass makes them.

        The order of the variables is the same whatever is fused.
        """
        fusion = fusion or OpFusion()
        needed_s, forward_s = self._needed_s(fusion, fused_s)
        ready_s, now_s = [0.0] * len(self.ops), 0.0
        for first, behind in reversed(OpFusion.runs(fusion.backward, len(self.ops))):
            now_s += fused_s(self.ops[first:behind][::-1], True)
            ready_s[first:behind] = [now_s] * (behind - first)
        variables = tuple(
            replace(variable, ready_s=ready_s[number], needed_s=needed_s[number])
            for number in reversed(range(len(self.ops)))
            for variable in reversed(self.ops[number].variables)
        )
        edges = self._variable_edges(variables)
        return Workload(
            self.model,
            variables,
            edges,
            forward_s,
            now_s,
            self.update_s,
            self.device,
            source=self.source,
        )

    def _needed_s(self, fusion: OpFusion, fused_s: FusedTime) -> tuple[list[float], float]:
        needed_s, now_s = [0.0] * len(self.ops), 0.0
        for first, behind in OpFusion.runs(fusion.forward, len(self.ops)):
            needed_s[first:behind] = [now_s] * (behind - first)
            now_s += fused_s(self.ops[first:behind], False)
        return needed_s, now_s

    def _variable_edges(self, variables: tuple[Variable, ...]) -> tuple[tuple[int, int], ...]:
        """Pairs of variables whose ops are neighbours, ops without variables skipped."""
        position = {variable.name: at for at, variable in enumerate(variables)}
        nearest: list[
            frozenset[int]
        ] = []  # per op: the ops with variables from which it can be reached without passing another
        pairs: set[tuple[int, int]] = set()
        for number, op in enumerate(self.ops):
            before = frozenset().union(*(nearest[other] for other in self.predecessors[number]))
            if not op.variables:
                nearest.append(before)
                continue
            nearest.append(frozenset({number}))
            here = [position[variable.name] for variable in op.variables]
            there = [position[self.ops[other].variables[0].name] for other in before]
            pairs.update((min(at, here[0]), max(at, here[0])) for at in there)
            pairs.update((min(one, two), max(one, two)) for one, two in pairwise(here))
        return tuple(sorted(pairs))
