"""The one replay: an event loop over queues, channels and locks (dPRO, sec. 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.dfg.graph import Dfg, FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Timeline:
    """When every op of `dfg` ran, from time 0, seconds; all arrays have shape (N,).

    `cause`: the op whose end (and the gap behind it) let this one start: a parent, the op before it on its queue or channel, or the one
    that gave its lock back; NONE where it started at 0. Following it from the last op gives the critical path of the execution graph.
    """

    dfg: Dfg
    start_s: FloatArray
    end_s: FloatArray
    cause: IntArray

    @property
    def makespan_s(self) -> float:
        return float(self.end_s.max(initial=0.0))


def replay(dfg: Dfg, duration_s: FloatArray | None = None) -> Timeline:
    """Run the graph, with other durations of shape (N,) if given. Raises `InvalidInput` where ops wait for each other's locks forever."""
    raise NotImplementedError
