"""One rank: `python -m benchmarks.tensorflow_ranks.rank JOB.json RANK`.

Every rank serves. Rank 0 is the client: it runs the cases of the job one after the other, each the
plan of one graph, and writes `case<i>/` with a recording and `results.json`. The ranks run
round-robin if that is permitted, as those of an emulated accelerator do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3", no_proxy="*")

import tensorflow as tf

from autotune.canonical import to_data
from autotune.strategy_space.plan import Plan
from benchmarks.tensorflow_ranks.layers import TimedLayer
from benchmarks.tensorflow_ranks.start import PROBED, RESULTS
from benchmarks.tensorflow_ranks.timed_model import timed_training
from runtime_rewriter.probe.tensorflow_collectives import probe_tensorflow
from runtime_rewriter.scheduling import take_round_robin
from runtime_rewriter.tensorflow.checkpoints import scatter
from runtime_rewriter.tensorflow.distribute import distribute
from runtime_rewriter.tensorflow.recording.recorder import record_steps
from runtime_rewriter.tensorflow.recording.replicas import replicated, trained_variables
from runtime_rewriter.tensorflow.running import RunningGraph
from runtime_rewriter.tensorflow.training_graph import TrainingGraph

v1 = tf.compat.v1

LEADER = "/job:worker/replica:0/task:0"
THREADS = 8
STEP_TIMEOUT_MS = 60_000


def config() -> Any:
    """The configuration of servers and sessions: nothing but the plan moves nodes."""
    settings = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=THREADS)
    settings.experimental.collective_group_leader = LEADER
    settings.graph_options.optimizer_options.opt_level = -1
    settings.graph_options.rewrite_options.disable_meta_optimizer = True
    settings.operation_timeout_in_ms = STEP_TIMEOUT_MS
    return settings


def run_case(
    training: TrainingGraph, case: Mapping[str, Any], job: Mapping[str, Any], key: int, target: str
) -> tuple[dict[str, Any], int]:
    """Run and record one plan; return its times and the next free collective key."""
    devices = devices_of(job)
    graph = distribute(training, Plan.from_json(case["plan"]), devices, key)
    with tf.Graph().as_default() as built:
        tf.graph_util.import_graph_def(graph.graph_def, name="")
        with v1.Session(target, graph=built, config=config()) as session:
            scatter(session, graph, graph.initial)

            def run(options: Any, metadata: Any) -> None:
                session.run(list(graph.targets), options=options, run_metadata=metadata)

            records = record_steps(run, steps=case["steps"], warmup=case["warmup"])
    hosts = {f"/job:worker/replica:0/task:{rank}": host for rank, host in enumerate(job["hosts"])}
    folder = Path(job["folder"]) / case["name"]
    trained = replicated(training, len(devices))
    records.write(folder, trained, trained_variables(training), hosts)
    return {"plain_s": records.plain_s, "recorded_s": records.recorded_s}, graph.next_key


@dataclass(frozen=True)
class Servers:
    """What a `RunningGraph` connects to."""

    target: str
    devices: tuple[str, ...]
    hosts: tuple[tuple[int, ...], ...] = ()

    @property
    def config(self) -> Any:
        return config()


def probe(training: TrainingGraph, job: Mapping[str, Any], key: int, target: str) -> None:
    """Time the exchanges of the plans, as `autotune tune` does before its first trial."""
    servers = Servers(target, devices_of(job))
    running = RunningGraph(training, servers, STEP_TIMEOUT_MS / 1e3, first_key=key)
    per_host = tuple(Counter(job["hosts"]).values())
    largest = sum(4 * one.size for one in training.initial.values())
    series = probe_tensorflow(running, job["probe_s"], per_host, largest)
    (Path(job["folder"]) / PROBED).write_text(json.dumps(to_data(series)))


def devices_of(job: Mapping[str, Any]) -> tuple[str, ...]:
    ranks = range(len(job["addresses"]))
    return tuple(f"/job:worker/replica:0/task:{rank}/device:CPU:0" for rank in ranks)


def main() -> int:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    take_round_robin()
    cluster = tf.train.ClusterSpec({"worker": job["addresses"]})
    server = tf.distribute.Server(cluster, job_name="worker", task_index=rank, config=config())
    done = Path(job["folder"]) / RESULTS
    if rank > 0:
        while not done.exists():
            time.sleep(0.5)
        os._exit(0)  # a server has no end of its own
    results, key = {}, 1
    trainings: dict[str, TrainingGraph] = {}
    for case in job["cases"]:
        layers = [TimedLayer(**layer) for layer in job["models"][case["model"]]]
        if case["model"] not in trainings:
            trainings[case["model"]] = timed_training(layers)
        results[case["name"]], key = run_case(
            trainings[case["model"]], case, job, key, server.target
        )
    if job["probe_s"]:
        training = next(iter(trainings.values()))
        probe(training, job, key, server.target)
    partial = done.with_suffix(".partial")
    partial.write_text(json.dumps(results))
    partial.replace(done)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
