"""The rewritten TensorFlow graph trains as one device with averaged gradients does."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

from synthetic_cluster import cluster
from tensorflow_programs import (
    Batch,
    Program,
    averaged_steps,
    batches_of,
    collaborative_filtering,
    rewritten_steps,
    small_resnet,
    small_transformer,
)

from autotune.strategy_space.builders.registry import BUILDERS
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Strategy
from runtime_rewriter.tensorflow.distributed_graph import DistributedGraph
from runtime_rewriter.tensorflow.graph_workload import workload_of

REPLICAS = 4
CLUSTER = cluster(*[(1, 1000.0)] * REPLICAS)
STEPS = 5
TOLERANCE = 1e-5


def assert_close(found: Batch, expected: Batch, tolerance: float) -> None:
    """Compare each variable: at most `tolerance` of the largest value of the expected one."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(float(np.abs(value).max(initial=0)), 1e-3)
        error = float(np.abs(found[name] - value).max(initial=0)) / scale
        assert error <= tolerance, f"{name} differs by {error:.2g}"


@pytest.fixture(scope="module", params=[small_resnet, small_transformer, collaborative_filtering])
def trained(request):
    return Trained(request.param())


class Trained:
    """A program, and what one device makes of five steps with averaged gradients."""

    def __init__(self, program: Program) -> None:
        self.program, self.training = program, program.capture()
        self.start = {name: one.numpy() for name, one in program.variables.items()}
        self.batches = batches_of(program, 8 * REPLICAS, STEPS)
        self.expected = averaged_steps(program, self.batches, REPLICAS)
        self.workload = workload_of(self.training, "model")

    def assert_trains_exactly(self, strategy: Strategy) -> DistributedGraph:
        """Compare parameters, optimizer slots, statistics and seeds after five steps."""
        planned = plan(strategy, self.workload, REPLICAS)
        graph, found = rewritten_steps(self.training, planned, self.batches, self.start)
        assert_close(found, self.expected, TOLERANCE)
        return graph


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce_chunks_8",
        "reduce_scatter_all_gather_25mib",
        "random_axis_partitioned_all_reduce",
        "parallax",
        "ps_round_robin",
        "uneven_partitioned_ps",
    ],
)
def test_five_steps_equal_those_of_one_device(trained, name):
    strategy = BUILDERS[name](trained.workload, CLUSTER)
    trained.assert_trains_exactly(strategy)
    rows = with_rows(strategy, trained.workload)
    if rows != strategy:
        trained.assert_trains_exactly(rows)
