"""Variables of one worker, which a trace sets and Python reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


def local_variable(dtype: Any, shape: Sequence[int | None]) -> Any:
    """Zeros that no strategy mirrors, also within its scope. Dimensions of None are 0 first."""
    with tf.init_scope():
        start = tf.zeros([size or 0 for size in shape], dtype)
        return ResourceVariable(start, trainable=False, shape=tf.TensorShape(shape))
