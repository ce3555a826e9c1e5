"""A script's collectives, which carry its own messages and those of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autotune.strategy_space.plan import Plan
from runtime_rewriter.mirrored.summed import Collectives, summed


@dataclass(frozen=True)
class ScriptSums:
    """`own`: the object that sums for the script, by its method `original`, with `rest`: the number
    of this replica on the worker, and the script's `CommunicationOptions`.
    """

    original: Callable[..., Any]
    own: Any
    operation: Any
    rest: tuple[Any, ...]

    @property
    def launcher(self) -> Any:
        """Starts single collectives between all workers."""
        return self.own._launchers[self.rest[0]]

    @property
    def options(self) -> Any:
        return self.rest[-1]

    @property
    def world_size(self) -> int:
        size: int = self.own._group_size
        return size

    def sums(self, plan: Plan | None, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """The sum or mean over all workers of each gradient; None: by the script's own messages."""
        if plan is None:
            every = list(gradients.values())
            own = self.original(self.own, self.operation, every, *self.rest)
            return dict(zip(gradients, own, strict=True))
        collectives = Collectives(
            lambda tensor: self.launcher.all_reduce(tensor, None, self.options),
            lambda rows: self.launcher.all_reduce_indexed_slices(rows, self.options),
            self.world_size,
        )
        sums = summed(plan, gradients, collectives)
        mean = self.operation == tf.distribute.ReduceOp.MEAN
        return {
            name: _divided(sums[name], self.world_size) if mean else sums[name]
            for name in gradients
        }


def _divided(total: Any, count: int) -> Any:
    if not isinstance(total, tf.IndexedSlices):
        return total / count
    return tf.IndexedSlices(total.values / count, total.indices, total.dense_shape)
