"""The operations of one replica with their durations, from a layer profile or an assumed device.

| symbol | meaning |
|---|---|
| O | number of ops, in the order in which the forward pass executes them |
| E | number of edges (i, j), i < j: op j reads the output of op i |

The backward pass executes the ops in reverse. An op reads its variables when its forward part
starts, and their gradients are final when its backward part ends. Neighbours in the order can be
one kernel (`OpFusion`). It starts when its first op would, needs all its inputs by then, and all
its results are ready when it ends.
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
    """One operation. `code`: its kind with its parameters; ops of equal code are equal.

    `activation_bytes`: size of its output in the forward pass.
    """

    name: str
    code: str
    forward_s: float
    backward_s: float
    activation_bytes: float = 0.0
    variables: tuple[Variable, ...] = ()

    def __post_init__(self) -> None:
        figures = (self.forward_s, self.backward_s, self.activation_bytes)
        if not all(0 <= figure < math.inf for figure in figures):
            raise InvalidInput(
                f"op {self.name!r} needs finite times and sizes of at least 0, but has {figures}"
            )


@dataclass(frozen=True)
class OpFusion:
    """The numbers of ops that form one kernel with the next op, for each pass.

    Kernels are runs of the execution order, so no fusion can create a cycle.
    """

    forward: frozenset[int] = frozenset()
    backward: frozenset[int] = frozenset()

    @staticmethod
    def runs(joined: frozenset[int], ops: int) -> list[tuple[int, int]]:
        """The kernels as (first op, op after the last), in forward order."""
        starts = [number for number in range(ops) if number == 0 or number - 1 not in joined]
        return list(pairwise([*starts, ops]))


FusedTime = Callable[[Sequence[Op], bool], float]
"""(ops in execution order, whether of the backward pass) -> seconds of their kernel.

One op takes its own time."""


def summed(ops: Sequence[Op], backward: bool) -> float:
    """The time of a fusion that saves nothing."""
    return math.fsum(op.backward_s if backward else op.forward_s for op in ops)


@dataclass(frozen=True)
class OpGraph:
    """The ops of a model; `source` is "measured" or "assumed", as in a workload.

    Raises `InvalidInput` where an edge does not lead forward.
    """

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
        """(O,) the ops that each op reads from."""
        predecessors: list[list[int]] = [[] for _ in self.ops]
        for before, after in sorted(set(self.edges)):
            predecessors[after].append(before)
        return tuple(map(tuple, predecessors))

    @cached_property
    def op_of_variable(self) -> dict[str, int]:
        return {
            variable.name: number for number, op in enumerate(self.ops) for variable in op.variables
        }

    def workload(self, fusion: OpFusion | None = None, fused_s: FusedTime = summed) -> Workload:
        """The workload with the times of the fused kernels.

        Variables are in the order of the backward pass, whatever is fused.
        """
        fusion = fusion or OpFusion()
        needed_s, forward_s = self._needed_s(fusion, fused_s)
        ready_s, now_s = [0.0] * len(self.ops), 0.0
        for first, after in reversed(OpFusion.runs(fusion.backward, len(self.ops))):
            now_s += fused_s(self.ops[first:after][::-1], True)
            ready_s[first:after] = [now_s] * (after - first)
        variables = tuple(
            replace(variable, ready_s=ready_s[number], needed_s=needed_s[number])
            for number in reversed(range(len(self.ops)))
            for variable in reversed(self.ops[number].variables)
        )
        return Workload(
            self.model,
            variables,
            edges=self._variable_edges,
            forward_s=forward_s,
            backward_s=now_s,
            update_s=self.update_s,
            device=self.device,
            source=self.source,
        )

    def _needed_s(self, fusion: OpFusion, fused_s: FusedTime) -> tuple[list[float], float]:
        needed_s, now_s = [0.0] * len(self.ops), 0.0
        for first, after in OpFusion.runs(fusion.forward, len(self.ops)):
            needed_s[first:after] = [now_s] * (after - first)
            now_s += fused_s(self.ops[first:after], False)
        return needed_s, now_s

    @cached_property
    def _variable_edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of variables whose ops are neighbours, not counting ops without variables.

        Variables are numbered in the order of the backward pass.
        """
        in_order = [v.name for op in reversed(self.ops) for v in reversed(op.variables)]
        position = {name: at for at, name in enumerate(in_order)}
        # per op: the ops with variables that reach it without passing another such op
        nearest: list[frozenset[int]] = []
        pairs: set[tuple[int, int]] = set()
        for number, op in enumerate(self.ops):
            before = frozenset().union(*(nearest[other] for other in self.predecessors[number]))
            if not op.variables:
                nearest.append(before)
                continue
            nearest.append(frozenset({number}))
            tensors = [position[variable.name] for variable in op.variables]
            others = [position[self.ops[other].variables[0].name] for other in before]
            neighbours = [*((other, tensors[0]) for other in others), *pairwise(tensors)]
            pairs.update((min(pair), max(pair)) for pair in neighbours)
        return tuple(sorted(pairs))
