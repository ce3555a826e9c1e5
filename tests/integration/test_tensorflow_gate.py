"""Trials of TensorFlow graphs: the numerics gate, and emulated accelerators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

from keras.optimizers import SGD
from synthetic_cluster import cluster
from tensorflow_checks import edited_input
from tensorflow_programs import (
    batches_of,
    collaborative_filtering,
    filtering_by_momentum,
    small_resnet,
    small_transformer,
    two_layers,
)

from autotune.errors import InvalidStrategy
from autotune.strategy_space.builders.registry import BUILDERS
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Compressor
from autotune.workload import Workload
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.protocol import StartEmulation, StartProfile, StartTrial
from runtime_rewriter.rank.activities import NumericsFailure
from runtime_rewriter.rank.tensorflow_model import TensorflowModel
from runtime_rewriter.tensorflow.distribute import distribute
from runtime_rewriter.tensorflow.distributed_graph import DistributedGraph
from runtime_rewriter.tensorflow.emulation import LATE
from runtime_rewriter.tensorflow.running import RunningGraph
from runtime_rewriter.tensorflow.servers import session_config

REPLICAS = 4
CLUSTER = cluster(*[(1, 1000.0)] * REPLICAS)
STEP_TIMEOUT_S = 60.0
BACKWARD_S, FORWARD_S, UPDATE_S = 0.05, 0.02, 0.01
COMPARED_BYTES = 2**12  # several chunks of each model
ROUNDING_S = 1e-4
"""Waits are rounded down to whole microseconds."""


class FourDevices:
    """Devices of this process in place of `Servers`: two hosts of two ranks each."""

    target = ""
    devices = tuple(f"/device:CPU:{rank}" for rank in range(REPLICAS))
    hosts = ((0, 1), (2, 3))

    @property
    def config(self) -> Any:
        config = session_config()
        config.device_count["CPU"] = REPLICAS
        return config


def _correct(graph_def: Any) -> None:
    """Leave the graph as it is."""


class Trials:
    """Trials of one program, each of a single step under the gate.

    `edit`: changes the graphs of the plans that are loaded next.
    """

    def __init__(self, program: Any) -> None:
        self.edit: Callable[[Any], None] = _correct
        training = program.capture()
        self.running = RunningGraph(
            training, FourDevices(), STEP_TIMEOUT_S, distribute=self._distributed
        )
        self.model = TensorflowModel(self.running, "model")
        self.batch = batches_of(program, 2 * REPLICAS, 1)[0]

    def _distributed(self, *arguments: Any, **keywords: Any) -> DistributedGraph:
        graph = distribute(*arguments, **{**keywords, "compared_bytes": COMPARED_BYTES})
        self.edit(graph.graph_def)
        return graph

    def planned(self, name: str, rows: bool = False) -> Plan:
        workload = self.model.workload
        strategy = BUILDERS[name](workload, CLUSTER)
        return plan(with_rows(strategy, workload) if rows else strategy, workload, REPLICAS)

    def error(self, wanted: Plan | None) -> float:
        """The gate's relative error in the first step of a trial. Raises `NumericsFailure`."""
        trial = self.model.start(StartTrial(wanted, 1, 1))
        for _ in range(2):
            self.model.step(self.batch)
            trial.step_finished(0.1, True)
        error = trial.answer().gradient_error
        assert error is not None
        return error


PLANS = {
    small_resnet: [("all_reduce_chunks_8", False), ("uneven_partitioned_ps", False)],
    small_transformer: [
        ("reduce_scatter_all_gather_25mib", True),
        ("parallax", False),
        ("partitioned_all_reduce", True),
    ],
    collaborative_filtering: [("parameter_server", True), ("per_variable", True)],
    filtering_by_momentum: [("parameter_server", True), ("ps_round_robin", False)],
}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=[pytest.mark.slow] if make is small_transformer else [])
        for make in PLANS
    ],
)
def test_plans_that_average_as_they_should_pass(make):
    trials = Trials(make())
    for name, rows in PLANS[make]:
        assert trials.error(trials.planned(name, rows)) < 1e-5
    assert trials.error(None) < 1e-5  # the current setup
    trials.running.close()


@pytest.fixture(scope="module")
def trials():
    trials = Trials(two_layers(SGD(0.1)))
    yield trials
    trials.running.close()


def test_a_profile_says_what_the_script_compiles_and_what_the_graph_lacks(trials):
    trials.model.note = "XLA compiles it"
    answer = trials.model.start(StartProfile(0, 0.0, False)).answer()
    assert answer.op_fusion_report == "XLA compiles it"
    assert answer.plugins_refused and answer.rows_only == ()


PARAMETERS: dict[Compressor, dict[str, Any]] = {
    Compressor.TOP_K: {"ratio": 0.1},
    Compressor.POWER_SGD: {"rank": 1},
}


def test_what_compressors_keep_counts(trials):
    for compressor in Compressor:
        for hierarchical in (False, True):
            planned = trials.planned("all_reduce_chunks_8")
            changes: dict[str, Any] = {"compressor": compressor, "hierarchical": hierarchical}
            changes |= PARAMETERS.get(compressor, {})
            messages = tuple(replace(one, **changes) for one in planned.messages)
            error = trials.error(replace(planned, messages=messages))
            assert error < (0.02 if compressor in (Compressor.FP16, Compressor.BF16) else 1e-5)


def _lost_message(graph_def: Any) -> None:
    """Rank 2 sends what rank 1 sends."""
    edited_input(graph_def, "autotune/message_0/rank_2/scaled", 0, "autotune/message_0/rank_1")


