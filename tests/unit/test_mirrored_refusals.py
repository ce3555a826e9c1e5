"""Plans that the messages of MultiWorkerMirroredStrategy cannot enact."""

# mypy: allow-untyped-decorators

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from bare_export import bare_export
from tensorflow.python.distribute.collective_util import CommunicationImplementation, Options
from tensorflow.python.distribute.cross_device_utils import (
    CollectiveKeys,
    CollectiveReplicaLauncher,
)

from autotune.errors import InvalidInput, InvalidStrategy, ModelMismatch
from autotune.strategy_space.builders.collectives import per_variable, zero2_like
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Compressor
from autotune.workload import Variable, Workload
from runtime_rewriter.emulation import Timetable
from runtime_rewriter.mirrored.accelerator import MOST_RECORDED_STEPS, MirroredAccelerator
from runtime_rewriter.mirrored.recorded import RecordedStep
from runtime_rewriter.mirrored.summed import refuse, refuse_model
from runtime_rewriter.rank.exported import ExportSession
from runtime_rewriter.rank.mirrored_model import MirroredModel
from runtime_rewriter.tensorflow.batch_kinds import batch_kind


def test_plans_of_other_messages_are_refused_by_name() -> None:
    variables = (Variable("a", (4, 2)), Variable("b", (3,)))
    workload = Workload("model", variables)
    apart = plan(per_variable(workload), workload, 2)
    refuse(apart, variables, 2)
    for refused, reason in (
        (plan(zero2_like(workload), workload, 2), "meet in all-reduces only"),
        (replace(apart, cross_step=True), "cross_step lets messages"),
        (replace(apart, ring_order=(1, 0)), r"ring_order is \(1, 0\)"),
        (
            replace(
                apart,
                messages=tuple(replace(one, compressor=Compressor.INT8) for one in apart.messages),
            ),
            "must be none, fp16 or bf16",
        ),
        (replace(apart, messages=apart.messages[:1]), "exactly the variables"),
    ):
        with pytest.raises(InvalidStrategy, match=reason):
            refuse(refused, variables, 2)
    with pytest.raises(InvalidStrategy, match="for 2 ranks, but 3 workers"):
        refuse(apart, variables, 3)


def test_a_model_whose_gradients_no_plan_can_send_is_refused_before_any_trial() -> None:
    refuse_model((Variable("a", (4, 2), "bfloat16"),))
    with pytest.raises(InvalidInput, match=r"the gradient of 'b' is complex64; train it with"):
        refuse_model((Variable("a", (4, 2)), Variable("b", (3,), "complex64")))


def test_a_played_step_may_take_no_iterator_and_kinds_of_batches_are_shapes() -> None:
    batches = tf.data.Dataset.from_tensor_slices(np.zeros((4, 3), "float32")).batch(2)
    with pytest.raises(InvalidInput, match="takes its batch from an iterator"):
        batch_kind((iter(batches),))
    first, second = (batch_kind((np.ones((2, width)), "train")) for width in (3, 4))
    assert first != second and first == batch_kind((np.zeros((2, 3)), "train"))
    rows = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 1]), tf.constant([5, 3]))
    assert batch_kind(rows) == batch_kind(rows) != batch_kind(tf.ones([2, 3]))


def test_a_step_that_cannot_be_played_is_refused_when_it_was_recorded() -> None:
    accelerator = MirroredAccelerator(Timetable(0.1, (), (("a", 0.1),), 0.1, 0.1), _no_sums())
    a = Variable("a", (2,))
    for sent_before, named, refused in (
        ("all_reduce", "a", "has transfers of its own before its gradients are summed"),
        ("", "a", "gathers values of all workers; move that out"),
        (None, "b", "they differ in a, b; leave --profile out"),
    ):
        recorded = recorded_step(replace(a, name=named), sent_before)
        with pytest.raises(InvalidInput, match=refused):
            accelerator.add("kind", recorded)
    playable = recorded_step(a, None)
    assert len(playable.further) == 1
    for kind in range(MOST_RECORDED_STEPS):
        accelerator.add(kind, playable)
    with pytest.raises(InvalidInput, match="at most 32 kinds of batches"):
        accelerator.add("one more", playable)


def _no_sums() -> Any:
    """Nothing is played."""


def recorded_step(variable: Variable, sent_before: str | None) -> RecordedStep:
    """Trace a step of two workers that reduces its loss, and sends before (None: only that)."""
    recorded = RecordedStep()
    keys = CollectiveKeys()
    options = Options(implementation=CommunicationImplementation.RING)
    launcher = CollectiveReplicaLauncher(1, 2, keys, "/device:CPU:0", options)

    @tf.function(autograph=False)
    def step() -> Any:
        gradient = tf.ones(variable.shape)
        if sent_before == "all_reduce":
            launcher.all_reduce(gradient)
        with recorded.summing([variable], {variable.name: gradient}):
            launcher.all_reduce(gradient)
        if sent_before == "":
            launcher._all_gather(gradient, options)
        return launcher.all_reduce(tf.constant(1.0))

    with recorded.tracing():
        step.get_concrete_function()
    return recorded


def test_a_strategy_whose_step_trains_by_an_export_is_reported(tmp_path: Path) -> None:
    variables = (Variable("a", (4, 2)), Variable("b", (3,)))
    workload = Workload("model", variables)
    (tmp_path / "report").touch()
    exported = bare_export(workload, per_variable(workload), 2, plan_id=None)
    exported.write(tmp_path / "best.json")
    session = ExportSession(tmp_path / "best.json", tmp_path / "report")
    with pytest.raises(ModelMismatch):
        MirroredModel(session, 2, 0).found(variables[:1], ())
    assert (tmp_path / "report").read_text() == ""
    assert MirroredModel(session, 2, 0).found(variables, ()) == exported.plan()
    assert (tmp_path / "report").read_text() == "carried out by TensorFlow, 2 messages\n"
