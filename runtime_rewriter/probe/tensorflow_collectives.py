"""Times TensorFlow's exchanges on the real links before a job's first trial.

The client of rank 0 measures for all ranks: servers note the times within the graph. It repeats an
exchange until its share of the time is spent, and those once more that look disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from autotune.cluster import Where
from autotune.recordings.probe import ProbeSeries
from runtime_rewriter.probe.collectives import REST_S
from runtime_rewriter.probe.groups import members_of
from runtime_rewriter.probe.repeated_points import (
    RepeatedPoints,
    Report,
    Runs,
    probed_sizes,
    series_of,
)
from runtime_rewriter.probe.tensorflow_exchanges import (
    ON_OTHER_GROUPS,
    TENSORFLOW_OPERATIONS,
    TimedExchange,
    mean_by_root,
    timed_exchange,
)
from runtime_rewriter.tensorflow.collectives import Keys
from runtime_rewriter.tensorflow.running import RunningGraph, translated_errors

v1 = tf.compat.v1

MARGIN_S = 60.0
"""A probe that takes so much longer than its time is stuck."""


def probe_tensorflow(
    running: RunningGraph,
    budget_s: float,
    devices_per_host: tuple[int, ...],
    largest_bytes: int,
    report: Report = lambda description: None,
) -> tuple[ProbeSeries, ...]:
    """Time each exchange at sizes up to `largest_bytes`, for about `budget_s`.

    It leaves out sizes whose time the last two tell. `devices_per_host`: ranks per host, in rank
    order. Raises `SynchronizationError` if an exchange does not end.
    """
    devices = running.servers.devices
    everyone = series_of(Where.WORLD, [devices], TENSORFLOW_OPERATIONS)
    others = [
        one
        for (where, _), groups in members_of(len(devices), devices_per_host).items()
        for one in series_of(
            where, [[devices[rank] for rank in group] for group in groups], ON_OTHER_GROUPS
        )
    ]
    sizes = probed_sizes(largest_bytes)
    with _exchanges(running, budget_s) as exchanges:
        prober = RepeatedPoints(exchanges, budget_s, report)
        prober.run_pass(everyone, sizes, 0.75)
        prober.run_pass(others, sizes, 0.9)
        prober.repair(1.0)
        return prober.measured()


@contextmanager
def _exchanges(running: RunningGraph, budget_s: float) -> Iterator[_ServersExchanges]:
    with running.further_keys() as keys, tf.Graph().as_default() as graph:
        session = v1.Session(running.servers.target, graph=graph, config=running.servers.config)
        with session, translated_errors():
            yield _ServersExchanges(session, graph, keys, budget_s)


class _ServersExchanges:
    """Implements `Exchanges`. CPU time is that of this process."""

    def __init__(self, session: Any, graph: Any, keys: Keys, budget_s: float) -> None:
        self._session, self._graph, self._keys = session, graph, keys
        self._options = v1.RunOptions(timeout_in_ms=int(1e3 * (budget_s + MARGIN_S)))
        self._count = 0

    def now_s(self) -> float:
        return time.perf_counter()

    def added(
        self, primitive: str | None, groups: tuple[tuple[str, ...], ...], size_bytes: int
    ) -> TimedExchange:
        self._count += 1
        scope = f"exchange_{self._count}"
        exchange = timed_exchange(scope, primitive, groups, size_bytes, self._keys.next_key)
        self._keys.next_key = exchange.next_key
        with self._graph.as_default():
            tf.graph_util.import_graph_def(exchange.graph_def, name="")
        return exchange

    def run(self, exchange: TimedExchange, repeats: int) -> Runs:
        runs = Runs()
        for _ in range(repeats):
            before_s = time.process_time()
            spans = self._session.run(list(exchange.spans), options=self._options)
            time.sleep(REST_S)
            runs.cpu_s += time.process_time() - before_s
            runs.seconds.append(max(float(end_s - start_s) for start_s, end_s in spans))
        return runs

    def mean_cpu(self, primitive: str, members: int) -> float:
        return mean_by_root(primitive, members)