def _half(graph_def: Any) -> None:
    """One message of rank 3 has another weight."""
    for node in graph_def.node:
        if node.name == "autotune/message_0/rank_3/factor":
            node.attr["value"].tensor.float_val[:] = [0.2501]


def _drifting(graph_def: Any) -> None:
    """Rank 3 multiplies one sum, within the tolerance of a sum."""
    scope = "autotune/message_0/rank_3"
    by_name = {node.name: node for node in graph_def.node}
    drift, drifted = graph_def.node.add(), graph_def.node.add()
    drift.CopyFrom(by_name[f"{scope}/factor"])
    drift.name = f"{scope}/drift"
    drift.attr["value"].tensor.float_val[:] = [1 + 1.2e-7]
    drifted.CopyFrom(by_name[f"{scope}/scaled"])
    drifted.name = f"{scope}/drifted"
    drifted.input[:] = [f"{scope}/all_reduce", drift.name]
    by_name[f"{scope}/reshape_1"].input[0] = drifted.name


@pytest.mark.parametrize("builder", ["per_variable", "ps_round_robin", "uneven_partitioned_ps"])
@pytest.mark.parametrize("edit", [_lost_message, _half])
def test_a_wrong_message_fails_the_trial_by_the_name_of_its_variable(trials, builder, edit):
    planned = trials.planned(builder)
    trials.edit = edit
    trials.running.load(planned)
    with pytest.raises(NumericsFailure, match=planned.messages[0].slices[0].variable):
        trials.error(planned)
    trials.edit = _correct
    trials.running.load(planned)
    assert trials.error(planned) < 1e-5


def test_ranks_with_different_averages_fail_the_trial(trials):
    """A difference within the tolerance of a sum, but not the same on all ranks."""
    planned = trials.planned("per_variable")
    trials.running.load(trials.planned("ps_round_robin"))
    trials.edit = _drifting
    with pytest.raises(NumericsFailure, match="by inf"):
        trials.error(planned)
    trials.edit = _correct
    trials.running.load(planned)
    assert trials.error(planned) < 1e-5


def test_emulated_accelerators_wait_and_their_gradients_travel():
    trials = Trials(two_layers(SGD(0.1)))
    model, running = trials.model, trials.running
    model.step(trials.batch)
    timed = _timed(model.workload)
    compute_s = timetable_of(timed).compute_s
    emulation = model.start(StartEmulation(timed))
    results = model.step(trials.batch)
    assert emulation.step_finished(0.0, True) and LATE not in results
    for name, rows in (("per_variable", False), ("ps_round_robin", False)):
        assert trials.error(trials.planned(name, rows)) < 1e-5
        assert _waited_s(running, trials.batch) >= compute_s - ROUNDING_S
        assert_sends_what_each_rank_holds(running, trials.batch)
    running.close()


def _timed(workload: Workload) -> Workload:
    """The workload with the times of a profile."""
    variables = workload.variables
    return replace(
        workload,
        variables=tuple(
            replace(one, ready_s=BACKWARD_S * ((place + 1) / len(variables)))
            for place, one in enumerate(variables)
        ),
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S,
        update_s=UPDATE_S,
        source="measured",
    )


def test_an_emulated_program_gets_its_rows_as_the_program_does():
    trials = Trials(collaborative_filtering())
    trials.model.step(trials.batch)
    trials.model.start(StartEmulation(_timed(trials.model.workload)))
    with pytest.raises(InvalidStrategy, match=r"Square of the gradient of .* takes each row"):
        trials.running.load(trials.planned("per_variable"))
    assert trials.error(trials.planned("per_variable", rows=True)) < 1e-5
    assert trials.error(None) < 1e-5
    trials.running.close()


def _waited_s(running: RunningGraph, batch: Any) -> float:
    """From the first time stamp of a replica to the last one. Waits may be late, never early."""
    assert running.graph is not None
    stamps = {
        node.name: f"{node.name}:0"
        for node in running.graph.graph_def.node
        if node.op == "Timestamp" and node.name.startswith("replica_0/")
    }
    _, found = running.observed_step(batch, None, stamps)
    return float(max(found.values()) - min(found.values())) + UPDATE_S


def assert_sends_what_each_rank_holds(running: RunningGraph, batch: Any) -> None:
    """Change the recorded gradient of one rank only: all ranks get the new average."""
    graph = running.graph
    assert graph is not None and graph.gate is not None
    gradient = running.training.gradients[0]
    name = f"emulated/{gradient.variable}/values"
    (held,) = [one for one in graph.variables if one.variable == name and one.rank == 1]
    recorded = running.fetch({name})[name]
    session = running._session
    session.run(held.assign, {held.placeholder: 5 * recorded})
    readers = [
        node
        for node in graph.graph_def.node
        if node.op == "Identity" and node.name.startswith("replica_3/") and _reads_average(node)
    ]
    # The targets let all ranks take part in the collectives.
    wanted = ([f"{node.name}:0" for node in readers], list(graph.targets))
    values, _ = session.run(wanted, graph.feed_dict(batch))
    assert any(_close(value, 2 * recorded) for value in values)
    session.run(held.assign, {held.placeholder: recorded})


def _reads_average(node: Any) -> bool:
    return any(name.startswith("autotune/") for name in node.input)


def _close(value: np.ndarray, expected: np.ndarray) -> bool:
    return value.shape == expected.shape and bool(np.allclose(value, expected, 1e-5, 1e-9))
