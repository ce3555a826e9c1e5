"""Times of one step, noted by ops of its trace, all on this host's clock.

| symbol | meaning | unit |
|---|---|---|
| start_s | the call of the step | s |
| forward_s | start until the loss is known | s |
| ready_s | from there until a gradient is known | s |
| update_s | the last sum has arrived, until the call returns | s |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from runtime_rewriter.mirrored.local_variables import local_variable


@dataclass(frozen=True)
class Observation:
    """One step. `ready_s` and `touched_rows` by variable, the latter of sparse gradients."""

    forward_s: float
    ready_s: Mapping[str, float]
    update_s: float
    touched_rows: Mapping[str, float]


class Stamps:
    """The times of the step that is traced, from the call of `GradientTape.gradient` on.

    `earlier`: those of an earlier trace of the step. Whichever runs, the times are in one place.
    """

    def __init__(self, loss: Any, earlier: Stamps | None = None) -> None:
        self._held: Any = None if earlier is None else earlier._held
        self._forward = _after(tf.nest.flatten(loss))
        self._names: list[str] = []
        self._sparse: list[str] = []

    def note(self, gradients: Mapping[str, Any], sums: Sequence[Any]) -> None:
        """Note when the gradients are known, and when all sums are."""
        self._names = list(gradients)
        rows = {name: one for name, one in gradients.items() if isinstance(one, tf.IndexedSlices)}
        self._sparse = list(rows)
        touched = [tf.size(tf.unique(one.indices).y, tf.int64) for one in rows.values()]
        stamps = [
            self._forward,
            _after(sums),
            *(_after([gradients[name]]) for name in self._names),
            *(tf.cast(count, tf.float64) for count in touched),
        ]
        if self._held is None:
            self._held = local_variable(tf.float64, [len(stamps)])
        self._held.assign(tf.stack(stamps))

    def read(self, start_s: float, end_s: float) -> Observation:
        """The times of the step that was called at `start_s` and returned at `end_s`."""
        forward_s, summed_s, *rest = self._held.numpy().tolist()
        ready, touched = rest[: len(self._names)], rest[len(self._names) :]
        return Observation(
            max(forward_s - start_s, 0.0),
            {
                name: max(at_s - forward_s, 0.0)
                for name, at_s in zip(self._names, ready, strict=True)
            },
            max(end_s - summed_s, 0.0),
            dict(zip(self._sparse, touched, strict=True)),
        )


def _after(values: Sequence[Any]) -> Any:
    """The time at which all values are known."""
    tensors = [one.values if isinstance(one, tf.IndexedSlices) else one for one in values]
    with tf.control_dependencies(tensors):
        return tf.timestamp()
