"""How fast is the replay, relative to SimPy, networkx and the same event loop in plain Python?

All engines run interleaved on one core. The graph is data-parallel training of L layers on W
workers, 4 L W ops. Each worker has a chain of forward and a chain of backward ops on its device. A
layer's gradient is sent on the worker's link when the worker and its left neighbor have it; then it
is updated on the device. At last, 1, 16 and 1024 equal workers are compared (`folded_workers`).

The product uses `replay`. `batched` (a fixed order, many sets of durations) and `incremental` (one
changed duration) are experiments of this folder, which no command of `autotune` uses.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import networkx
import numpy as np
import simpy

from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.dfg.replay import replay
from benchmarks.replay_throughput.batched import FixedOrder
from benchmarks.replay_throughput.folded_workers import costs, table
from benchmarks.replay_throughput.incremental import IncrementalReplay

SIZES = ((160, 16), (160, 64), (1000, 128))  # layers, workers
SETS = 64
CALLS = 15  # of the fast engines in each round; their median is the round's time
RIVALS_UP_TO = 50_000  # ops; with more, networkx and SimPy take minutes


def data_parallel(layers: int, workers: int, seed: int = 0) -> Dfg:
    """Random durations of a small model: computation of 10 to 200 us, sends of 10 to 150 us."""
    rng = np.random.default_rng(seed)
    forward, backward, send, update = (
        number * layers * workers + np.arange(layers * workers).reshape(workers, layers)
        for number in range(4)
    )
    chain = np.concatenate([forward, backward[:, ::-1]], axis=1)
    edges = [
        (chain[:, :-1], chain[:, 1:]),
        (backward, send),
        (np.roll(backward, 1, axis=0), send),
        (send, update),
    ]
    worker = np.tile(np.repeat(np.arange(workers), layers), 4)
    kind = np.repeat([Kind.FORWARD, Kind.BACKWARD, Kind.SEND, Kind.UPDATE], layers * workers)
    low, high = np.repeat([[10, 20, 10, 5], [100, 200, 150, 6]], layers * workers, axis=1) * 1e-6
    builder = DfgBuilder()
    for number in range(2 * workers):
        builder.queue(f"queue {number}")
    builder.block(
        4 * layers * workers,
        lambda op: f"op {op}",
        duration_s=rng.uniform(low, high),
        queue=np.where(kind == Kind.SEND, workers + worker, worker),
        kind=kind,
        layer=np.tile(np.arange(layers), 4 * workers),
        worker=worker,
    )
    for parents, children in edges:
        builder.edges(parents, children)
    return builder.build([f"layer {number}" for number in range(layers)])


def heapq_replay(dfg: Dfg) -> Callable[[], float]:
    """The same loop and results over lists, with `heapq`; building the lists is not timed."""
    start, child, queue = dfg.child_start.tolist(), dfg.child.tolist(), dfg.queue.tolist()
    duration_s, parents = dfg.duration_s.tolist(), dfg.parents_left.tolist()

    def run() -> float:
        left, since, ends, cause = (
            parents.copy(),
            [0.0] * dfg.ops,
            [0.0] * dfg.ops,
            [NONE] * dfg.ops,
        )
        clock, last = [0.0] * dfg.queues, [NONE] * dfg.queues
        heap = [(0.0, op) for op in range(dfg.ops) if left[op] == 0]
        while heap:
            now, op = heapq.heappop(heap)
            device = queue[op]
            if clock[device] > now:
                now = clock[device]
                cause[op] = last[device]
            end = now + duration_s[op]
            clock[device], last[device] = end, op
            since[op], ends[op] = now, end
            for edge in range(start[op], start[op + 1]):
                other = child[edge]
                if end > since[other]:
                    since[other], cause[other] = end, op
                left[other] -= 1
                if left[other] == 0:
                    heapq.heappush(heap, (since[other], other))
        return max(ends)

    return run


def simpy_replay(dfg: Dfg) -> Callable[[], float]:
    """One process per queue, which takes ops from its store."""
    start, child, queue = dfg.child_start.tolist(), dfg.child.tolist(), dfg.queue.tolist()
    duration_s, parents = dfg.duration_s.tolist(), dfg.parents_left.tolist()

    def run() -> float:
        world = simpy.Environment()
        stores = [simpy.Store(world) for _ in range(dfg.queues)]
        left = parents.copy()
        end = 0.0

        def serve(store: simpy.Store):  # type: ignore[no-untyped-def]
            nonlocal end
            while True:
                op = yield store.get()
                yield world.timeout(duration_s[op])
                end = world.now
                for edge in range(start[op], start[op + 1]):
                    left[child[edge]] -= 1
                    if left[child[edge]] == 0:
                        stores[queue[child[edge]]].put(child[edge])

        for op in range(dfg.ops):
            if left[op] == 0:
                stores[queue[op]].put(op)
        for store in stores:
            world.process(serve(store))
        world.run()
        return end

    return run


def networkx_longest_path(dfg: Dfg) -> Callable[[], float]:
    """The longest path without queues, an easier question; building the graph is not timed."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(dfg.ops))
    origin = np.repeat(np.arange(dfg.ops), np.diff(dfg.child_start))
    graph.add_weighted_edges_from(
        zip(origin.tolist(), dfg.child.tolist(), dfg.duration_s[origin].tolist(), strict=True)
    )
    return lambda: float(networkx.dag_longest_path_length(graph))


