"""Moves the values of variables, by original name, between files, numpy and a distributed graph.

The files are TensorFlow's checkpoints as `tf.compat.v1.train.Saver` writes and reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from autotune.errors import InvalidInput
from runtime_rewriter.tensorflow.chunks import chunks
from runtime_rewriter.tensorflow.distributed_graph import DistributedGraph, PlacedVariable
from runtime_rewriter.tensorflow.kept_state import KeptState, KeptTensor

MOST_BYTES = 2**28
"""Of one run: a session copies what it moves several times, and a message ends at 2 GiB."""


def scatter(
    session: Any,
    graph: DistributedGraph,
    values: Mapping[str, np.ndarray],
    most_bytes: int = MOST_BYTES,
) -> None:
    """Set every variable of the distributed graph from the values of a single-device program.

    What compressors keep starts anew: a program on one device has no such state. `most_bytes`: of
    one run.
    """
    missing = sorted({one.variable for one in graph.variables} - set(values))
    if missing:
        raise InvalidInput(f"a checkpoint needs every variable, but lacks {missing[0]!r}")
    given = [(one, one.part_of(values[one.variable])) for one in graph.variables]
    _assign(session, [*given, *((one, one.initial) for one in graph.kept)], most_bytes)


def scatter_kept(session: Any, graph: DistributedGraph, state: KeptState) -> None:
    """Let compressors continue with the state of an earlier graph."""
    _assign(session, [(one, state.given(one)) for one in graph.kept])


def gather_kept(session: Any, graph: DistributedGraph, state: KeptState) -> None:
    """Read the state of compressors into `state`."""
    state.take(graph.kept, _fetched(session, [one.value for one in graph.kept]))


def gather(
    session: Any, graph: DistributedGraph, most_bytes: int = MOST_BYTES
) -> dict[str, np.ndarray]:
    """Return the values of a single-device program that continues from here.

    Statistics and seeds that replicas keep for themselves are those of the first. `most_bytes`: of
    one run.
    """
    held = [one for one in graph.variables if one.authoritative]
    parts: dict[str, list[tuple[PlacedVariable, np.ndarray]]] = defaultdict(list)
    values = _fetched(session, [one.value for one in held], most_bytes)
    for one, value in zip(held, values, strict=True):
        parts[one.variable].append((one, value))
    return {name: _joined(found) for name, found in parts.items()}


def _assign(
    session: Any,
    given: Sequence[tuple[PlacedVariable | KeptTensor, np.ndarray]],
    most_bytes: int = MOST_BYTES,
) -> None:
    for first, end in chunks([value.nbytes for _, value in given], most_bytes):
        some = given[first:end]
        session.run([one.assign for one, _ in some], {one.placeholder: v for one, v in some})


def _fetched(
    session: Any, tensors: Sequence[str], most_bytes: int = MOST_BYTES
) -> list[np.ndarray]:
    values: list[np.ndarray] = []
    in_graph = [session.graph.get_tensor_by_name(name) for name in tensors]
    sizes_bytes = [(one.shape.num_elements() or 0) * one.dtype.size for one in in_graph]
    for first, end in chunks(sizes_bytes, most_bytes):
        values += session.run(tensors[first:end])
    return values


def _joined(parts: list[tuple[PlacedVariable, np.ndarray]]) -> np.ndarray:
    placed, value = parts[0]
    if placed.axis is None:
        return value
    in_order = sorted(parts, key=lambda part: part[0].start)
    return np.concatenate([value for _, value in in_order], axis=placed.axis)


def write_checkpoint(prefix: Path, values: Mapping[str, np.ndarray]) -> None:
    """Write values that were gathered, so that the single-device program can restore them."""
    names = sorted(values)
    with tf.init_scope():
        tf.raw_ops.SaveV2(
            prefix=str(prefix),
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=[tf.constant(values[name]) for name in names],
        )


def read_checkpoint(prefix: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return what the single-device program has saved of these variables, to scatter it.

    Raises `InvalidInput` if there is no such checkpoint, or it lacks one of them.
    """
    try:
        reader = tf.train.load_checkpoint(str(prefix))
    except (tf.errors.NotFoundError, ValueError) as error:
        raise InvalidInput(f"{prefix} must be the prefix of a checkpoint: {error}") from error
    wanted = sorted(names)
    lacking = [name for name in wanted if not reader.has_tensor(name)]
    if lacking:
        raise InvalidInput(
            f"checkpoint {prefix} needs every variable of the graph, but lacks {lacking[0]!r}; "
            "save it by tf.compat.v1.train.Saver() of the same program"
        )
    return {name: np.asarray(reader.get_tensor(name)) for name in wanted}
