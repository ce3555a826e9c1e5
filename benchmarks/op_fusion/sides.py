"""Times of one part of a step on three sides, in turns.

| side | ops | session |
|---|---|---|
| apart | one by one | that of the ranks: Grappler is off |
| grappler | one by one | TensorFlow's defaults: its graph optimizers are on, among them Grappler |
| fused | kernels of XLA | that of the ranks |

All sides have equally many threads and return their results; Grappler would drop a part whose
results nobody reads. A ratio is time of the rival / time of the side, and the rival is the faster
one of the two unfused sides.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

APART, GRAPPLER, FUSED = "apart", "grappler", "fused"
UNFUSED = (APART, GRAPPLER)


@dataclass(frozen=True)
class SideTimes:
    """Side -> seconds of each repeat, without the start of a session's run.

    `exact`: whether exactly the planned clusters were compiled.
    """

    taken_s: Mapping[str, tuple[float, ...]]
    exact: bool

    def median_s(self, side: str) -> float:
        return median(self.taken_s[side])

    @property
    def rival(self) -> str:
        """The unfused side with the lower median."""
        return min(UNFUSED, key=self.median_s)

    def ratios(self, side: str) -> list[float]:
        """Return time(rival) / time(side) of each repeat: above 1 the side is faster."""
        pairs = zip(self.taken_s[self.rival], self.taken_s[side], strict=True)
        return [rival_s / side_s for rival_s, side_s in pairs]


def optimizing(config: Any) -> Any:
    """Return the session's configuration with the graph optimizers of TensorFlow's defaults."""
    import tensorflow as tf

    defaults = tf.compat.v1.ConfigProto()
    defaults.CopyFrom(config)
    defaults.ClearField("graph_options")
    return defaults


def side_times(
    view: Any,
    types: Any,
    scopes: Mapping[str, str],
    config: Any,
    results: Sequence[Any],
    repeats: int,
) -> SideTimes | None:
    """Time the ops in `scopes` on all sides; arguments as of `fused_times.paired_times`.

    None if XLA cannot compile a scope.
    """
    import tensorflow as tf

    from runtime_rewriter.tensorflow.fused_times import paired_graph

    try:
        graph = paired_graph(view, types, scopes, [str(one) for one in results], {})
        return None if graph is None else _measured(graph, config, repeats)
    except (tf.errors.OpError, ValueError):  # XLA cannot compile a scope
        return None


def _measured(graph: Any, config: Any, repeats: int) -> SideTimes | None:
    import tensorflow as tf

    from runtime_rewriter.tensorflow.fused_times import (
        compiled_exactly,
        seconds_in_turns,
        without_start,
    )

    v1 = tf.compat.v1
    with (
        v1.Session(graph=graph, config=config) as plain,
        v1.Session(graph=graph, config=optimizing(config)) as optimized,
    ):
        for session in (plain, optimized):
            session.run("start")
        exact = compiled_exactly(plain, graph)
        if exact is None:
            return None
        sessions = {APART: plain, GRAPPLER: optimized, FUSED: plain}
        calls = {
            side: session.make_callable(graph.get_collection(FUSED if side == FUSED else APART))
            for side, session in sessions.items()
        }
        empty = graph.get_operation_by_name("empty")
        empties = {f"empty {side}": sessions[side].make_callable(empty) for side in UNFUSED}
        spent_s = seconds_in_turns(calls | empties, repeats, time.perf_counter)
    empty_s = {side: median(spent_s[f"empty {side}"]) for side in UNFUSED}
    empty_s[FUSED] = empty_s[APART]
    taken_s = {side: without_start(spent_s[side], empty_s[side]) for side in sessions}
    return SideTimes(taken_s, exact)
