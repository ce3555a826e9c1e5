"""Marks the gradients of variables while a program is traced.

`tf.GradientTape.gradient` and `tf.gradients` are the two places where TensorFlow hands gradients
to a program. Within `marked_gradients`, each gradient of a variable passes through an Identity node
whose attributes name the variable. The node survives in function bodies, so a gradient that a
nested `tf.function` computes is found after inlining.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python.eager import backprop
from tensorflow.python.ops import gradients_util

VARIABLE = "_autotune_gradient_of"
PART = "_autotune_gradient_part"


class Marks:
    """The variables whose gradients were marked, by their number in the mark."""

    def __init__(self) -> None:
        self.variables: list[tf.Variable] = []

    def marked(self, gradient: Any, source: Any) -> Any:
        variable = _variable_of(source)
        if gradient is None or variable is None or tf.executing_eagerly():
            return gradient
        number = self._number(variable)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(
                _identity(gradient.values, number, "values"),
                _identity(gradient.indices, number, "indices"),
                gradient.dense_shape,
            )
        return _identity(gradient, number, "dense")

    def _number(self, variable: tf.Variable) -> int:
        for number, known in enumerate(self.variables):
            if known is variable:
                return number
        self.variables.append(variable)
        return len(self.variables) - 1


@contextmanager
def marked_gradients() -> Iterator[Marks]:
    """Mark each gradient of a variable that is traced within this context."""
    marks = Marks()
    tape_gradient = backprop.GradientTape.gradient
    graph_gradients = gradients_util._GradientsHelper

    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return _marked_all(marks, tape_gradient(tape, target, sources, *args, **kwargs), sources)

    def helper(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        return _marked_all(marks, graph_gradients(ys, xs, *args, **kwargs), xs)

    with (
        _replaced(backprop.GradientTape, "gradient", gradient),
        _replaced(gradients_util, "_GradientsHelper", helper),
    ):
        yield marks


@contextmanager
def _replaced(owner: Any, name: str, substitute: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, substitute)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _marked_all(marks: Marks, gradients: Any, sources: Any) -> Any:
    flat_sources = tf.nest.flatten(sources)
    flat = tf.nest.flatten(gradients, expand_composites=False)
    if len(flat) != len(flat_sources):
        return gradients
    marked = [marks.marked(one, source) for one, source in zip(flat, flat_sources, strict=True)]
    return tf.nest.pack_sequence_as(gradients, marked, expand_composites=False)


def _variable_of(source: Any) -> tf.Variable | None:
    """Return the TensorFlow variable of a source; Keras wraps its own around one."""
    source = getattr(source, "value", source) if not isinstance(source, tf.Variable) else source
    return source if isinstance(source, tf.Variable) else None


def _identity(tensor: Any, number: int, part: str) -> Any:
    marked = tf.identity(tensor)
    marked.op._set_attr(VARIABLE, AttrValue(i=number))
    marked.op._set_attr(PART, AttrValue(s=part.encode()))
    return marked
