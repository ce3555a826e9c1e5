"""The link probe by TensorFlow's own exchanges, on two servers of this process."""

from __future__ import annotations

import pytest
from isolated_servers import WAIT_S, isolated

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

from types import SimpleNamespace
from typing import Any

import numpy as np
from keras.optimizers import SGD
from tensorflow_programs import batches_of, two_layers, two_servers

from autotune.cluster import Cluster, Where
from autotune.profiling.fits.probe_fits import collective_fits
from autotune.recordings.probe import ProbeSeries
from autotune.strategy_space.builders.collectives import single_bucket
from autotune.strategy_space.plan import plan
from runtime_rewriter.probe.repeated_points import probed_sizes
from runtime_rewriter.probe.tensorflow_collectives import probe_tensorflow
from runtime_rewriter.probe.tensorflow_exchanges import (
    PAUSE_S,
    TENSORFLOW_OPERATIONS,
    mean_by_root,
    timed_exchange,
)
from runtime_rewriter.tensorflow.graph_workload import workload_of
from runtime_rewriter.tensorflow.running import RunningGraph
from runtime_rewriter.tensorflow.servers import JOB, session_config

BUDGET_S = 60.0
"""Far more than the seconds that it takes: on a busy machine, too, no point is left out."""


def probe_between_steps() -> tuple[tuple[ProbeSeries, ...], list[str], float]:
    """Train, probe and train on; return also how far apart the updates of both steps are."""
    servers = two_servers()
    devices = tuple(f"/job:{JOB}/replica:0/task:{rank}/device:CPU:0" for rank in range(2))
    target: Any = SimpleNamespace(
        target=servers[0].target, devices=devices, config=session_config(), hosts=()
    )
    program = two_layers(SGD(0.0))  # steps change nothing, so both give the same loss
    running = RunningGraph(program.capture(), target, 60.0)
    workload = workload_of(running.training, "model")
    running.load(plan(single_bucket(workload), workload, 2))
    (batch,) = batches_of(program, 8, 1)
    (before,) = running.step(batch)
    reports: list[str] = []
    series = probe_tensorflow(running, BUDGET_S, (1, 1), 2**18, reports.append)
    running.load(plan(single_bucket(workload), workload, 2))
    (after,) = running.step(batch)
    running.close()
    return series, reports, float(np.abs(before - after).max())


def test_every_exchange_is_timed_between_two_steps_of_training() -> None:
    series, reports, difference = isolated().submit(probe_between_steps).result(WAIT_S)
    assert difference == 0.0
    assert {(one.primitive, one.group_size, one.where) for one in series} == {
        (name, 2, Where.WORLD) for name in TENSORFLOW_OPERATIONS
    }
    fits = collective_fits(series)
    assert len(fits) == len(TENSORFLOW_OPERATIONS)
    for fit in fits:
        assert fit.smallest_bytes < fit.largest_bytes and fit.seconds(2.0**18) > 0
    assert Cluster.local(2).with_fits(fits).fit("push_pull", 2) is not None
    assert "push_pull on 2 ranks, 65536 bytes" in reports


def test_sizes_end_at_the_largest_message() -> None:
    assert probed_sizes(10_700_000) == (4096, 65536, 1048576, 10_700_000)
    assert len(probed_sizes(100)) == 3


def test_groups_that_exchange_at_once_have_keys_of_their_own() -> None:
    groups = [("/device:CPU:0", "/device:CPU:1"), ("/device:CPU:2", "/device:CPU:3")]
    exchange = timed_exchange("scope", "all_reduce", groups, 4096, 7)
    keys: dict[str, set[int]] = {"group_key": set(), "instance_key": set()}
    for node in exchange.graph_def.node:
        kind = node.name.rpartition("/")[2]
        if kind in keys:
            keys[kind].add(node.attr["value"].tensor.int_val[0])
    assert keys == {"group_key": {7, 9}, "instance_key": {8, 10}} or len(keys["group_key"]) == 2
    assert keys["group_key"].isdisjoint(keys["instance_key"]) and exchange.next_key == 11
    assert len(exchange.spans) == 4


def test_members_pause_between_the_signal_and_the_start() -> None:
    """Without the pause, the signal to the last member waited behind what the first one sends.

    Then that member began late by the time of the first one's tensors, and all others with it.
    """
    devices = ("/device:CPU:0", "/device:CPU:1", "/device:CPU:2")
    exchange = timed_exchange("scope", "reduce_scatter_all_gather", [devices], 4096, 1)
    nodes = {node.name: node for node in exchange.graph_def.node}
    for start, _ in exchange.spans:
        (cause,) = nodes[start.removesuffix(":0")].input
        waiting = nodes[nodes[cause.removeprefix("^")].input[0]]
        pause_us = nodes[waiting.input[1]].attr["value"].tensor.int64_val[0]
        assert waiting.op == "SleepDataset"
        assert pause_us * 2 == pytest.approx(PAUSE_S * 1e6)


def test_the_work_of_a_star_is_that_of_all_transfers() -> None:
    for members in (2, 4, 8):
        assert mean_by_root("push_pull", members) * members == 2
        assert mean_by_root("all_reduce", members) == 1
    assert mean_by_root("broadcast", 4) == 0.75
