"""A script's own variables stay those that its distributed step trains."""

from __future__ import annotations

import numpy as np
import pytest
from bare_export import bare_export
from isolated_servers import WAIT_S, isolated

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

import contextlib
import importlib.util
import socket
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf
from two_devices import TwoDevices

import autotune
from autotune.errors import InvalidInput, LaunchError, ModelMismatch
from autotune.strategy_space.builders.collectives import per_variable
from runtime_rewriter.control import ControlLine
from runtime_rewriter.rank.exported import ExportSession
from runtime_rewriter.rank.session import TuningSession
from runtime_rewriter.rank.tensorflow_step import (
    UNCOMPILED,
    DistributedStep,
    _own_export,
    signature_of,
)
from runtime_rewriter.tensorflow import servers
from runtime_rewriter.tensorflow.batch_updates import refuse_updates_by_batch
from runtime_rewriter.tensorflow.capture import capture_step
from runtime_rewriter.tensorflow.graph_workload import workload_of
from runtime_rewriter.tensorflow.mean_loss import refuse_other_losses
from runtime_rewriter.tensorflow.program_variables import ProgramVariables

STEPS = 6
TOLERANCE = 1e-5
"""The mean of two means of halves is rounded otherwise than the mean of the whole batch."""


def trained(distributed: bool) -> list[np.ndarray]:
    """Train with a script's habits: it evaluates, changes the rate, and scales a variable."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(4)])
    model.build((None, 16))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(inputs, labels):
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss, "rate": optimizer.learning_rate}

    @tf.function
    def evaluate(inputs):
        return tf.reduce_sum(tf.abs(model(inputs)))

    random = np.random.default_rng(0)
    inputs = random.normal(size=(12, 16)).astype("float32")
    labels = random.integers(0, 4, 12).astype("int32")
    evaluate(inputs)  # traced before the variables are watched
    run = DistributedStep(step, TwoDevices(), (), None, None) if distributed else step
    seen = []
    for number in range(STEPS):
        results = run(inputs, labels)
        if number == 1:
            seen.append(evaluate(inputs).numpy())
        if number == 2:
            optimizer.learning_rate.assign(0.01)
        if number == 3:
            kernel = model.layers[0].kernel
            kernel.assign(kernel * 0.5)
        if number == 4:  # traced while the variables are watched
            seen.append(model.predict(inputs, verbose=0))
    seen += [results["rate"].numpy(), optimizer.iterations.numpy(), *model.get_weights()]
    seen.append(evaluate(inputs).numpy())
    if distributed:
        run.close()
    return seen


def test_a_script_reads_and_changes_its_variables_between_distributed_steps():
    for found, expected in zip(trained(True), trained(False), strict=True):
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=1e-6)


def _fixed_batch(losses, labels, logits):
    return tf.nn.compute_average_loss(losses, global_batch_size=12)


def _weighted_mean(losses, labels, logits):
    weights = tf.cast(labels > 0, tf.float32)
    return tf.reduce_sum(weights * losses) / tf.reduce_sum(weights)


def _compared_rows(losses, labels, logits):
    same = tf.range(tf.shape(labels)[0])
    pairs = tf.matmul(logits, tf.stop_gradient(logits), transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(same, pairs))


SUMS = {
    "sum": lambda losses, labels, logits: tf.reduce_sum(losses),
    "fixed batch": _fixed_batch,
    "sum and regularizer": lambda losses, labels, logits: (
        tf.reduce_sum(losses) + tf.reduce_sum(tf.square(logits)) * 0.0 + 1.0
    ),
}
OTHERS = {"weighted mean": _weighted_mean, "rows compared": _compared_rows}
MEANS = {
    "mean": lambda losses, labels, logits: tf.reduce_mean(losses),
    "mean of a sum": lambda losses, labels, logits: tf.nn.compute_average_loss(losses),
}


DROPS = {
    "keras": None,  # a layer of Keras, which is built before
    "tensorflow": lambda value: tf.nn.dropout(value, 0.5),
    "stateless": lambda value: tf.nn.experimental.stateless_dropout(value, 0.5, seed=[1, 2]),
    "loop": lambda value: tf.while_loop(
        lambda number, value: number < 2,
        lambda number, value: (number + 1, tf.nn.dropout(value, 0.5)),
        (0, value),
    )[1],
    "noise": lambda value: value + tf.random.normal(tf.shape(value)),
}


def step_of(loss_of: Any, noisy: bool, dropped: str | None = None) -> Any:
    """A step of two layers; `noisy`: with batch normalization, dropout and a table of rows."""
    keras.utils.set_random_seed(1)
    table = tf.Variable(tf.random.normal([9, 16]))
    hidden, last = tf.Variable(tf.random.normal([16, 8])), tf.Variable(tf.random.normal([8, 4]))
    normalize = keras.layers.BatchNormalization()
    drop, drop_most = keras.layers.Dropout(0.5), keras.layers.Dropout(0.7)
    normalize.build((None, 8))

    def step(inputs, labels):
        with tf.GradientTape() as tape:
            value = tf.tanh(tf.matmul(inputs + tf.gather(table, labels), hidden))
            if noisy:
                value = drop(normalize(value, training=True), training=True)
            if dropped is not None:
                drops = DROPS[dropped] or partial(drop_most, training=True)
                value = drops(value)
            logits = tf.matmul(value, last)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = loss_of(losses, labels, logits)
        variables = [table, hidden, last]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(tf.convert_to_tensor(gradient) * 0.1)
        return loss

    return step


def refuse(loss_of: Any, noisy: bool, rows: int, dropped: str | None = None) -> None:
    random = np.random.default_rng(0)
    arguments = (
        random.normal(size=(rows, 16)).astype("float32"),
        random.integers(0, 4, rows).astype("int32"),
    )
    step = tf.function(step_of(loss_of, noisy, dropped))
    captured = capture_step(step, signature_of(arguments, None))
    batch = dict(zip(captured.arguments, arguments, strict=True))
    refuse_other_losses(captured.training, TwoDevices(), batch, WAIT_S)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("rows", [2, 24])
def test_a_loss_that_grows_with_the_batch_is_refused(noisy, rows):
    for loss_of in SUMS.values():
        with pytest.raises(InvalidInput, match=r"grow with the number.* by tf\.reduce_mean"):
            refuse(loss_of, noisy, rows)
    for loss_of in MEANS.values():
        refuse(loss_of, noisy, rows)


@pytest.mark.parametrize("drop", DROPS)
def test_random_numbers_hide_no_loss_of_the_whole_batch(drop):
    for loss_of in OTHERS.values():
        with pytest.raises(InvalidInput, match="are not the mean of those of its parts"):
            refuse(loss_of, noisy=False, rows=24, dropped=drop)
    for loss_of in MEANS.values():
        refuse(loss_of, noisy=False, rows=24, dropped=drop)


@pytest.mark.parametrize("loss", OTHERS)
def test_a_loss_of_the_whole_batch_is_refused(loss):
    with pytest.raises(InvalidInput, match="are not the mean of those of its parts"):
        refuse(OTHERS[loss], noisy=False, rows=24)


def counted(seen: Any, rate: Any, rows: Any, gradient: Any, loss: Any) -> Any:
    seen.assign_add(tf.cast(tf.shape(rows)[0], tf.float32))
    return gradient * tf.math.exp(-seen)


def by_variable(seen: Any, rate: Any, rows: Any, gradient: Any, loss: Any) -> Any:
    rate.assign(0.1 / (1.0 + loss))
    return gradient * rate


def conditioned(seen: Any, rate: Any, rows: Any, gradient: Any, loss: Any) -> Any:
    return tf.cond(loss < 10.0, lambda: gradient * 0.1, lambda: gradient * 0.0)


def by_gradient(seen: Any, rate: Any, rows: Any, gradient: Any, loss: Any) -> Any:
    """The condition, the rate and the count follow from gradients and from steps."""
    seen.assign_add(1.0)
    rate.assign(0.1 / (1.0 + tf.norm(gradient) + seen))
    return tf.cond(
        tf.reduce_all(tf.math.is_finite(gradient)), lambda: gradient * rate, lambda: gradient * 0.0
    )


def only_noted(seen: Any, rate: Any, rows: Any, gradient: Any, loss: Any) -> Any:
    """A metric that no update reads."""
    seen.assign_add(tf.cast(tf.shape(rows)[0], tf.float32))
    rate.assign(loss)
    return gradient * 0.1


def check_updates(change_of: Any) -> None:
    weights, seen, rate = tf.Variable(tf.ones([8, 1])), tf.Variable(0.0), tf.Variable(0.1)

    def step(rows):
        with tf.GradientTape() as tape:
            total = tf.zeros([tf.shape(rows)[0], 1])
            for _ in tf.range(2):  # a loop that reads a variable, and writes none
                total += tf.matmul(rows, weights)
            loss = tf.reduce_mean(tf.square(total))
        weights.assign_sub(change_of(seen, rate, rows, tape.gradient(loss, weights), loss))
        return loss

    rows = np.ones((4, 8), "float32")
    captured = capture_step(tf.function(step), signature_of((rows,), None))
    refuse_updates_by_batch(captured.training, 2)


@pytest.mark.parametrize("change_of", [counted, by_variable, conditioned])
def test_updates_that_read_the_batch_beside_gradients_are_refused(change_of: Any) -> None:
    with pytest.raises(InvalidInput, match="an update may depend on it through gradients only"):
        check_updates(change_of)


@pytest.mark.parametrize("change_of", [by_gradient, only_noted])
def test_updates_by_gradients_and_notes_about_the_batch_are_accepted(change_of: Any) -> None:
    check_updates(change_of)


def test_a_summed_loss_ends_a_script_before_its_first_step():
    step = step_of(SUMS["sum"], noisy=False)
    with pytest.raises(InvalidInput, match="the loss must be a mean over the rows of the batch"):
        DistributedStep(tf.function(step), TwoDevices(), (), None)(
            np.ones((4, 16), "float32"), np.arange(4, dtype="int32")
        )


def test_a_variable_that_no_step_has_changed_is_read_while_a_function_is_traced():
    variable = tf.Variable([1.0, 2.0])
    nothing_fetched: Any = SimpleNamespace(
        training=SimpleNamespace(variables=[SimpleNamespace(name="v")]), fetch=lambda names: {}
    )
    program = ProgramVariables({"v": variable}, nothing_fetched)
    with program.watched():
        assert tf.function(lambda: variable + 1.0)().numpy().tolist() == [2.0, 3.0]


def test_the_first_array_gives_the_batch_and_other_arrays_are_copied():
    batch, weights = np.zeros((6, 3), "float32"), np.zeros(4, "float32")
    first, second, third = signature_of((batch, weights, 0.5), None)
    assert (first.shape.as_list(), second.shape.as_list()) == ([None, 3], [4])
    assert (third.shape.as_list(), third.dtype) == ([], tf.float32)
    assert signature_of((batch, 3, np.float64(3)), None)[1:] == (
        tf.TensorSpec([], tf.int32),
        tf.TensorSpec([], tf.float64),
    )
    with pytest.raises(InvalidInput, match="none of its 1 arguments is an array"):
        signature_of((0.5,), None)


@pytest.mark.parametrize("value", [True, None, "train"])
def test_a_value_that_python_reads_while_it_traces_is_refused_with_what_to_write(value):
    batch = np.zeros((6, 3), "float32")
    with pytest.raises(InvalidInput, match=rf"argument 2 is or holds {value!r}; bind it by func"):
        DistributedStep(step_of(MEANS["mean"], False), TwoDevices(), (), None)(batch, {"a": value})
    signature = [tf.TensorSpec([None, 3]), tf.TensorSpec([], tf.bool)]
    given = tf.function(lambda rows, training: rows, input_signature=signature)
    assert signature_of((batch, True), given) == given.input_signature


def test_a_batch_of_another_length_needs_a_signature_and_trains_with_one(caplog):
    table = tf.Variable(np.ones((9, 4), "float32"))

    def step(words, rate):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_mean(tf.gather(table, words), [1, 2]))
        gradient = tf.convert_to_tensor(tape.gradient(loss, table))
        table.assign_sub(gradient * rate)
        return loss

    short, long = np.ones((4, 3), "int32"), np.ones((4, 5), "int32")
    fixed = DistributedStep(tf.function(step, jit_compile=True), TwoDevices(), (), None)
    fixed(short, 0.1)
    assert UNCOMPILED in caplog.text
    caplog.clear()
    reason = r"array 1 .* shape \(None, 3\) .* has \(4, 5\); .*TensorSpec\(\[None, None\], tf.int32"
    with pytest.raises(InvalidInput, match=reason):
        fixed(long, 0.1)
    fixed.close()
    signature = [tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([])]
    free = DistributedStep(tf.function(step, input_signature=signature), TwoDevices(), (), None)
    assert free(short, 0.1) > free(long, 0.1) > free(short, 0.1)
    assert UNCOMPILED not in caplog.text
    free.close()


def start_at_a_taken_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        servers._start(tf.train.ClusterSpec({servers.JOB: [address]}), 0, [])


def test_a_taken_port_and_differing_versions_are_named():
    with pytest.raises(LaunchError, match=r"rank 0 cannot listen at 127.0.0.1:\d+: address alr"):
        isolated().submit(start_at_a_taken_port).result(WAIT_S)
    with pytest.raises(LaunchError, match=r"is 2.21.0 on rank 0 and 2.20.0 on rank 1"):
        servers._same_versions([{"TensorFlow": "2.21.0"}, {"TensorFlow": "2.20.0"}])


def test_an_untested_or_missing_tensorflow_is_refused_with_what_to_install(monkeypatch):
    with pytest.raises(LaunchError, match=r"at least 2.21 and below 3.0, but is 2.15.1; run"):
        servers.versions("2.15.1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install '\.\[tensorflow\]'"):
        autotune.distribute(len)


def test_ranks_on_several_hosts_of_an_ordinary_network_are_refused():
    place = servers.RankPlace(0, 2, one_host=False, address="10.0.0.1", port=1)
    with pytest.raises(LaunchError, match=r"several hosts of an ordinary network; add --trusted"):
        servers._network(place)
    assert servers._network(replace(place, network="trusted")) == {}


def test_arguments_by_name_are_refused():
    with pytest.raises(InvalidInput, match="positional arguments, but got labels by name"):
        DistributedStep(None, TwoDevices(), (), None, None)(labels=1)


def test_ranks_without_a_place_do_not_train_alone(monkeypatch):
    """A missing export would not even be read."""
    step = tf.function(lambda batch: tf.reduce_mean(batch))
    assert autotune.distribute(step, "absent.json") is step
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(LaunchError, match=r"horovodrun started 2 .* train alone"):
        autotune.distribute(step, "absent.json")


def test_a_tuner_does_not_need_the_export_that_the_script_names(tmp_path):
    """It may be of another world size or model, or not exist before the first job."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        session = TuningSession(ControlLine(ours))
        session.tune(None)  # it no longer watches the optimizers of this process
        assert _own_export(session, tmp_path / "absent.json") is None
    with pytest.raises(InvalidInput, match=r"absent\.json"):
        _own_export(None, tmp_path / "absent.json")


def test_a_step_that_trains_by_an_export_is_reported(tmp_path):
    weights = tf.Variable(np.ones((3, 2), "float32"))

    @tf.function
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(rows @ weights))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    workload = workload_of(capture_step(step, [tf.TensorSpec([None, 3])]).training, "step")
    (tmp_path / "report").touch()
    for ranks, reported in ((3, ""), (2, "carried out by TensorFlow, 1 message\n")):
        exported = bare_export(workload, per_variable(workload), ranks, plan_id=None)
        exported.write(tmp_path / "best.json")
        session = ExportSession(tmp_path / "best.json", tmp_path / "report")
        run = DistributedStep(
            step, TwoDevices(), (), None, session.export, applied=session.applied_in_graph
        )
        with pytest.raises(ModelMismatch) if ranks == 3 else contextlib.nullcontext():
            run(np.ones((4, 3), "float32"))
        run.close()
        assert (tmp_path / "report").read_text() == reported
