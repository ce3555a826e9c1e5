"""Lets the first worker compute a step before all others, as if it had the machine for itself.

The others wait for a key in TensorFlow's coordination service, which workers share from the
strategy on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from autotune.errors import SynchronizationError

_NEVER = 0
"""What the service takes for no time limit."""


class Turns:
    """The turns of one worker; workers count steps in turns alike. A turn comes within `wait_s`."""

    def __init__(self, worker: int, wait_s: float) -> None:
        self._worker, self._wait_ms = worker, max(int(wait_s * 1e3), _NEVER + 1)
        self._steps = 0

    def wait(self) -> None:
        """Call it before each step in turns. Raises `SynchronizationError` if no turn comes."""
        self._steps += 1
        if self._worker == 0:
            return
        try:
            context.context().get_config_key_value(self._key, self._wait_ms)
        except tf.errors.DeadlineExceededError as error:
            raise SynchronizationError(
                f"the first worker has not computed its step within {self._wait_ms / 1e3:g} s"
            ) from error

    def passed_on(self, gradients: Sequence[Any]) -> list[Any]:
        """Called while the step is traced: the gradients, known only when the turn is over."""
        if self._worker > 0:
            return list(gradients)
        tensors = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]
        with tf.control_dependencies(tensors):
            end = tf.numpy_function(self._pass_on, [], tf.int32)
        with tf.control_dependencies([end]):
            return [
                tf.IndexedSlices(tf.identity(one.values), one.indices, one.dense_shape)
                if isinstance(one, tf.IndexedSlices)
                else tf.identity(one)
                for one in gradients
            ]

    @property
    def _key(self) -> str:
        return f"autotune/turn/{self._steps}"

    def _pass_on(self) -> np.int32:
        context.context().set_config_key_value(self._key, "over")
        return np.int32(0)
