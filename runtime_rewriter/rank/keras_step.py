"""The training step of `keras.Model.fit` and `train_on_batch` on the servers of all ranks.

Rank 0 alone runs `fit`: its data, callbacks, metrics and validation are those of the script. Each
batch is split between the ranks, which compute gradients; the model's outputs come back, and rank 0
updates the metrics with the whole batch. A batch that does not divide by the number of ranks, or
has other arrays or shapes than the first one, trains on rank 0 alone, by the script's own step.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

from autotune.errors import InvalidInput

LOSS, OUTPUTS = "loss", "outputs"
_LINE = "train_step = autotune.distribute(train_step)"
_LOOP = f"write a loop over batches with a tf.function train_step, and before it `{_LINE}`"
_MEANS = ("sum_over_batch_size", "mean")

Step = Callable[..., Any]
_log = logging.getLogger("autotune")


def refuse(model: Any, world_size: int) -> None:
    """Raise `InvalidInput` for a model whose `fit` would train something else on several ranks."""
    if reason := _refusal(model):
        raise InvalidInput(
            f"`fit` of {type(model).__name__!r} cannot be split between {world_size} ranks: "
            f"{reason}"
        )


def _refusal(model: Any) -> str | None:
    if type(model).train_step is not TensorFlowTrainer.train_step:
        return f"the model has a train_step of its own; {_LOOP}"
    if model.run_eagerly:
        return "it runs eagerly; leave out run_eagerly=True of compile"
    if model.steps_per_execution != 1:
        return (
            f"steps_per_execution is {model.steps_per_execution}; leave it out of compile, so that "
            "each step is a call"
        )
    own = (model._loss_tracker, model._compile_metrics)
    of_layers = [one for one in model.metrics if not any(one is other for other in own)]
    if of_layers:
        return (
            f"the metric {of_layers[0].name!r} is computed within the step, of each part of the "
            f"batch; {_LOOP}"
        )
    losses = [] if model._compile_loss is None else model._compile_loss._flat_losses
    reductions = {str(getattr(one.loss, "reduction", _MEANS[0])) for one in losses}
    if strange := sorted(reductions - set(_MEANS)):
        return (
            f"the reduction of its loss is {strange[0]!r}, but parts of a batch add up to the "
            "whole for a mean only; use reduction='sum_over_batch_size'"
        )
    return None


class KerasStep:
    """Stands for `model.train_function`: takes an iterator, trains a batch, and returns the logs.

    `own`: the model's own function. `distributed`: turns a step of flat arrays into one of all
    ranks, whose fetches are combined by `combined`.
    """

    def __init__(
        self, model: Any, own: Step, world_size: int, distributed: Callable[[Step], Step]
    ) -> None:
        self._model, self._own, self._world_size = model, own, world_size
        self._distributed = distributed
        self._step: Step | None = None
        self._structure: Any = None  # of the first batch
        self._kind: Any = None
        self._batches = self._alone = 0
        self._update = tf.function(self._updated_metrics, reduce_retracing=True)

    def __call__(self, iterator: Iterator[Any]) -> Any:
        data = tree.map_structure(_without_optional, next(iterator))
        data = unpack_x_y_sample_weight(data)
        flat = [value for value in tree.flatten(data) if value is not None]
        rows = _rows(flat)
        self._batches += 1
        if rows % self._world_size:
            if self._step is None:
                raise InvalidInput(
                    f"a batch must divide by the number of ranks, {self._world_size}, but the "
                    f"first one has {rows} rows; set batch_size to a multiple of "
                    f"{self._world_size}"
                )
            return self._by_rank_0(data)
        if self._step is None:
            self._step, self._kind = self._built(data), _kind(data)
        if _kind(data) != self._kind:
            return self._by_rank_0(data)
        results = self._step(*flat)
        return self._update(data, results[OUTPUTS], results[LOSS], rows)

    def close(self) -> None:
        """Warn of the batches that trained on rank 0 alone."""
        atexit.unregister(self.close)
        if self._alone:
            _log.warning(
                "%d of %d batches trained on rank 0 alone: ranks share batches with the arrays and "
                "shapes of the first one whose rows divide by %d; pad others, and drop a smaller "
                "last one",
                self._alone,
                self._batches,
                self._world_size,
            )

    def _by_rank_0(self, data: Any) -> Any:
        if not self._alone:
            atexit.register(self.close)
        self._alone += 1
        return self._own(iter([data]))

    def _built(self, data: Any) -> Step:
        self._model._symbolic_build(data_batch=data)
        if not self._model.optimizer.built:
            self._model.optimizer.build(self._model.trainable_variables)
        refuse(self._model, self._world_size)
        self._structure = data
        return self._distributed(self._trained)

    def _trained(self, *flat: Any) -> dict[str, Any]:
        """One step of a replica, as Keras' own but for the metrics."""
        model, values = self._model, iter(flat)
        x, y, weights = tree.map_structure(
            lambda one: None if one is None else next(values), self._structure
        )
        with tf.GradientTape() as tape:
            outputs = model(x, training=True) if model._call_has_training_arg else model(x)
            with _losses_of_rows(model):
                loss = model._compute_loss(
                    x=x, y=y, y_pred=outputs, sample_weight=weights, training=True
                )
            scaled = model.optimizer.scale_loss(loss)
        if any(getattr(one, "_keras_mask", None) is not None for one in tree.flatten(outputs)):
            raise InvalidInput(
                "`fit` cannot be split between ranks: the outputs have a mask, by which Keras "
                f"weights the loss, and parts of a batch have other weights; {_LOOP}"
            )
        gradients = tape.gradient(scaled, model.trainable_weights)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return {LOSS: loss, OUTPUTS: outputs}

    def _updated_metrics(self, data: Any, outputs: Any, loss: Any, rows: Any) -> Any:
        x, y, weights = data
        self._model._loss_tracker.update_state(loss, sample_weight=rows)
        return self._model.compute_metrics(x, y, outputs, sample_weight=weights)


