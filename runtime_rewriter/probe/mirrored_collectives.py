"""Times the collectives of a script of MultiWorkerMirroredStrategy between all of its workers.

Every worker runs this with its own client. What they decide by was gathered from all of them, and
their clock is the first worker's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from autotune.cluster import Where
from autotune.recordings.probe import ProbeSeries
from runtime_rewriter.mirrored.script_sums import ScriptSums
from runtime_rewriter.probe.collectives import REST_S
from runtime_rewriter.probe.repeated_points import (
    RepeatedPoints,
    Report,
    Runs,
    probed_sizes,
    series_of,
)
from runtime_rewriter.probe.tensorflow_exchanges import ELEMENT_BYTES, PAUSE_S
from runtime_rewriter.tensorflow.emulation import waited

PRIMITIVES = ("all_reduce", "all_gather")
Exchange = Callable[[], Any]
"""A function of TensorFlow that returns the seconds of this worker."""


def probe_mirrored(
    script_sums: ScriptSums, budget_s: float, largest_bytes: int, report: Report
) -> tuple[ProbeSeries, ...]:
    """Time all-reduces and gathers of sizes up to `largest_bytes`, for about `budget_s`.

    Collective over all workers; the same series on each.
    """
    workers = [f"worker {worker}" for worker in range(script_sums.world_size)]
    points = RepeatedPoints(_WorkersExchanges(script_sums), budget_s, report)
    points.run_pass(series_of(Where.WORLD, [workers], PRIMITIVES), probed_sizes(largest_bytes), 0.9)
    points.repair(1.0)
    return points.measured()


class _WorkersExchanges:
    """Implements `Exchanges`. CPU time is the mean over all workers."""

    def __init__(self, script_sums: ScriptSums) -> None:
        self._script, self._world_size = script_sums, script_sums.world_size
        self._gathered = tf.function(self._gather, autograph=False)
        self._now_s = 0.0
        self._share([])

    def now_s(self) -> float:
        return self._now_s

    def added(
        self, primitive: str | None, groups: tuple[tuple[str, ...], ...], size_bytes: int
    ) -> Exchange:
        elements = max(size_bytes // ELEMENT_BYTES // self._world_size, 1)
        sent = elements if primitive == "all_gather" else elements * self._world_size
        exchange: Exchange = tf.function(lambda: self._timed(primitive, sent), autograph=False)
        return exchange

    def run(self, exchange: Exchange, repeats: int) -> Runs:
        seconds, cpu_s = [], 0.0
        exchange()  # traces, or finds the others once more
        for _ in range(repeats):
            before_s = time.process_time()
            seconds.append(float(exchange()))
            time.sleep(REST_S)
            cpu_s += time.process_time() - before_s
        of_workers = self._share([cpu_s, *seconds])
        return Runs(of_workers[:, 1:].max(0).tolist(), float(of_workers[:, 0].mean()))

    def mean_cpu(self, primitive: str, members: int) -> float:
        return 1.0

    def _timed(self, primitive: str | None, elements: int) -> Any:
        launcher, options = self._script.launcher, self._script.options
        sent = tf.zeros([elements])
        with tf.control_dependencies([sent]):
            met = launcher.all_reduce(tf.zeros([1]), None, options)
        with tf.control_dependencies([met]):
            now = tf.timestamp()
        begin, _ = waited(now, PAUSE_S)
        with tf.control_dependencies([begin]):
            start = tf.timestamp()
        with tf.control_dependencies([start]):
            received = tf.identity(sent)
            if primitive == "all_reduce":
                received = launcher.all_reduce(received, None, options)
            elif primitive == "all_gather":
                received = launcher._all_gather(received, options)
        with tf.control_dependencies([received]):
            return tf.timestamp() - start

    def _share(self, figures: list[float]) -> np.ndarray:
        """Gather the figures of all workers, shape (W, number); set the clock."""
        row = np.array([[time.perf_counter(), *figures]])
        of_workers: np.ndarray = self._gathered(tf.constant(row, tf.float64)).numpy()
        self._now_s = float(of_workers[0, 0])
        return of_workers[:, 1:]

    def _gather(self, row: Any) -> Any:
        return self._script.launcher._all_gather(row, self._script.options)
