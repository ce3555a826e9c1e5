"""Steers a single-device script that trains by `keras.Model.fit` or `train_on_batch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

from autotune.errors import InvalidInput
from runtime_rewriter.horovod.importing import changed_on_import, replace_attribute
from runtime_rewriter.rendezvous import refuse_lone_ranks

_TRAINER = "keras.src.backend.tensorflow.trainer"
_OTHERS = ("horovod.tensorflow", "horovod.keras")
"""Modules that distribute a model of Keras themselves."""


@contextmanager
def keras_steered() -> Iterator[None]:
    """Let the first model that the script fits train on all ranks of a launched world.

    Further models train on rank 0 alone, which is exact, too.
    """
    fitting = _Fitting()
    with changed_on_import({_TRAINER: fitting.change}):
        yield


class _Fitting:
    def __init__(self) -> None:
        self._model: Any = None

    def change(self, trainer: ModuleType, undo: ExitStack) -> None:
        """Replace the function that `fit` calls for each batch."""
        kind: Any = trainer.TensorFlowTrainer
        own_make = kind.make_train_function

        @wraps(own_make)
        def make_train_function(model: Any, force: bool = False) -> Any:
            earlier = model.train_function
            own_make(model, force)
            own = model.train_function
            if own is not earlier and self._takes(model):
                from runtime_rewriter.rank.tensorflow_step import distributed_fit, is_distributing

                if self._model is None and is_distributing():
                    return own  # the script has distributed a step of its own by our line
                self._model = model
                model.train_function = distributed_fit(model, own)
            return model.train_function

        replace_attribute(kind, "make_train_function", make_train_function, undo)

    def _takes(self, model: Any) -> bool:
        if any(map(sys.modules.get, _OTHERS)):
            return False
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            refuse_lone_ranks(os.environ)
            return False
        if model._distribute_strategy is not None:
            name = type(model._distribute_strategy).__name__.replace(
                "CollectiveAllReduceStrategy", "MultiWorkerMirroredStrategy"
            )
            raise InvalidInput(
                f"Keras 3 does not `fit` on several hosts under {name}; build and compile the "
                "model without `with strategy.scope():`, and autotune distributes `model.fit(...)` "
                "itself"
            )
        if self._model is model:
            raise InvalidInput(
                f"{type(model).__name__!r} is compiled again after its training has begun, but the "
                "ranks train the step of the first `compile`; start a script for each of them"
            )
        return self._model is None
