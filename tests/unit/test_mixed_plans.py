"""Plans with direct exchanges and other messages: all of them start on the thread of lane 0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic_cluster import FREE, cluster, costs

from autotune.arrays import FloatArray
from autotune.dfg.graph import Dfg
from autotune.dfg.replay import replay
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.lower import Lowering
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Variable, Workload

PIECES, IN_FLIGHT, ELEMENTS = 40, 4, 4_000_000
WORKLOAD = Workload(
    "m", tuple(Variable(f"v{i}", (ELEMENTS,), ready_s=0.0, needed_s=0.0) for i in range(2))
)
EVEN = cluster(*[(1, 1000)] * 4, latency_s=0.0)
NETWORK = costs(FREE, collective_s=0.0)
"""A runtime that costs nothing besides the bytes."""
EXCHANGED = Message(
    (TensorSlice("v0", ELEMENTS),),
    Synchronizer.DIRECT_EXCHANGE,
    Compressor.NONE,
    "float32",
    pieces=PIECES,
)
REDUCED = Message(
    (TensorSlice("v1", ELEMENTS),), Synchronizer.ALL_REDUCE, Compressor.NONE, "float32"
)
ROUND_S = 3 / 4 * 4 * ELEMENTS / PIECES / 125e6 / FREE["payload"]
"""A round of a piece: each host sends three quarters of it."""


def graph_of(*messages: Message, runtime: RuntimeCosts = NETWORK) -> Dfg:
    plan = Plan(WORKLOAD.id, 4, messages, in_flight=IN_FLIGHT)
    return Lowering(WORKLOAD, EVEN, runtime).period(plan)


def times(graph: Dfg, name: str) -> tuple[FloatArray, FloatArray]:
    """When the ops of this name start and end, in order."""
    timeline = replay(graph)
    named = np.array([each == name for each in graph.names.ops])
    return np.sort(timeline.start_s[named]), np.sort(timeline.end_s[named])


def test_an_all_reduce_waits_until_all_pieces_before_it_have_started() -> None:
    """The last of 40 pieces starts when the push of piece 36 has ended, with four in flight.

    A link carries the pull of a piece and the push of the next one in turns, so that push is the
    71st transfer.
    """
    graph = graph_of(EXCHANGED, REDUCED)
    begins_s, _ = times(graph, "message 1 all_reduce in")
    pieces_begin_s, _ = times(graph, "message 0 push in")
    _, pushed_s = times(graph, "message 0 push 0 wait")
    assert len(pieces_begin_s) == len(pushed_s) == PIECES
    assert begins_s == pieces_begin_s[-1:] == pushed_s[PIECES - IN_FLIGHT - 1]
    assert begins_s == pytest.approx((2 * 35 + 1) * ROUND_S)


def test_an_all_reduce_before_the_pieces_starts_at_once() -> None:
    begins_s, _ = times(graph_of(REDUCED, EXCHANGED), "message 0 all_reduce in")
    assert begins_s == 0.0


@pytest.mark.parametrize("mixed", [False, True])
def test_the_thread_of_lane_0_compresses_what_the_host_compresses_without_it(mixed: bool) -> None:
    first = EXCHANGED if mixed else replace(REDUCED, slices=EXCHANGED.slices)
    compressed = replace(REDUCED, compressor=Compressor.INT8)
    graph = graph_of(first, compressed, runtime=costs(NETWORK, int8_encode_s=1e-3))
    duration_s = dict(zip(graph.names.ops, graph.duration_s.tolist(), strict=True))
    assert duration_s.get("message 1 lane 0 of r0") == (1e-3 if mixed else None)
    assert duration_s["r0 issue v1"] == (0.0 if mixed else 1e-3)
