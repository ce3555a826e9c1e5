"""Tells kinds of batches apart, by the arguments of a step that is played or recorded."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from autotune.errors import InvalidInput

EMULATION_REFUSED = "accelerators cannot be emulated"


def batch_kind(arguments: Any, refused: str = EMULATION_REFUSED) -> Hashable:
    """Shapes and dtypes of all arrays in a structure of arguments, and other values themselves.

    Raises `InvalidInput` for an iterator, which begins with what is `refused` then.
    """
    return tuple(_kind(one, refused) for one in tf.nest.flatten(arguments))


def _kind(argument: Any, refused: str) -> Hashable:
    if isinstance(argument, tf.data.Iterator | tf.distribute.DistributedIterator):
        raise InvalidInput(
            f"{refused}: the step takes its batch from an iterator, which a call that does not run "
            "the script's own function would never exhaust; pass the batch as an argument"
        )
    if hasattr(argument, "shape") and hasattr(argument, "dtype"):
        return (tuple(argument.shape), str(argument.dtype))
    parts = tf.nest.flatten(argument, expand_composites=True)
    if len(parts) == 1 and parts[0] is argument:
        return repr(argument)
    return tuple(_kind(part, refused) for part in parts)
