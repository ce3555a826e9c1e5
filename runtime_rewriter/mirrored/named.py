"""Names the gradients that a step sums, by the variables of which they are the gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from autotune.errors import InvalidInput
from autotune.workload import Variable
from runtime_rewriter.tensorflow.gradient_marks import VARIABLE, Marks

_MOST_OPS = 2000
"""Ops between a gradient and its sum that are looked at, for clipping and scaling."""


def described(tensors: Sequence[Any], marks: Marks) -> list[Variable]:
    """Describe the variable of each tensor, or raise `InvalidInput`."""
    numbers = [_gradient_of(tensor, marks) for tensor in tensors]
    variables: list[Variable] = []
    names: set[str] = set()
    for tensor, number in zip(tensors, numbers, strict=True):
        if number is None:
            raise InvalidInput(
                "replica_context.all_reduce must sum the gradients of variables, and other values "
                "by another call, but one of its tensors is not the gradient of a variable"
            )
        if numbers.count(number) > 1:
            raise InvalidInput(
                "a step must sum one gradient of each variable, but sums several of "
                f"{marks.variables[number].name!r}; add them up on the worker first"
            )
        variable = marks.variables[number]
        name = unused(str(variable.name).partition(":")[0], names)
        names.add(name)
        sparse = isinstance(tensor, tf.IndexedSlices)
        variables.append(Variable(name, tuple(variable.shape), tensor.dtype.name, sparse))
    return variables


def unused(name: str, names: set[str]) -> str:
    """Return `name`, or the first of `name_1`, `name_2`, ... that is not among `names`."""
    numbered = (f"{name}_{count}" for count in itertools.count(1))
    return next(one for one in itertools.chain([name], numbered) if one not in names)


def is_gradient(tensor: Any, marks: Marks) -> bool:
    """Whether the tensor comes from the gradient of a variable, and has its shape."""
    return _gradient_of(tensor, marks) is not None


def _gradient_of(tensor: Any, marks: Marks) -> int | None:
    """The mark of a gradient; None for other values, such as the norm of gradients."""
    number = _nearest(tensor)
    if number is None or isinstance(tensor, tf.IndexedSlices):
        return number
    return number if tensor.shape.is_compatible_with(marks.variables[number].shape) else None


def _nearest(tensor: Any) -> int | None:
    """The mark that is reached first from the tensor, against the flow of data."""
    source = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    waiting, seen = [source.op], {source.op.name}
    for op in waiting:
        try:
            return int(op.get_attr(VARIABLE))
        except ValueError:
            pass
        for upstream in op.inputs:
            if upstream.op.name not in seen and len(waiting) < _MOST_OPS:
                seen.add(upstream.op.name)
                waiting.append(upstream.op)
    return None
