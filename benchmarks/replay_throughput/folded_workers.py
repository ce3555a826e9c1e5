"""What n workers alike cost to replay: rings and parameter servers of 1, 16 and 1024 workers, lowered and folded.

Lowered: the product's own way. A plan is written down for one worker and the ports that decide (`Lowering`), and never in full. Folded: a
graph that is there in full, as one read from somewhere else, is reduced to its quotient (`dfg.symmetry`); folding looks at all of it once,
and each replay behind that is of the quotient alone. Every quotient is held against a replay of the full graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.cluster import Cluster, Host
from autotune.dfg.build import csr
from autotune.dfg.graph import NONE, Dfg, Kind, Names
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
"""Of each layer's ring in the graph that is folded."""
CALLS = 25


@dataclass(frozen=True)
class Cost:
    """`events` of one replay, which takes `replay_s`. `made_s`: writing the graph down, or folding it. Both are CPU seconds, medians.

    `full_events`: of the graph that is folded.
    """

    graph: str
    workers: int
    events: int
    replay_s: float
    made_s: float
    full_events: int | None = None


def costs() -> list[Cost]:
    """Of every kind of graph at every number of workers."""
    lowered = [_lowered(name, count) for name in _PLANS for count in WORKERS]
    return lowered + [_folded(name, count) for name in _FULL for count in WORKERS]


def table(found: Sequence[Cost]) -> list[str]:
    head = f"{'graph':22}{'workers':>8}{'events':>8}{'replay':>12}{'made in':>12}{'in full':>10}"
    rows = [
        f"{own.graph:22}{own.workers:8}{own.events:8}{own.replay_s * 1e6:9.1f} us{own.made_s * 1e3:9.2f} ms{own.full_events or '':>10}"
        for own in found
    ]
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
    """The messages on the same few servers however many workers there are."""
    made = plan(parameter_server(workload, cluster), workload, cluster.world_size)
    servers = min(SERVERS, cluster.world_size)
    return replace(
        made,
        messages=tuple(
            replace(message, owner=number % servers) for number, message in enumerate(made.messages)
        ),
    )


_PLANS: dict[str, Callable[[Workload, Cluster], Plan]] = {
    "lowered ring": _ring_plan,
    "lowered servers": _server_plan,
}


def _lowered(name: str, workers: int) -> Cost:
    """The kept `Lowering` writes the plan down again, as a search does; what the plans of a cluster share is known by then."""
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
    """Passes of every worker; each layer's gradient goes round in steps, of which each waits for that of the worker before."""
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
    """Passes of every worker, pushes on its own link, updates on the servers, pulls on its own link."""
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
    """(ops of the forward and the backward pass of every worker (W, 2 L), their seconds on one worker (2 L,))."""
    return np.arange(workers * 2 * LAYERS).reshape(workers, 2 * LAYERS), _drawn(10, 200, 2 * LAYERS)


def _drawn(low_us: float, high_us: float, count: int) -> FloatArray:
    """Durations as of `replay_throughput`, the same for all workers."""
    return np.random.default_rng(0).uniform(low_us, high_us, count) * 1e-6


def _graph(
    seconds: FloatArray,
    queue: IntArray,
    kind: IntArray,
    worker: IntArray,
    edges: Sequence[tuple[IntArray, IntArray]],
    queues: int,
) -> Dfg:
    ops = len(seconds)
    start, child = csr(
        ops, *(np.concatenate([pair[side].ravel() for pair in edges]) for side in (0, 1))
    )
    none, zero = np.full(ops, NONE), np.zeros(ops)
    names = Names(tuple(map(str, range(ops))), tuple(map(str, range(queues))))
    columns: dict[str, Any] = {
        "gap_s": zero,
        "channel": none,
        "priority": zero,
        "size_bytes": zero,
        "layer": none,
    }
    return Dfg(
        duration_s=seconds,
        queue=queue.astype(np.int32),
        child_start=start,
        child=child,
        discipline=np.zeros(queues, np.int8),
        kind=kind.astype(np.int8),
        worker=worker.astype(np.int32),
        acquires=none,
        releases=none,
        lock_capacity=np.zeros(0, np.int32),
        names=names,
        **columns,
    )
