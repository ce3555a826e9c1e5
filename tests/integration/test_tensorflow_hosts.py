"""Hierarchical messages between servers of two hosts with two devices each."""

from __future__ import annotations

import pytest
from isolated_servers import WAIT_S, isolated

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from keras.optimizers import Adam
from tensorflow_programs import (
    Batch,
    Program,
    averaged_steps,
    batches_of,
    collaborative_filtering,
    two_layers,
)

from autotune.cluster import Cluster
from autotune.strategy_space.builders.registry import BUILDERS
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import SparseHandling
from runtime_rewriter.tensorflow.graph_workload import workload_of
from runtime_rewriter.tensorflow.running import RunningGraph
from runtime_rewriter.tensorflow.servers import JOB, reserved_port, session_config

HOSTS = ((0, 1), (2, 3))
RANKS, STEPS, TOLERANCE = 4, 5, 1e-5
BUILT = ("all_reduce_chunks_8", "reduce_scatter_all_gather_25mib", "ps_round_robin", "zero2_like")


class TwoHosts:
    """Implements `Target`: two servers of this process, each with two virtual CPU devices."""

    hosts = HOSTS
    devices = tuple(
        f"/job:{JOB}/replica:0/task:{task}/device:CPU:{device}"
        for task in range(2)
        for device in range(2)
    )

    def __init__(self) -> None:
        with reserved_port() as first, reserved_port() as second:
            addresses = [f"127.0.0.1:{port}" for port in (first, second)]
        cluster = tf.train.ClusterSpec({JOB: addresses})
        self._own = [
            tf.distribute.Server(cluster, job_name=JOB, task_index=task, config=self.config)
            for task in range(2)
        ]

    @property
    def target(self) -> str:
        target: str = self._own[0].target
        return target

    @property
    def config(self) -> Any:
        config = session_config()
        config.device_count["CPU"] = 2
        return config


def hierarchical(name: str, workload: Any) -> Plan:
    """A builder's plan with rows, and with every dense message in two levels."""
    built = with_rows(BUILDERS[name](workload, Cluster.local(RANKS)), workload)
    flat = plan(built, workload, RANKS)
    return replace(
        flat,
        messages=tuple(
            replace(one, hierarchical=one.sparse is SparseHandling.DENSE) for one in flat.messages
        ),
    )


def between_hosts(running: RunningGraph) -> set[tuple[int, int]]:
    """Pairs of ranks on two hosts, the first of which sends the other a part of a dense message."""
    assert running.graph is not None
    nodes = {node.name: node for node in running.graph.graph_def.node}
    rank_of = {device: rank for rank, device in enumerate(running.graph.devices)}
    of_collectives: dict[str, set[int]] = {}
    pairs = set()
    for node in nodes.values():
        if not node.name.startswith("autotune/message_"):
            continue
        to, message = rank_of[node.device], node.name.split("/")[1]
        if not running.graph.plan.messages[int(message.removeprefix("message_"))].hierarchical:
            continue
        if node.op.startswith("Collective"):
            of_collectives.setdefault(message, set()).add(to)
        sources = (nodes[name.partition(":")[0]] for name in node.input if name[0] != "^")
        pairs |= {(rank_of[source.device], to) for source in sources}
    pairs |= {(one, other) for ranks in of_collectives.values() for one in ranks for other in ranks}
    return {(one, other) for one, other in pairs if one // 2 != other // 2}


def trained(program: Program) -> dict[str, tuple[Batch, set[tuple[int, int]]]]:
    """By builder: all variables after the steps, and who sends between the hosts."""
    training = program.capture()
    workload = workload_of(training, "model")
    start = {name: np.array(one.numpy()) for name, one in program.variables.items()}
    batches = batches_of(program, 4 * RANKS, STEPS)
    running = RunningGraph(training, TwoHosts(), WAIT_S)
    found = {}
    for name in BUILT:
        running.load(hierarchical(name, workload))
        running.send(start)
        for batch in batches:
            running.step(batch)
        found[name] = dict(running.values()), between_hosts(running)
    running.close()
    return found


@pytest.mark.parametrize("make", [lambda: two_layers(Adam(1e-2)), collaborative_filtering])
def test_steps_on_two_hosts_of_two_devices_equal_those_of_one_device(make) -> None:
    program = make()
    found = isolated().submit(trained, program).result(2 * WAIT_S)
    expected = averaged_steps(program, batches_of(program, 4 * RANKS, STEPS), RANKS)
    for name, (values, senders) in found.items():
        for variable, value in expected.items():
            scale = max(float(np.abs(value).max(initial=0)), 1e-3)
            error = float(np.abs(values[variable] - value).max(initial=0)) / scale
            assert error <= TOLERANCE, f"{name}: {variable} differs by {error:.2g}"
        assert senders, name
        leaders = {rank for pair in senders for rank in pair}
        # one rank per host for each message; a server's owner leads its host
        assert leaders == {0, 2} or name in ("ps_round_robin", "zero2_like"), (name, senders)
