"""One worker: `python -m benchmarks.mirrored_ranks.rank JOB.json`, with `TF_CONFIG` of `start`.

It writes `rank<r>.json`: seconds of the steps of each case. Then it serves the other workers until
its stdin ends. It runs round-robin if that is permitted, as ranks of emulated accelerators do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3", no_proxy="*")

import numpy as np
import tensorflow as tf

from autotune.files import write_whole
from autotune.workload import Workload
from benchmarks.mirrored_ranks.start import result_file
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.scheduling import take_round_robin
from runtime_rewriter.tensorflow.emulation import waited

THREADS = 8


def timed_step(strategy: Any, workload: Workload) -> Callable[[int], Any]:
    """Return a builder of steps: bytes per message -> a `tf.function` of one step.

    Computation is timed waits, counted from the start of each pass. The gradients are real tensors,
    and a script hands them over in the order of its variables, as here.
    """
    table = timetable_of(workload)
    random = np.random.default_rng(0)
    with strategy.scope():
        held = {
            one.name: tf.Variable(1e-3 * random.normal(size=one.shape).astype(np.float32))
            for one in workload.variables
        }

    def replica_step(options: Any) -> Any:
        start = tf.timestamp()
        before, _ = waited(start, table.forward_s)
        gradients: dict[str, Any] = {}
        for ready_s, group in groupby(table.ready, key=lambda pair: pair[1]):
            with tf.control_dependencies([before]):
                before, _ = waited(start, table.forward_s + ready_s)
            with tf.control_dependencies([before]):
                gradients |= {name: tf.identity(held[name]) for name, _ in group}
        with tf.control_dependencies([before]):
            computed, _ = waited(start, table.forward_s + table.backward_s)
        in_program_order = [gradients[one.name] for one in reversed(workload.variables)]
        sums = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, in_program_order, options
        )
        with tf.control_dependencies([computed, *sums]):
            arrived = tf.timestamp()
        return waited(arrived, table.update_s)[0]

    def build(bytes_per_pack: int) -> Any:
        options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=bytes_per_pack,
            implementation=tf.distribute.experimental.CommunicationImplementation.RING,
        )
        return tf.function(lambda: strategy.run(replica_step, args=(options,)))

    return build


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    take_round_robin()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    build = timed_step(strategy, Workload.from_data(job["workload"]))
    steps: dict[int, Any] = {}
    results = []
    for case in job["cases"]:
        size = case["bytes_per_pack"]
        if size not in steps:
            steps[size] = build(size)
            steps[size]()  # traces
        begins_s = []
        for _ in range(case["warmup"] + case["steps"] + 1):
            begins_s.append(time.perf_counter())
            steps[size]()
        times_s = [after - before for before, after in pairwise(begins_s)]
        results.append(times_s[case["warmup"] :])
    write_whole(result_file(Path(job["folder"]), rank), json.dumps(results), "a worker's times")
    # Others may still receive its last sums, or wait for the coordination service of the first one.
    sys.stdin.read()
    os._exit(0)  # the server of a worker has no end of its own


if __name__ == "__main__":
    main()
