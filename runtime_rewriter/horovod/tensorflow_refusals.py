"""What is refused in TensorFlow scripts of Horovod, each with what to type instead."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from autotune.errors import InvalidInput
from runtime_rewriter.horovod.connection import ELASTIC_REFUSAL
from runtime_rewriter.horovod.importing import replace_attribute
from runtime_rewriter.horovod.process_sets import check_all_ranks

if TYPE_CHECKING:
    from runtime_rewriter.horovod.tensorflow_synchronizer import TapeSettings

OPTIMIZER_REFUSAL = (
    "{name} cannot be controlled, and Horovod 0.28.1 does not average the gradients of optimizers "
    "of Keras 3; average them with a tape instead: tape = hvd.DistributedGradientTape(tape); "
    "variables = [variable.value for variable in model.trainable_variables]; "
    "optimizer.apply_gradients(zip(tape.gradient(loss, variables), model.trainable_variables))"
)
CALLBACKS = {
    "BroadcastGlobalVariablesCallback": (
        "call hvd.broadcast_variables([variable.value for variable in model.variables], "
        "root_rank=0) before training"
    ),
    "MetricAverageCallback": "average the metrics by hvd.allreduce in a callback of your own",
    "LearningRateScheduleCallback": "use keras.callbacks.LearningRateScheduler",
    "LearningRateWarmupCallback": "use keras.callbacks.LearningRateScheduler",
}
"""Horovod's callback -> what does the same with Keras 3. It calls functions of Keras 2."""
THREADS_REFUSAL = (
    "TensorFlow needs at least 2 inter-op threads, since one waits for messages while another "
    "sends them, but has 1; call tf.config.threading.set_inter_op_parallelism_threads(2)"
)


CONCRETE_REFUSAL = (
    "a step must be a call of its tf.function, but the script traces or calls a concrete function "
    "of it; call train_step(batch) instead of a concrete function"
)


def refuse_optimizers(package: str, module: ModuleType, undo: ExitStack) -> None:
    """Refuse what wraps optimizers in Horovod's Keras modules, and callbacks that fail."""
    own: Any = module
    for name in ("DistributedOptimizer", "PartialDistributedOptimizer", "load_model"):
        if hasattr(own, name):
            replace_attribute(own, name, partial(refuse_optimizer, f"{package}.{name}"), undo)
    for name, instead in CALLBACKS.items():
        refuse = partial(_refuse_callback, f"{package}.callbacks.{name}", instead)
        replace_attribute(own.callbacks, name, refuse, undo)


def refuse_optimizer(name: str, *args: object, **kwargs: object) -> NoReturn:
    raise InvalidInput(OPTIMIZER_REFUSAL.format(name=name))


def _refuse_callback(name: str, instead: str, *args: object, **kwargs: object) -> NoReturn:
    raise InvalidInput(f"{name} of Horovod 0.28.1 fails with Keras 3; {instead}")


def refuse_elastic(*args: object, **kwargs: object) -> NoReturn:
    raise InvalidInput(ELASTIC_REFUSAL)


def check_tape(horovod: Any, settings: TapeSettings) -> None:
    """Raise `InvalidInput` for a tape that does not average gradients of all ranks."""
    if settings.op == horovod.Adasum:
        raise InvalidInput(
            "hvd.DistributedGradientTape(op=hvd.Adasum) combines gradients as no plan describes; "
            "use op=hvd.Average"
        )
    check_all_ranks(horovod, "tape", settings.process_set)


def check_complete(
    tuned: int, positions: Sequence[int], gradients: Sequence[Any], known: Sequence[int]
) -> None:
    """Raise `InvalidInput` unless these are the gradients of exactly the `tuned` variables.

    `known`: the numbers of their gradients, and of those that are rows.
    """
    others = [one for n, one in enumerate(gradients) if n not in known and one is not None]
    if others or sorted(positions) != list(range(tuned)):
        raise InvalidInput(
            f"each step must compute the gradients of the same {tuned} variables, but one "
            f"computes those of {len(positions)} of them and of {len(others)} others; compute all "
            "in one tape.gradient()"
        )


def check_dense(names: Sequence[str], gradients: Sequence[Any]) -> None:
    """Raise `InvalidInput` if a gradient that a plan has is rows."""
    import tensorflow as tf

    for name, gradient in zip(names, gradients, strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            raise InvalidInput(
                "a gradient must stay dense if it is in the first step, but that of "
                f"{name} has become rows (tf.IndexedSlices); pass sparse_as_dense=True to "
                "hvd.DistributedGradientTape"
            )


def check_threads() -> None:
    """Raise `InvalidInput` if a wait for messages would block TensorFlow."""
    import tensorflow as tf

    threads = tf.config.threading.get_inter_op_parallelism_threads()
    if (threads or len(os.sched_getaffinity(0))) < 2:
        raise InvalidInput(THREADS_REFUSAL)
