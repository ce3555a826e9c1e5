"""A step's ops and edges while they are collected."""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.profiling.formats.rank_trace import RankTrace
from autotune.profiling.graph.device_order import DeviceOrder
from autotune.profiling.graph.rank_ops import RankOps, TracedOp


@dataclass(eq=False)
class StepDraft:
    """`out` grows.

    - `device`: device events in order of their starts; `op_of`: such an event -> its op;
      `launcher`: such an event -> the op that launches it.
    - `by_lane`: lane -> its ops in order, ascending.
    """

    trace: RankTrace
    order: DeviceOrder
    device: list[int]
    out: RankOps
    by_lane: dict[int, list[int]] = field(default_factory=dict)
    launcher: dict[int, int] = field(default_factory=dict)
    op_of: dict[int, int] = field(default_factory=dict)

    def add(self, op: TracedOp) -> int:
        """Add an op behind those of its lane; return its number."""
        number = len(self.out.ops)
        self.out.ops.append(op)
        self.by_lane.setdefault(op.lane, []).append(number)
        return number

    def edge(self, parent: int, child: int, delay_s: float = 0.0) -> None:
        """Add an edge; of several between the same ops the longest delay holds."""
        if parent != child:
            known_s = self.out.edges.get((parent, child), 0.0)
            self.out.edges[parent, child] = max(known_s, delay_s)


def without_cycles(out: RankOps) -> None:
    """Remove the edges that go back in time, where there is a cycle.

    Device work that begins before its launch, by their clocks, may end before a call that comes
    before the launch and waits for the work.
    """
    ops = out.ops
    children: dict[int, list[int]] = {}
    left = [0] * len(ops)
    for parent, child in out.edges:
        children.setdefault(parent, []).append(child)
        left[child] += 1
    ready = [number for number, count in enumerate(left) if not count]
    while ready:
        for child in children.get(ready.pop(), ()):
            left[child] -= 1
            if not left[child]:
                ready.append(child)
    if not any(left):
        return
    for parent, child in list(out.edges):
        order = (ops[parent].start_s, parent) < (ops[child].start_s, child)
        if left[parent] and left[child] and not order:
            del out.edges[parent, child]
