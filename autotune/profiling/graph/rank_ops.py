"""The ops of one rank in one step, and the edges between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from autotune.dfg.graph import Kind
from autotune.profiling.formats.rank_trace import MISSING


@dataclass
class TracedOp:
    """One op.

    - `lane`: its queue. `collective`: index in the rank's list of collectives, MISSING for none.
    - `start_s`: when it began to make progress, s from the rank's origin. For a blocking call this
      is when its cause of waiting had ended. `waited_s`: how long the thread was blocked before.
    - `node`: id of its node in the recorded graph, MISSING without one. `event`: its event of the
      trace; several ops of a host thread may have one event.
    """

    name: str
    lane: int
    kind: Kind
    start_s: float
    end_s: float
    layer: str = ""
    size_bytes: float = 0.0
    collective: int = MISSING
    gap_s: float = 0.0
    waited_s: float = 0.0
    node: int = MISSING
    event: int = MISSING

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def called_s(self) -> float:
        """When the thread came to the op."""
        return self.start_s - self.waited_s


class Cause(Enum):
    """Why a stream idled though everything that its next op is known to wait for had ended."""

    UNKNOWN = "unknown"
    DEVICE_FULL = "kernels of other streams filled the device"


@dataclass(frozen=True)
class DeviceWait:
    """A stream idled for `length_s` from `start_s` before it began op `op`."""

    op: int
    start_s: float
    length_s: float
    cause: Cause


@dataclass
class RankOps:
    """The ops of a rank.

    - `edges`: (parent, child) -> delay in seconds; `inferred`: edges that the trace does not state.
    - `orphans`: device ops without a launch.
    - `waits`: a stream's idle times above `WAKE_S` that no edge explains; they are delays.
    """

    ops: list[TracedOp] = field(default_factory=list)
    edges: dict[tuple[int, int], float] = field(default_factory=dict)
    inferred: int = 0
    orphans: int = 0
    waits: list[DeviceWait] = field(default_factory=list)

    @property
    def unexplained_s(self) -> float:
        """Seconds for which the device waited for something that the trace does not show."""
        return sum(wait.length_s for wait in self.waits if wait.cause is Cause.UNKNOWN)

    @property
    def begin_s(self) -> float:
        return min((op.start_s for op in self.ops), default=0.0)

    @property
    def end_s(self) -> float:
        return max((op.end_s for op in self.ops), default=0.0)


def hidden_before(ops: RankOps, floor_s: float) -> RankOps:
    """Return the ops and edges with everything before `floor_s` taking no time.

    The host may run a step while the device still works for the step before. Such a step adds only
    the time after the end of that work.
    """
    if floor_s <= ops.begin_s:
        return ops

    def left_s(start_s: float, length_s: float) -> float:
        return max(start_s + length_s, floor_s) - max(start_s, floor_s)

    cut = [
        replace(
            op,
            start_s=max(op.start_s, floor_s),
            end_s=max(op.end_s, floor_s),
            gap_s=left_s(op.end_s, op.gap_s),
            waited_s=left_s(op.called_s, op.waited_s),
        )
        for op in ops.ops
    ]
    edges = {
        (parent, child): left_s(ops.ops[parent].end_s, delay_s)
        for (parent, child), delay_s in ops.edges.items()
    }
    waits = [
        replace(
            wait, start_s=max(wait.start_s, floor_s), length_s=left_s(wait.start_s, wait.length_s)
        )
        for wait in ops.waits
    ]
    return replace(ops, ops=cut, edges=edges, waits=waits)
