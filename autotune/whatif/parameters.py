"""Sizes of a model's parameters, from the question or from recorded shapes of their gradients."""

from __future__ import annotations

from math import prod

import numpy as np

from autotune.arrays import FloatArray
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.question import Question

ACCUMULATION = "torch::autograd::AccumulateGrad"
TYPE_BYTES = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "long int": 8,
    "int": 4,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
}
"""Bytes of an element by the type's name in Kineto traces."""


def parameter_shapes(base: Base) -> set[tuple[int, ...]]:
    """The shapes of all parameters whose gradients the trace shows with shapes."""
    return {
        operator.inputs.dims[0]
        for operator in base.names.operators
        if operator.name == ACCUMULATION and operator.inputs is not None
    }


def gradient_bytes(base: Base, question: Question) -> FloatArray:
    """(K,) the size of each parameter's gradient. Raises `InvalidInput` if they are unknown."""
    if question.gradients is not None:
        return np.array([gradient.size_bytes for gradient in question.gradients])
    sizes = [
        prod(operator.inputs.dims[0]) * TYPE_BYTES.get(operator.inputs.types[0], 4)
        for operator in base.names.operators
        if operator.name == ACCUMULATION and operator.inputs is not None
    ]
    if not sizes:
        raise InvalidInput(
            "the change needs the sizes of the parameters, but the trace does not state them; "
            "record with shapes (record_shapes=True), or pass --parameters FILE"
        )
    return np.array(sizes, dtype=np.float64)
