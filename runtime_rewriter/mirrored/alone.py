"""Lets a step that is traced sum what its own worker has computed, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher

from autotune.errors import InvalidInput


@contextmanager
def without_other_workers() -> Iterator[None]:
    """Within, the collectives of steps that are traced give what the worker puts in.

    Raises `InvalidInput` at the end if one gathered values, whose shapes are those of all workers.
    """
    gathered: list[Any] = []

    def gather(launcher: Any, tensor: Any, *rest: Any) -> Any:
        gathered.append(tensor)
        return tf.identity(tensor)

    substitutes = {
        "all_reduce": lambda launcher, tensor, *rest: tf.identity(tensor),
        "batch_all_reduce": lambda launcher, packs, *rest: [
            tf.identity(tensor) for pack in packs for tensor in pack
        ],
        "all_reduce_indexed_slices": lambda launcher, rows, *rest: rows,
        "all_gather": gather,
        "_all_gather": gather,
    }
    originals = {name: getattr(CollectiveReplicaLauncher, name) for name in substitutes}
    for name, substitute in substitutes.items():
        setattr(CollectiveReplicaLauncher, name, substitute)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(CollectiveReplicaLauncher, name, original)
    if gathered:
        raise InvalidInput(
            "the step cannot be recorded: it gathers values of all workers, and one of them is "
            "recorded alone; move that out of the tf.function"
        )