@contextlib.contextmanager
def _losses_of_rows(model: Any) -> Iterator[None]:
    """Refuse, while a step is traced, a loss that has no value for each row of the batch."""
    losses = [] if model._compile_loss is None else model._compile_loss._flat_losses
    with contextlib.ExitStack() as undo:
        for loss in {id(one.loss): one.loss for one in losses}.values():
            undo.callback(vars(loss).pop, "call")
            loss.call = _of_rows(model, loss)
        yield


def _of_rows(model: Any, loss: Any) -> Callable[[Any, Any], Any]:
    loss_of_rows = loss.call

    def call(y_true: Any, y_pred: Any) -> Any:
        values = loss_of_rows(y_true, y_pred)
        if reason := _not_of_rows(loss, values, tree.flatten(y_pred)[0]):
            raise InvalidInput(
                f"`fit` of {type(model).__name__!r} cannot be split between ranks: the loss "
                f"{loss.name!r} {reason}"
            )
        return values

    return call


def _not_of_rows(loss: Any, values: Any, outputs: Any) -> str | None:
    if isinstance(loss, keras.losses.Circle):
        return "compares all rows of the batch with each other, but a rank has a part of them"
    if getattr(values, "_keras_mask", None) is not None:
        return (
            "has a mask, such as that of ignore_class, by which Keras weights it, and parts of a "
            f"batch have other weights; {_LOOP}"
        )
    shape = values.shape
    if shape.rank is None or shape[:1].as_list() == outputs.shape[:1].as_list() != []:
        return None
    return (
        f"must have a value for each row of the batch, but its result has the shape {shape}; "
        "reduce all axes but the first, as Dice and Tversky do with axis=(1, 2, ...)"
    )


def combined(name: str, values: Sequence[np.ndarray]) -> np.ndarray:
    """The fetch `name` of the whole batch, from those of all replicas."""
    if name == LOSS:
        mean: np.ndarray = np.mean(values, axis=0, dtype=values[0].dtype)
        return mean
    return np.concatenate(values)


def _without_optional(value: Any) -> Any:
    return None if isinstance(value, tf.experimental.Optional) else value


def _kind(data: Any) -> Any:
    """All of a batch but its values and its number of rows."""
    return tree.map_structure(
        lambda one: "" if one is None else f"{tf.as_dtype(one.dtype).name} {one.shape[1:]}", data
    )


def _rows(flat: Sequence[Any]) -> int:
    for value in flat:
        if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
            raise InvalidInput(
                f"a batch that is split between ranks must be dense, but has a "
                f"{type(value).__name__}; convert it, by `.to_tensor()` or `tf.sparse.to_dense`"
            )
    sizes = sorted({int(value.shape[0]) for value in flat if len(value.shape)})
    if len(sizes) != 1 or any(not len(value.shape) for value in flat):
        raise InvalidInput(
            f"all arrays of a batch must have the same first dimension, but have {sizes}"
        )
    return sizes[0]
