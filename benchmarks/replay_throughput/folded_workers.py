"""The cost to replay n equal workers: rings and servers of 1, 16 and 1024 workers.

Lowered, as the product does it: `Lowering` writes only one worker and the ports that decide.
Folded: a full graph is reduced to its quotient (`symmetry.py`), which examines it once; then only
the quotient is replayed. Every quotient is compared with a replay of the full graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.cluster import Cluster, Host
from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.dfg.replay import replay
from autotune.lowering.lower import Lowering
from autotune.strategy_space.builders.collectives import per_variable
from autotune.strategy_space.builders.servers import parameter_server
from autotune.strategy_space.plan import Plan, plan
from autotune.workload import Variable, Workload
from benchmarks.replay_throughput.symmetry import fold

WORKERS = (1, 16, 1024)
LAYERS = 160
SERVERS = 4
STEPS = 4
"""Steps of each layer's ring in the graph that is folded."""
CALLS = 25


@dataclass(frozen=True)
class Cost:
    """`events` of one replay and its `replay_s`; `made_s`: building or folding the graph.

    Both are medians of CPU seconds. `full_events`: events of the graph that is folded.
    """

    graph: str
    workers: int
    events: int
    replay_s: float
    made_s: float
    full_events: int | None = None


def costs() -> list[Cost]:
    """Every kind of graph with every number of workers."""
    lowered = [_lowered(name, count) for name in _PLANS for count in WORKERS]
    return lowered + [_folded(name, count) for name in _FULL for count in WORKERS]


def table(measured: Sequence[Cost]) -> list[str]:
    head = f"{'graph':22}{'workers':>8}{'events':>8}{'replay':>12}{'made in':>12}{'in full':>10}"
    rows = []
    for cost in measured:
        replay_us, made_ms = cost.replay_s * 1e6, cost.made_s * 1e3
        times = f"{replay_us:9.1f} us{made_ms:9.2f} ms{cost.full_events or '':>10}"
        rows.append(f"{cost.graph:22}{cost.workers:8}{cost.events:8}{times}")
    return [head, *rows]


