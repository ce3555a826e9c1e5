"""The ops of one or more ranks as one `Dfg`; a collective is one joint op (dPRO, sec. 4.1).

Every member of a joint collective becomes an In op, which is there when the rank is ready, and an
op that holds the rank's stream or thread for the time of the transfer. Between them lies one
virtual op for all members, which ends when the last In op does:

    before ─▶ In (rank 0) ─┐                ┌─▶ transfer (rank 0) ─▶ after
    before ─▶ In (rank 1) ─┴─▶ all are in ──┴─▶ transfer (rank 1) ─▶ after

The transfer of a member lasts from the latest start of all members to its own end. Waiting for
others is no duration: the replay produces it, and a change that makes it unnecessary removes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.profiling.formats.rank_trace import MISSING, RankTrace
from autotune.profiling.graph.rank_ops import RankOps, TracedOp
from autotune.profiling.traces.matching import Joint


@dataclass(frozen=True)
class RankPart:
    """One rank's ops.

    `shift_s` brings its times onto the job's common clock. `joint_of`: index of a collective ->
    number of its joint.
    """

    rank: int
    trace: RankTrace
    ops: RankOps
    shift_s: float
    joint_of: Mapping[int, int]


def build_dfg(parts: Sequence[RankPart], joints: Sequence[Joint]) -> Dfg:
    """Build the graph; time 0 is the first start of all.

    Raises `InvalidInput` where the ops of a trace contradict each other.
    """
    return _GraphBuild(parts, joints).dfg()


class _GraphBuild:
    def __init__(self, parts: Sequence[RankPart], joints: Sequence[Joint]) -> None:
        self.parts, self.joints = parts, joints
        self.graph = DfgBuilder()
        self.begin_s = min(part.ops.begin_s + part.shift_s for part in parts)
        # joint -> place among the parts -> start on the common clock; the latest start of a joint
        self.starts: dict[int, dict[int, float]] = {}
        for place, part in enumerate(parts):
            for op in part.ops.ops:
                if op.collective in part.joint_of:
                    starts = self.starts.setdefault(part.joint_of[op.collective], {})
                    starts[place] = op.start_s + part.shift_s
        self.latest_s = {joint: max(starts.values()) for joint, starts in self.starts.items()}
        self.gates: dict[int, int] = {}
        # (place, op) -> op of the graph that its parents lead to, and that its children follow
        self.entry: dict[tuple[int, int], int] = {}
        self.exit: dict[tuple[int, int], int] = {}

    def dfg(self) -> Dfg:
        for place, part in enumerate(self.parts):
            self._add_ops(place, part)
        for place, part in enumerate(self.parts):
            self._add_edges(place, part)
        return self.graph.build()

    def _add_ops(self, place: int, part: RankPart) -> None:
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

    def _joint_of(self, part: RankPart, collective: int) -> int:
        """Number of the joint that makes its members wait.

        MISSING where there is none, or where the trace does not state who waits for whom.
        """
        number = part.joint_of.get(collective, MISSING)
        if number == MISSING or len(self.starts[number]) < 2:
            return MISSING
        joint = self.joints[number]
        return number if joint.mutual or joint.root in self.starts[number] else MISSING

    def _transfer_s(self, place: int, part: RankPart, op: TracedOp, number: int) -> float:
        """Seconds from the latest start among the ranks that the member must wait for."""
        starts, joint = self.starts[number], self.joints[number]
        pair = place, joint.root
        begin_s = self.latest_s[number] if joint.mutual else max(starts[one] for one in pair)
        return max(op.end_s + part.shift_s - begin_s, 0.0)

    def _join(self, place: int, number: int, entry: int, added: int) -> None:
        joint = self.joints[number]
        if number not in self.gates:
            gate = self.graph.op(f"all in {joint.transaction}", NONE, 0.0, Kind.VIRTUAL)
            self.gates[number] = gate
        if joint.mutual or joint.root == place:
            self.graph.edge(entry, self.gates[number])
        if joint.mutual or joint.root != place:
            self.graph.edge(self.gates[number], added)
        self.graph.edge(entry, added)

    def _add_edges(self, place: int, part: RankPart) -> None:
        for (parent, child), delay_s in part.ops.edges.items():
            before, after = self.exit[place, parent], self.entry[place, child]
            if delay_s > 0:
                name = f"until {part.ops.ops[child].name}"
                before = self._delay(name, delay_s, part.rank, [before])
            self.graph.edge(before, after)
        children = {child for _, child in part.ops.edges}
        for number, op in enumerate(part.ops.ops):
            late_s = op.start_s - op.waited_s + part.shift_s - self.begin_s
            if number not in children and late_s > 0:
                delay = self._delay(f"begin of rank {part.rank}", late_s, part.rank)
                self.graph.edge(delay, self.entry[place, number])

    def _delay(self, name: str, delay_s: float, rank: int, after: Sequence[int] = ()) -> int:
        return self.graph.op(name, NONE, delay_s, Kind.VIRTUAL, after=after, worker=rank)
