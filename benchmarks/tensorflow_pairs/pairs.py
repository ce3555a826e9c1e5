"""Checks and trainings of single pairs, each of which runs in a process of its own.

TensorFlow loads when a function runs, after the process has its environment.
"""

from __future__ import annotations

import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

WORLD = 2
STEPS, ROWS, SEED = 2, 4, 7
STEP_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Outcome:
    """`error`: nothing if the pair passed. `splits`: whether a client per rank has whole graphs."""

    pair: str
    error: str
    splits: bool = False


def own_peak_mib() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _print_peak(stage: str) -> None:
    print(f"  {stage}: {own_peak_mib()} MiB", file=sys.stderr, flush=True)


def checked(model: str) -> list[Outcome]:
    """Check each builder's plans for a model."""
    from autotune.strategy_space.builders.registry import BUILDERS
    from autotune.strategy_space.builders.rows import with_rows
    from autotune.strategy_space.plan import plan
    from benchmarks.tensorflow_pairs.synchronized_once import (
        assert_each_gradient_is_synchronized_once,
        splits_into_clients,
    )
    from benchmarks.tensorflow_pairs.table_models import training_graph
    from runtime_rewriter.tensorflow.distribute import distribute
    from runtime_rewriter.tensorflow.graph_workload import workload_of

    training = training_graph(model)
    workload = workload_of(training, model)
    devices = [f"/device:CPU:{rank}" for rank in range(WORLD)]
    outcomes = []
    for name, build in BUILDERS.items():
        strategy = build(workload, _cluster())
        if strategy.cross_step:  # refused by name
            continue
        error, splits = "", True
        try:
            for variant in dict.fromkeys((strategy, with_rows(strategy, workload))):
                graph = distribute(training, plan(variant, workload, WORLD), devices)
                assert_each_gradient_is_synchronized_once(graph, training)
                splits &= splits_into_clients(graph)
        except Exception as problem:  # noqa: BLE001 - every pair counts
            error = f"{type(problem).__name__}: {problem}"
        outcomes.append(Outcome(f"{model} x {name}", error, splits))
    return outcomes


def trained(pair: tuple[str, str]) -> list[Outcome]:
    """Train a pair on two servers."""
    from runtime_rewriter.private_network import new_network_namespace

    model, builder = pair
    with ThreadPoolExecutor(1, initializer=new_network_namespace) as isolated:
        try:
            isolated.submit(_train, model, builder).result()
        except Exception as problem:  # noqa: BLE001 - every pair counts
            return [Outcome(f"{model} x {builder}", f"{type(problem).__name__}: {problem}")]
    return [Outcome(f"{model} x {builder}", "")]


def _train(model: str, builder: str) -> None:
    import numpy as np

    from autotune.strategy_space.builders.registry import BUILDERS
    from autotune.strategy_space.plan import plan
    from benchmarks.tensorflow_pairs.table_models import LABELS, TABLE, started, training_graph
    from benchmarks.tensorflow_pairs.two_servers import TwoServers
    from runtime_rewriter.tensorflow.graph_workload import workload_of
    from runtime_rewriter.tensorflow.running import RunningGraph

    training = started(training_graph(model), SEED)
    workload = workload_of(training, model)
    _print_peak(f"captured, with {workload.grad_bytes / 2**20:.0f} MiB of gradients")
    running = RunningGraph(training, TwoServers(), STEP_TIMEOUT_S)
    running.load(plan(BUILDERS[builder](workload, _cluster()), workload, WORLD))
    _print_peak("variables on the servers")
    before = dict(running.values())
    _print_peak("values fetched")
    for step in range(STEPS):
        batch = TABLE[model][1].batch(ROWS, SEED + step)
        assert LABELS in batch
        gate = running.gate()
        (loss,), found = running.observed_step(batch, None, gate.fetches)
        gate.take(found)
        result = gate.error()
        assert result.ok, f"step {step}: {result}"
        assert np.isfinite(loss), f"step {step}: the loss is {loss}"
        _print_peak(f"step {step}, with the gate")
    after = running.values()
    same = [one.variable for one in training.gradients if not _moved(before, after, one.variable)]
    assert not same, f"no step has changed {same[:3]}"
    running.close()


def _moved(before: Any, after: Any, name: str) -> bool:
    return bool((before[name] != after[name]).any())


def _cluster() -> Any:
    from autotune.cluster import Cluster

    return Cluster.local(WORLD)