def _median_cpu_s(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        began_s = time.process_time()
        call()
        times.append(time.process_time() - began_s)
    return float(np.median(times))


def _cost(
    name: str,
    workers: int,
    dfg: Dfg,
    make: Callable[[], object],
    calls: int,
    full_events: int | None = None,
) -> Cost:
    replay(dfg)
    return Cost(
        name,
        workers,
        dfg.ops,
        _median_cpu_s(lambda: replay(dfg), CALLS),
        _median_cpu_s(make, calls),
        full_events,
    )


def _ring_plan(workload: Workload, cluster: Cluster) -> Plan:
    return plan(per_variable(workload), workload, cluster.world_size)


def _server_plan(workload: Workload, cluster: Cluster) -> Plan:
    """The same few servers own the messages, whatever the number of workers."""
    sharded = plan(parameter_server(workload, cluster), workload, cluster.world_size)
    servers = min(SERVERS, cluster.world_size)
    return replace(
        sharded,
        messages=tuple(
            replace(message, owner=number % servers)
            for number, message in enumerate(sharded.messages)
        ),
    )


_PLANS: dict[str, Callable[[Workload, Cluster], Plan]] = {
    "lowered ring": _ring_plan,
    "lowered servers": _server_plan,
}


def _lowered(name: str, workers: int) -> Cost:
    """A kept `Lowering` lowers the plan again, as a search does."""
    cluster = Cluster(
        f"{workers}x1", tuple(Host(f"h{i}", 1, 1.25e9, 5e-5, 10e9, 5e-6) for i in range(workers))
    )
    variables = tuple(
        Variable(f"v{i}", (250_000,), ready_s=0.2 * (i + 1) / LAYERS) for i in range(LAYERS)
    )
    workload = Workload("layers", variables, (), 0.1, 0.2, 0.005)
    wanted, lowering = _PLANS[name](workload, cluster), Lowering(workload, cluster)
    return _cost(name, workers, lowering.period(wanted), lambda: lowering.period(wanted), 5)


def _folded(name: str, workers: int) -> Cost:
    full = _FULL[name](workers)
    folded = fold(full)
    start_s, end_s = folded.unfold_s(replay(folded.dfg))
    timeline = replay(full)
    assert np.array_equal(start_s, timeline.start_s) and np.array_equal(end_s, timeline.end_s)
    return _cost(name, workers, folded.dfg, lambda: fold(full), 1, full.ops)


def _ring_graph(workers: int) -> Dfg:
    """Passes of every worker; a gradient's ring step waits for the previous worker's step."""
    passes, compute = _passes(workers)
    first = passes.size
    sent = first + np.arange(workers * LAYERS * STEPS).reshape(workers, LAYERS, STEPS)
    edges = [
        (passes[:, :-1], passes[:, 1:]),
        (passes[:, LAYERS:][:, ::-1], sent[:, :, 0]),
        (np.roll(sent, 1, axis=0)[:, :, :-1], sent[:, :, 1:]),
    ]
    worker = np.concatenate(
        [np.repeat(np.arange(workers), 2 * LAYERS), np.repeat(np.arange(workers), LAYERS * STEPS)]
    )
    seconds = np.concatenate(
        [np.tile(compute, workers), np.tile(np.repeat(_drawn(10, 150, LAYERS), STEPS), workers)]
    )
    queue = np.where(np.arange(len(worker)) < first, worker, workers + worker)
    kind = np.where(np.arange(len(worker)) < first, Kind.BACKWARD, Kind.SEND)
    return _graph(seconds, queue, kind, worker, edges, 2 * workers)


def _server_graph(workers: int) -> Dfg:
    """Passes, pushes and pulls of every worker, and updates on the servers."""
    passes, compute = _passes(workers)
    pushed = passes.size + np.arange(workers * LAYERS).reshape(workers, LAYERS)
    update = passes.size + pushed.size + np.arange(LAYERS)
    pulled = pushed + pushed.size + LAYERS
    edges = [
        (passes[:, :-1], passes[:, 1:]),
        (passes[:, LAYERS:][:, ::-1], pushed),
        (pushed, np.broadcast_to(update, pushed.shape)),
        (np.broadcast_to(update, pulled.shape), pulled),
    ]
    of_worker = np.repeat(np.arange(workers), LAYERS)
    worker = np.concatenate(
        [np.repeat(np.arange(workers), 2 * LAYERS), of_worker, np.full(LAYERS, NONE), of_worker]
    )
    up, down = workers + of_worker, 2 * workers + of_worker
    queue = np.concatenate(
        [
            np.repeat(np.arange(workers), 2 * LAYERS),
            up,
            3 * workers + np.arange(LAYERS) % SERVERS,
            down,
        ]
    )
    kind = np.repeat(
        [Kind.BACKWARD, Kind.SEND, Kind.SERVER, Kind.RECV],
        [passes.size, pushed.size, LAYERS, pulled.size],
    )
    sent, served = _drawn(10, 150, LAYERS), _drawn(5, 6, LAYERS)
    seconds = np.concatenate(
        [np.tile(compute, workers), np.tile(sent, workers), served, np.tile(sent, workers)]
    )
    return _graph(seconds, queue, kind, worker, edges, 3 * workers + SERVERS)


_FULL: dict[str, Callable[[int], Dfg]] = {
    "folded ring": _ring_graph,
    "folded servers": _server_graph,
}


def _passes(workers: int) -> tuple[IntArray, FloatArray]:
    """(ops of both passes of every worker (W, 2 L), their seconds on one worker (2 L,))."""
    return np.arange(workers * 2 * LAYERS).reshape(workers, 2 * LAYERS), _drawn(10, 200, 2 * LAYERS)


def _drawn(low_us: float, high_us: float, count: int) -> FloatArray:
    """Random durations, the same for all workers."""
    return np.random.default_rng(0).uniform(low_us, high_us, count) * 1e-6


def _graph(
    seconds: FloatArray,
    queue: IntArray,
    kind: IntArray,
    worker: IntArray,
    edges: Sequence[tuple[IntArray, IntArray]],
    queues: int,
) -> Dfg:
    builder = DfgBuilder()
    for number in range(queues):
        builder.queue(str(number))
    builder.block(len(seconds), str, duration_s=seconds, queue=queue, kind=kind, worker=worker)
    for parents, children in edges:
        builder.edges(parents, children)
    return builder.build()