def median_s(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def spread(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [float(value) for value in np.percentile(values, [25, 50, 75])]


def measure(layers: int, workers: int, rounds: int) -> dict[str, object]:
    """Times of all engines on one graph, interleaved."""
    dfg = data_parallel(layers, workers)
    timeline = replay(dfg)
    order = FixedOrder(timeline)
    rng = np.random.default_rng(1)
    columns = (dfg.duration_s[:, None] * rng.uniform(0.9, 1.1, (dfg.ops, SETS))).astype(np.float32)
    local = IncrementalReplay(dfg)
    changed = rng.integers(0, dfg.ops, 1000)
    number = iter(np.tile(changed, 1000).tolist())
    fast: dict[str, Callable[[], object]] = {
        "replay": lambda: replay(dfg),
        "batched": lambda: order.makespans_s(columns.T),
        "incremental": lambda: local.replay_changed(np.array([next(number)]), np.array([1e-4])),
    }
    slow: dict[str, Callable[[], float]] = {"heapq": heapq_replay(dfg)}
    if dfg.ops <= RIVALS_UP_TO:
        slow |= {"simpy": simpy_replay(dfg), "networkx": networkx_longest_path(dfg)}
    assert np.isclose(slow["heapq"](), timeline.makespan_s)
    assert np.allclose(
        order.makespans_s(np.tile(dfg.duration_s, (SETS, 1))), timeline.makespan_s, rtol=1e-5
    )
    for call in fast.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in (*fast, *slow)}
    for number_of_round in range(rounds):
        for name, call in fast.items():
            times[name].append(median_s(call, CALLS))
        for name, rival in slow.items():
            times[name].append(median_s(rival, 1))
        print(f"{dfg.ops} ops: round {number_of_round + 1} of {rounds}", file=sys.stderr)
    rates = {
        name: spread([dfg.ops / seconds for seconds in values]) for name, values in times.items()
    }
    rates["batched"] = [rate * SETS for rate in rates["batched"]]
    ratios = {
        name: spread(
            [other / ours for other, ours in zip(times[name], times["replay"], strict=True)]
        )
        for name in (*slow, "incremental")
    }
    return {"ops": dfg.ops, "edges": dfg.edges, "per_s": rates, "time_over_replay": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--largest", action="store_true", help="also the graph of half a million ops"
    )
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(f"{platform.machine()}, 1 of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    results = [measure(*size, options.rounds) for size in SIZES[: 3 if options.largest else 2]]
    for result in results:
        print(
            f"\n{result['ops']} ops, {result['edges']} edges: "
            "quartiles of ops per second; time by that of replay"
        )
        for name, rate in result["per_s"].items():  # type: ignore[attr-defined]
            ratio = result["time_over_replay"].get(name)  # type: ignore[attr-defined]
            suffix = "" if ratio is None else "   " + "  ".join(f"{value:8.2f}" for value in ratio)
            print(f"{name:12}" + "  ".join(f"{value / 1e6:10.3f} M" for value in rate) + suffix)
    first, folded = results[0], costs()
    print("\nequal workers, CPU time", *table(folded), sep="\n")
    print(
        json.dumps(
            {
                "events_per_s": first["per_s"]["replay"][1],  # type: ignore[index]
                "batched_evals_per_s": first["per_s"]["batched"][1],  # type: ignore[index]
                "ratio_to_heapq": first["time_over_replay"]["heapq"][1],  # type: ignore[index]
                "ratio_to_simpy": first["time_over_replay"]["simpy"][1],  # type: ignore[index]
                "ratio_to_networkx": first["time_over_replay"]["networkx"][1],  # type: ignore[index]
                "batched_sets": SETS,
                "rounds": options.rounds,
                "counted": (
                    "events: ops whose start, end and cause one call of replay(dfg) gives, "
                    "everything in the call included, the validation of the graph not; "
                    "batched: ops times sets of one call of FixedOrder.makespans_s on float32 "
                    "columns, the check of the durations included, the execution graph not; "
                    "medians over rounds, quartiles in `sizes`"
                ),
                "workers": [asdict(cost) for cost in folded],
                "sizes": results,
            }
        )
    )


if __name__ == "__main__":
    main()
