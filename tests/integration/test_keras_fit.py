"""`keras.Model.fit` on two ranks trains, measures and calls back as on one device."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

import contextlib
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from two_devices import TwoDevices

from autotune.errors import InvalidInput, LaunchError
from runtime_rewriter.mirrored.scripts import mirrored_steered
from runtime_rewriter.rank.keras_scripts import keras_steered
from runtime_rewriter.rank.keras_step import KerasStep, combined, refuse
from runtime_rewriter.rank.tensorflow_step import DistributedStep

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

RANKS = 2
ROWS, BATCH = 43, 8
"""The last batch of an epoch has 3 rows, which two ranks cannot share."""
TOLERANCE = 1e-5
"""The mean of two means of halves is rounded otherwise than the mean of the whole batch."""


def model_of(**options: Any) -> Any:
    keras.utils.set_random_seed(1)
    words = keras.Input((4,), dtype="int32")
    numbers = keras.Input((3,))
    hidden = keras.layers.Flatten()(keras.layers.Embedding(9, 2)(words))
    hidden = keras.layers.Concatenate()([hidden, keras.layers.Dense(4, "relu")(numbers)])
    model = keras.Model([words, numbers], keras.layers.Dense(3)(hidden))
    model.compile(
        **{
            "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
        }
        | options
    )
    return model


def data() -> tuple[list[np.ndarray], np.ndarray]:
    random = np.random.default_rng(0)
    words = random.integers(0, 9, (ROWS, 4)).astype("int32")
    numbers = random.normal(size=(ROWS, 3)).astype("float32")
    return [words, numbers], (words.sum(1) % 3).astype("int32")


def on_two_ranks(model: Any, until: contextlib.ExitStack) -> None:
    def distributed(step: Any) -> DistributedStep:
        found = DistributedStep(step, TwoDevices(), (), None, combine=combined)
        until.callback(found.close)
        return found

    model.make_train_function()
    model.train_function = KerasStep(model, model.train_function, RANKS, distributed)
    until.callback(model.train_function.close)


def fitted(folder: Any, ranks: int) -> list[Any]:
    """Fit with the usual callbacks; return all that the script can see of it."""
    model, (inputs, labels) = model_of(), data()
    with contextlib.ExitStack() as until:
        if ranks > 1:
            on_two_ranks(model, until)
        history = model.fit(
            inputs,
            labels,
            batch_size=BATCH,
            epochs=6,
            verbose=0,
            class_weight={0: 1.0, 1: 2.0, 2: 0.5},
            validation_data=(inputs, labels),
            callbacks=[
                keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch)),
                keras.callbacks.ModelCheckpoint(
                    str(folder / f"{ranks}" / "{epoch}.weights.h5"), save_weights_only=True
                ),
                keras.callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=3),
            ],
        ).history
        logs = model.train_on_batch([one[:4] for one in inputs], labels[:4], return_dict=True)
        found = [len(history["loss"]), *(history[name] for name in sorted(history))]
        found += [logs[name] for name in sorted(logs)]
        found += [*model.get_weights(), *[one.numpy() for one in model.optimizer.variables]]
    model.load_weights(folder / f"{ranks}" / "2.weights.h5")
    return [*found, *model.get_weights()]


def test_metrics_callbacks_validation_and_checkpoints_are_those_of_one_device(
    tmp_path, caplog
) -> None:
    alone, together = fitted(tmp_path, 1), fitted(tmp_path, RANKS)
    # the last batch of each epoch, and one without weights of classes
    assert "5 of 25 batches trained on rank 0 alone" in caplog.text
    assert alone[0] == 4  # epochs until the early stop
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=1e-6)


class OwnStep(keras.Model):  # type: ignore[misc]
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def test_what_would_train_otherwise_is_refused_by_name() -> None:
    (words, numbers), labels = data()
    for options, reason in (
        ({"run_eagerly": True}, "leave out run_eagerly=True"),
        ({"steps_per_execution": 4}, "steps_per_execution is 4; leave it out"),
        (
            {"loss": keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")},
            "reduction of its loss is 'sum'.*use reduction='sum_over_batch_size'",
        ),
    ):
        model = model_of(**options)
        model._symbolic_build(data_batch=([words, numbers], labels, None))
        with pytest.raises(InvalidInput, match=reason):
            refuse(model, RANKS)
    own = OwnStep()
    with pytest.raises(InvalidInput, match=r"own; .*autotune\.distribute\(train_step\)"):
        refuse(own, RANKS)
    two = keras.Model(own_input := keras.Input((2,)), [keras.layers.Dense(1)(own_input)] * 2)
    two.compile("sgd", ["mse", "mae"])
    two._symbolic_build(data_batch=(np.zeros((2, 2)), [np.zeros((2, 1))] * 2, None))
    with pytest.raises(InvalidInput, match="is computed within the step"):
        refuse(two, RANKS)


def _summed(labels: Any, outputs: Any) -> Any:
    return tf.reduce_sum(tf.square(outputs))


REFUSED_LOSSES = {
    r"'dice' must have a value for each row.*shape \(\); .*axis=": keras.losses.Dice(),
    r"'tversky' must have a value for each row.*shape \(3,\)": keras.losses.Tversky(axis=0),
    "'_summed' must have a value for each row": _summed,
    "'circle' compares all rows": keras.losses.Circle(),
    "has a mask, such as that of ignore_class": keras.losses.SparseCategoricalCrossentropy(
        True, ignore_class=0
    ),
}


def test_a_loss_without_a_value_for_each_row_is_refused() -> None:
    (words, numbers), labels = data()
    for reason, loss in REFUSED_LOSSES.items():
        model = model_of(loss=loss, metrics=[])
        categorical = isinstance(loss, keras.losses.Dice | keras.losses.Tversky)
        given = keras.utils.to_categorical(labels, 3) if categorical else labels
        with contextlib.ExitStack() as until:
            on_two_ranks(model, until)
            with pytest.raises(InvalidInput, match=reason):
                model.fit([words, numbers], given, batch_size=BATCH, verbose=0)
    model = model_of(loss=keras.losses.Dice(axis=1), metrics=[])
    with contextlib.ExitStack() as until:
        on_two_ranks(model, until)
        model.train_on_batch([words[:4], numbers[:4]], keras.utils.to_categorical(labels[:4], 3))
    assert "call" not in vars(model._compile_loss._flat_losses[0].loss)


def test_a_first_batch_that_does_not_divide_and_ragged_batches_are_refused() -> None:
    model, (inputs, labels) = model_of(), data()
    with contextlib.ExitStack() as until:
        on_two_ranks(model, until)
        with pytest.raises(InvalidInput, match="first one has 5 rows; set batch_size to a multi"):
            model.fit(inputs, labels, batch_size=5, verbose=0)
        ragged = tf.ragged.constant([[1], [2, 3]])
        with pytest.raises(InvalidInput, match="has a RaggedTensor; convert it"):
            model.train_function(iter([(ragged, labels[:2])]))


def test_a_strategy_around_fit_is_refused_with_what_to_remove(monkeypatch) -> None:
    (words, numbers), labels = data()
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = model_of()
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with keras_steered(), pytest.raises(InvalidInput, match=r"without `with strategy\.scope"):
        model.fit([words, numbers], labels, verbose=0)


def test_ranks_without_a_place_do_not_fit_alone(monkeypatch) -> None:
    """Ranks of mpirun under `autotune run`."""
    (words, numbers), labels = data()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with keras_steered(), pytest.raises(LaunchError, match=r"mpirun started 2 .* train alone"):
        model_of().fit([words, numbers], labels, verbose=0)
    with keras_steered(), monkeypatch.context() as alone:
        alone.setenv("WORLD_SIZE", "1")
        model_of().fit([words, numbers], labels, verbose=0)


def test_ranks_without_a_place_build_no_strategy_of_their_own(monkeypatch) -> None:
    with mirrored_steered(lambda until_end, peers: None):
        tf.distribute.MultiWorkerMirroredStrategy()
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
        with pytest.raises(LaunchError, match=r"srun started 2 .* train alone"):
            tf.distribute.MultiWorkerMirroredStrategy()
