"""Sizes of a model's parameters, from the question or from recorded shapes of their gradients."""

from __future__ import annotations

import numpy as np

from autotune.arrays import FloatArray
from autotune.errors import InvalidInput
from autotune.profiling.graph.host_units import ACCUMULATE
from autotune.whatif.base import Base
from autotune.whatif.question import Question


def parameter_shapes(base: Base) -> set[tuple[int, ...]]:
    """The shapes of all parameters whose gradients the trace shows with shapes."""
    return {
        operator.inputs.dims[0]
        for operator in base.names.operators
        if operator.name == ACCUMULATE and operator.inputs is not None
    }


def gradient_bytes(base: Base, question: Question) -> FloatArray:
    """(K,) the size of each parameter's gradient. Raises `InvalidInput` if they are unknown."""
    if question.gradients is not None:
        return np.array([gradient.size_bytes for gradient in question.gradients])
    inputs = [one.inputs for one in base.names.operators if one.name == ACCUMULATE]
    sizes = [one.size_bytes() for one in inputs if one is not None]
    known = [size for size in sizes if size is not None]
    if not known or len(known) < len(sizes):
        raise InvalidInput(
            "the change needs the sizes of the parameters, but the trace does not state them; "
            "record with shapes (record_shapes=True), or pass --parameters FILE"
        )
    return np.array(known, dtype=np.float64)
