"""Steps that a device queues, as over NCCL: no threads, no limits, one collective at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from synthetic_cluster import FREE, cluster, costs

from autotune.dfg.graph import Dfg
from autotune.dfg.replay import replay
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.device_costs import costs_of
from autotune.lowering.lower import Lowering
from autotune.strategy_space.plan import Message, TensorSlice
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Variable, Workload

ELEMENTS = 1_000_000
WORKLOAD = Workload("m", (Variable("v", (ELEMENTS,), ready_s=0.0, needed_s=0.0),))
EVEN = cluster(*[(1, 1000)] * 4, latency_s=0.0)
GLOO = costs(FREE, collective_s=0.0)
NCCL = costs(GLOO, threads=1, star_threads=1, queued=1)


def message(kind: Synchronizer, **choices: object) -> Message:
    of: tuple[TensorSlice, ...] = (TensorSlice("v", ELEMENTS),)
    return Message(of, kind, Compressor.NONE, "float32", **choices)  # type: ignore[arg-type]


def lowered(
    *messages: Message, runtime: RuntimeCosts, limit: int | None = None, in_flight: int = 1
) -> Dfg:
    lowering = Lowering(WORKLOAD, EVEN, runtime)
    return lowering.message_graph(messages, limit=limit, in_flight=in_flight)


def span_s(graph: Dfg, step: str) -> tuple[float, float]:
    """When a step of a message begins and ends."""
    timeline = replay(graph)
    ops = [number for number, name in enumerate(graph.names.ops) if name.startswith(step)]
    return float(timeline.start_s[ops].min()), float(timeline.end_s[ops].max())


def gathered(owner: int) -> Message:
    return message(Synchronizer.PARAMETER_SERVER, owner=owner)


@pytest.mark.parametrize("behind", [gathered(1), message(Synchronizer.ALL_REDUCE)])
def test_collectives_of_one_communicator_follow_each_other(behind: Message) -> None:
    """Gloo runs two of them at once."""
    step = "gather" if behind.owner is not None else "all_reduce"
    for runtime, waits in ((NCCL, True), (GLOO, False)):
        graph = lowered(gathered(0), behind, runtime=runtime)
        _, first_end_s = span_s(graph, "message 0 gather")
        begin_s, _ = span_s(graph, f"message 1 {step}")
        assert first_end_s > 0.0
        assert begin_s == (first_end_s if waits else 0.0)


@pytest.mark.parametrize("shares", [None, (0.5, 0.25, 0.25, 0.0), (0.0, 1.0, 0.0, 0.0)])
def test_rounds_of_direct_exchanges_follow_each_other(shares: tuple[float, ...] | None) -> None:
    sent = [message(Synchronizer.DIRECT_EXCHANGE, shares=shares)] * 4
    graph = lowered(*sent, runtime=NCCL, in_flight=8)
    for step in ("push", "pull"):
        spans_s = [span_s(graph, f"message {number} {step}") for number in range(len(sent))]
        for (_, end_s), (begin_s, _) in pairwise(spans_s):
            assert begin_s == end_s if step == "push" else begin_s >= end_s
    overlapping = lowered(*sent, runtime=GLOO, in_flight=8)
    _, end_s = span_s(overlapping, "message 0 push")
    begin_s, _ = span_s(overlapping, "message 1 push")
    assert begin_s < end_s


def test_limits_have_no_effect() -> None:
    exchanged = message(Synchronizer.DIRECT_EXCHANGE, pieces=8)
    for limit in (None, 2):
        one_s, eight_s = (
            replay(lowered(exchanged, runtime=NCCL, limit=limit, in_flight=most)).makespan_s
            for most in (1, 8)
        )
        assert one_s == eight_s


@pytest.mark.parametrize("limit", [None, 1])
def test_the_issuing_thread_compresses_messages(limit: int | None) -> None:
    exchanged = message(Synchronizer.DIRECT_EXCHANGE)
    compressed = replace(exchanged, compressor=Compressor.TOP_K, ratio=0.1)
    finding = costs(NCCL, top_k_find_s=1e-3)
    graph = lowered(compressed, runtime=finding, limit=limit)
    assert not any("lane 0 of" in name for name in graph.names.ops)
    issued = graph.names.ops.index("issue 0")
    assert graph.duration_s[issued] == pytest.approx(4e-3)  # a payload for each owner


def test_an_accelerator_queues_its_steps() -> None:
    for name in ("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB", ""):
        runtime = costs_of("cuda", name)
        assert (runtime["threads"], runtime["star_threads"], runtime["queued"]) == (1, 1, 1)
    assert costs_of("cpu")["queued"] == 0
