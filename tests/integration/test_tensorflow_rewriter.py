"""The rewritten TensorFlow graph trains as one device with averaged gradients does."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

from tensorflow_programs import (
    Batch,
    averaged_steps,
    batches_of,
    collaborative_filtering,
    rewritten_steps,
    small_resnet,
    small_transformer,
)

from autotune.strategy_space.builders import collectives
from autotune.strategy_space.plan import plan
from runtime_rewriter.tensorflow.graph_workload import workload_of

STEPS = 5
TOLERANCE = 1e-5


def assert_close(found: Batch, expected: Batch, tolerance: float) -> None:
    """Compare each variable: at most `tolerance` of the largest value of the expected one."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(float(np.abs(value).max(initial=0)), 1e-3)
        error = float(np.abs(found[name] - value).max(initial=0)) / scale
        assert error <= tolerance, f"{name} differs by {error:.2g}"


@pytest.mark.parametrize("make", [small_resnet, small_transformer, collaborative_filtering])
@pytest.mark.parametrize("replicas", [2, 4])
def test_five_steps_equal_those_of_one_device(make, replicas):
    program = make()
    training = program.capture()
    workload = workload_of(training, make.__name__)
    batches = batches_of(program, 8 * replicas, STEPS)
    start = {name: one.numpy() for name, one in program.variables.items()}
    strategy = collectives.all_reduce_chunks(workload, 4)
    _, found = rewritten_steps(training, plan(strategy, workload, replicas), batches, start)
    expected = averaged_steps(program, batches, replicas)
    assert_close(found, expected, TOLERANCE)
