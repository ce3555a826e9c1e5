"""The ops of one or more ranks as one `Dfg`; a collective is one joint op of all that take part (dPRO, sec. 4.1).

Every member of a joint collective becomes an In op, which is there when the rank is ready, and an op that holds the rank's stream or
thread for the time of the transfer. In between lies one virtual op for all, which ends when the last In op does:

    before ─▶ In (rank 0) ─┐                ┌─▶ transfer (rank 0) ─▶ behind
    before ─▶ In (rank 1) ─┴─▶ all are in ──┴─▶ transfer (rank 1) ─▶ behind

The transfer of a member takes from the latest start of all members to its own end. Waiting for others is no duration: it comes out of
the replay, and goes where a change removes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.profiling.traces.matching import Joint
from autotune.profiling.traces.rank_ops import Op, RankOps
from autotune.profiling.traces.rank_trace import MISSING, RankTrace


@dataclass(frozen=True)
class Part:
    """One rank's ops. `shift_s` brings its times onto the job's common clock; `joint_of`: index of a collective -> number of its joint."""

    rank: int
    trace: RankTrace
    ops: RankOps
    shift_s: float
    joint_of: Mapping[int, int]


def build_dfg(parts: Sequence[Part], joints: Sequence[Joint]) -> Dfg:
    """Time 0 is the first start of all. Raises `InvalidInput` where the ops of a trace contradict each other."""
    return _Build(parts, joints).dfg()


class _Build:
    def __init__(self, parts: Sequence[Part], joints: Sequence[Joint]) -> None:
        self.parts, self.joints = parts, joints
        self.graph = DfgBuilder()
        self.begin_s = min(part.ops.begin_s + part.shift_s for part in parts)
        self.starts: dict[
            int, dict[int, float]
        ] = {}  # joint -> place among the parts -> start on the common clock
        for place, part in enumerate(parts):
            for op in part.ops.ops:
                if (
                    op.collective != MISSING
                    and (joint := part.joint_of.get(op.collective, MISSING)) != MISSING
                ):
                    self.starts.setdefault(joint, {})[place] = op.start_s + part.shift_s
        self.gates: dict[int, int] = {}
        self.entry: dict[
            tuple[int, int], int
        ] = {}  # (place, op) -> op of the graph that its parents lead to
        self.exit: dict[tuple[int, int], int] = {}  # ... and that its children follow

    def dfg(self) -> Dfg:
        for place, part in enumerate(self.parts):
            self._ops(place, part)
        for place, part in enumerate(self.parts):
            self._edges(place, part)
        return self.graph.build()

    def _ops(self, place: int, part: Part) -> None:
        for number, op in enumerate(part.ops.ops):
            lane = part.trace.lanes[op.lane].name
            queue = self.graph.queue(f"rank {part.rank} {lane}", key=(place, op.lane))
            layer = self.graph.layer(op.layer) if op.layer else NONE
            joint = self._joint_of(part, op.collective)
            duration_s = op.duration_s
            if joint != MISSING:
                duration_s = self._transfer_s(place, part, op, joint)
                self.entry[place, number] = self.graph.op(
                    f"In {op.name}", queue, 0.0, Kind.VIRTUAL, layer=layer, worker=part.rank
                )
            added = self.graph.op(
                op.name,
                queue,
                duration_s,
                op.kind,
                gap_s=op.gap_s,
                size_bytes=op.size_bytes,
                layer=layer,
                worker=part.rank,
            )
            self.exit[place, number] = added
            self.entry.setdefault((place, number), added)
            if joint != MISSING:
                self._join(place, joint, self.entry[place, number], added)

    def _joint_of(self, part: Part, collective: int) -> int:
        """Number of the joint that makes its members wait; MISSING where there is none or the trace cannot tell who waits for whom."""
        joint = part.joint_of.get(collective, MISSING) if collective != MISSING else MISSING
        if joint == MISSING or len(self.starts[joint]) < 2:
            return MISSING
        return (
            joint
            if self.joints[joint].mutual or self.joints[joint].root in self.starts[joint]
            else MISSING
        )

    def _transfer_s(self, place: int, part: Part, op: Op, joint: int) -> float:
        """From the latest start of those that the member cannot end without."""
        starts = self.starts[joint]
        root = self.joints[joint].root
        latest_s = (
            max(starts.values()) if self.joints[joint].mutual else max(starts[place], starts[root])
        )
        return max(op.end_s + part.shift_s - latest_s, 0.0)

    def _join(self, place: int, number: int, entry: int, added: int) -> None:
        joint = self.joints[number]
        if number not in self.gates:
            self.gates[number] = self.graph.op(
                f"all in {joint.transaction}", NONE, 0.0, Kind.VIRTUAL
            )
        if joint.mutual or joint.root == place:
            self.graph.edge(entry, self.gates[number])
        if joint.mutual or joint.root != place:
            self.graph.edge(self.gates[number], added)
        self.graph.edge(entry, added)

    def _edges(self, place: int, part: Part) -> None:
        led_to = set()
        for (parent, child), delay_s in part.ops.edges.items():
            led_to.add(child)
            before, behind = self.exit[place, parent], self.entry[place, child]
            if delay_s > 0:
                behind_name = part.ops.ops[child].name
                delay = self.graph.op(
                    f"until {behind_name}",
                    NONE,
                    delay_s,
                    Kind.VIRTUAL,
                    after=[before],
                    worker=part.rank,
                )
                self.graph.edge(delay, behind)
            else:
                self.graph.edge(before, behind)
        for number, op in enumerate(part.ops.ops):
            late_s = op.start_s - op.waited_s + part.shift_s - self.begin_s
            if number not in led_to and late_s > 0:
                delay = self.graph.op(
                    f"begin of rank {part.rank}", NONE, late_s, Kind.VIRTUAL, worker=part.rank
                )
                self.graph.edge(delay, self.entry[place, number])
