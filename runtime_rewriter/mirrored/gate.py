"""The numerics gate of a script's step: the sums of a plan against the script's own messages.

Both are in one trace, with the same gradients. Rows are compared in the order of their indices,
since a plan that cuts a variable gathers them slice by slice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from autotune.strategy_space.plan import Plan
from autotune.workload import Variable
from runtime_rewriter.mirrored.local_variables import local_variable
from runtime_rewriter.tolerances import GateResult, judge_differences


class ComparedSums:
    """What the trace of a gated step notes: (error, largest value) of each variable."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        self._variables = variables
        self._held = local_variable(tf.float64, [len(variables), 2])

    def note(self, planned: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Called while the step is traced."""
        pairs = [_compared(planned[one.name], own[one.name]) for one in self._variables]
        self._held.assign(tf.stack([tf.stack(pair) for pair in pairs]))

    def result(self, plan: Plan) -> GateResult:
        """Judge the last step."""
        errors, largest = self._held.numpy().T
        return judge_differences(
            [one.name for one in self._variables],
            [one.dtype for one in self._variables],
            errors,
            largest,
            # rows are not added up
            [1 if one.sparse else plan.world_size for one in self._variables],
            plan,
        )


def _compared(planned: Any, own: Any) -> tuple[Any, Any]:
    same: Any = True
    if isinstance(own, tf.IndexedSlices):
        planned, own = _sorted(planned), _sorted(own)
        same = tf.reduce_all(planned.indices == own.indices)
        planned, own = planned.values, own.values
    planned, own = tf.cast(planned, tf.float64), tf.cast(own, tf.float64)
    nothing, infinite = (tf.constant(value, tf.float64) for value in (0.0, math.inf))
    finite = tf.math.is_finite(own)
    apart = tf.where(finite, tf.abs(planned - own), nothing)
    apart = tf.where(tf.math.is_nan(apart), infinite, apart)
    error = tf.maximum(tf.reduce_max(apart), nothing)  # the maximum of nothing is -inf
    largest = tf.maximum(tf.reduce_max(tf.where(finite, tf.abs(own), nothing)), nothing)
    return tf.where(same, error, infinite), largest


def _sorted(rows: Any) -> Any:
    order = tf.argsort(rows.indices, stable=True)
    return tf.IndexedSlices(tf.gather(rows.values, order), tf.gather(rows.indices, order))
