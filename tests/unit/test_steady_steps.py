"""Steady steps of a plan: as long as the predicted step, with what runs into the next one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_lowered_graph import CPU, FOUR, GPU, probed

from autotune.lowering.lower import Lowering
from autotune.lowering.steady import steady_steps
from autotune.strategy_space.builders.collectives import bucketed, per_variable
from autotune.strategy_space.plan import plan
from autotune.workload import Workload

READS = replace(GPU, variables=tuple(replace(each, script_read_s=0.001) for each in GPU.variables))


@pytest.mark.parametrize("workload", [GPU, CPU, READS])
@pytest.mark.parametrize("cross_step", [False, True])
def test_they_take_the_predicted_step_time(workload: Workload, cross_step: bool) -> None:
    enacted = plan(replace(per_variable(workload), cross_step=cross_step), workload, 4)
    lowering = Lowering(workload, FOUR)
    steps = steady_steps(lowering, enacted, 2)
    assert steps.step_s == pytest.approx(lowering.step_s(enacted), rel=1e-9)
    assert steps.computation_s == pytest.approx(workload.compute_s, rel=1e-9)
    assert steps.exposed_s == pytest.approx(steps.step_s - workload.compute_s)
    assert np.all(steps.began_s <= steps.arrived_s)


def test_a_message_begins_when_its_lane_takes_it() -> None:
    """Its thread may wake up earlier."""
    enacted = plan(replace(per_variable(CPU), cross_step=True), CPU, 4)
    lowering = Lowering(CPU, probed("all_reduce", alpha_s=0.02))
    assert lowering.costs["lane_first_s"] > 0
    steps = steady_steps(lowering, enacted, 2)
    assert np.all(steps.began_s[:, 1:] >= steps.arrived_s[:, :-1])


def test_only_messages_across_the_step_arrive_in_the_next_one() -> None:
    lowering = Lowering(GPU, probed("all_reduce", alpha_s=0.02))
    late = []
    for cross_step in (False, True):
        enacted = plan(replace(per_variable(GPU), cross_step=cross_step), GPU, 4)
        steps = steady_steps(lowering, enacted, 1)
        late.append(bool((steps.arrived_s[1] > steps.end_s).any()))
    assert late == [False, True]


def test_buckets_are_sent_as_the_current_setup_sends_them() -> None:
    names = [variable.name for variable in GPU.variables]
    enacted = plan(bucketed(GPU, (names[3:], names[:3])), GPU, 4)
    sent = [[part.variable for part in message.slices] for message in enacted.messages]
    assert sent == [names[3:], names[:3]]
