"""Tells kinds of batches apart, by the arguments of a step that emulated accelerators play."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from autotune.errors import InvalidInput


def batch_kind(arguments: Any) -> Hashable:
    """Shapes and dtypes of all arrays in a structure of arguments, and other values themselves."""
    return tuple(_kind(one) for one in tf.nest.flatten(arguments))


def _kind(argument: Any) -> Hashable:
    if isinstance(argument, tf.data.Iterator | tf.distribute.DistributedIterator):
        raise InvalidInput(
            "accelerators cannot be emulated: the step takes its batch from an iterator, which a "
            "played step would never exhaust; pass the batch as an argument"
        )
    if hasattr(argument, "shape") and hasattr(argument, "dtype"):
        return (tuple(argument.shape), str(argument.dtype))
    parts = tf.nest.flatten(argument, expand_composites=True)
    if len(parts) == 1 and parts[0] is argument:
        return repr(argument)
    return tuple(map(_kind, parts))
