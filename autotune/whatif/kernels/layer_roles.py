"""Which device ops are convolutions, batchnorms, ReLUs and poolings, and the two passes of each.

By the operator that launches an op, or by the name of the kernel where the operator is unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from autotune.arrays import IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base, Operator
from autotune.whatif.kernels.situations import execution_order


class Role(IntEnum):
    """What a device op does."""

    OTHER = 0
    CONVOLUTION = 1
    BATCHNORM = 2
    RELU = 3
    POOL = 4


_BY_OPERATOR = (
    (Role.CONVOLUTION, re.compile(r"^\S*conv(?!ert)", re.IGNORECASE)),
    (Role.BATCHNORM, re.compile(r"^\S*batch_?norm", re.IGNORECASE)),
    (Role.POOL, re.compile(r"^\S*pool", re.IGNORECASE)),
    (
        Role.RELU,
        re.compile(r"aten::(?:leaky_)?relu6?_?(?= |$)|aten::hardtanh|(?:Relu|Hardtanh)\w*Backward"),
    ),
)
"""Expressions for "name outer" of an operator; the first that matches counts."""
_BY_KERNEL = (
    (
        Role.CONVOLUTION,
        re.compile(r"scudnn|fprop|dgrad|wgrad|winograd|convol|implicit_gemm|conv\d?d"),
    ),
    (Role.BATCHNORM, re.compile(r"\bbn_[fb]w|batch_?norm", re.IGNORECASE)),
    (Role.POOL, re.compile(r"pool", re.IGNORECASE)),
    (Role.RELU, re.compile(r"relu|threshold_kernel|launch_clamp_scalar", re.IGNORECASE)),
)


def roles(base: Base) -> IntArray:
    """(N,) the role of each device op; OTHER for ops of the host."""
    by_operator = [_operator_role(one) for one in base.names.operators]
    of_operator = np.array([*by_operator, Role.OTHER], dtype=np.int64)
    by_name = {name: _first(_BY_KERNEL, name) for name in set(base.names.ops)}
    of_kernel = np.array([by_name[name] for name in base.names.ops], dtype=np.int64)
    known = np.where(base.operator == NONE, of_kernel, of_operator[base.operator])
    result: IntArray = np.where(base.on_device & (base.queue != NONE), known, Role.OTHER)
    return result


def _operator_role(operator: Operator) -> Role:
    return _first(_BY_OPERATOR, f"{operator.name} {operator.outer}")


def _first(expressions: Sequence[tuple[Role, re.Pattern[str]]], text: str) -> Role:
    return next((role for role, pattern in expressions if pattern.search(text)), Role.OTHER)


def input_bytes(operator: Operator, number: int = 0) -> int | None:
    """Bytes of an operator's input; None where its shape or type was not recorded."""
    inputs = operator.inputs
    if inputs is None or number >= len(inputs.dims) or not inputs.dims[number]:
        return None
    return inputs.size_bytes(number)


def output_elements(operator: Operator) -> int | None:
    """Elements of an elementwise operator's result; None where shapes were not recorded."""
    if operator.inputs is None:
        return None
    try:
        return math.prod(np.broadcast_shapes(*operator.inputs.dims))
    except ValueError:  # not elementwise: the inputs do not broadcast
        return None


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's device ops in both passes, each in the order of execution."""

    operator: Operator
    forward: IntArray
    backward: IntArray


def convolutions(base: Base) -> tuple[Layer, ...]:
    """The convolutions in the order of the forward pass.

    The backward pass goes in the reverse order, as autograd's does; where shapes were recorded they
    must agree. Raises `InvalidInput` for a trace without convolutions, without their
    operators, or whose passes do not match.
    """
    chosen = roles(base) == Role.CONVOLUTION
    if not chosen.any():
        raise InvalidInput("the trace has no convolutions")
    if np.all(base.operator[chosen] == NONE):
        raise InvalidInput(
            "the trace does not state which operators launch its convolutions; record host events, "
            "too (ProfilerActivity.CPU)"
        )
    order = execution_order(base, chosen)
    forward, backward = (
        _calls(base, order[(base.kind[order] == Kind.BACKWARD) == is_backward])
        for is_backward in (False, True)
    )
    backward = _of_weights(base, backward)
    if len(forward) != len(backward):
        raise InvalidInput(
            "each convolution must run once forward and once backward, but "
            f"{len(forward)} run forward and {len(backward)} backward; is a part of the model "
            "computed twice, or frozen?"
        )
    layers = []
    for ops, gradient in zip(forward, reversed(backward), strict=True):
        operator = base.names.operators[base.operator[ops[0]]]
        other = base.names.operators[base.operator[gradient[0]]]
        _check_pair(operator, other)
        layers.append(Layer(operator, ops, gradient))
    return tuple(layers)


def _calls(base: Base, order: IntArray) -> list[IntArray]:
    """The ops of each operator call, calls in the order of their first ops."""
    calls: dict[int, list[int]] = {}
    for op in order.tolist():
        calls.setdefault(int(base.operator[op]), []).append(op)
    calls.pop(NONE, None)
    return [np.array(ops) for ops in calls.values()]


def _of_weights(base: Base, calls: list[IntArray]) -> list[IntArray]:
    """Only the calls that compute gradients of weights, where inputs' have calls of their own."""
    of_weights = [
        ops for ops in calls if "weight" in base.names.operators[base.operator[ops[0]]].name
    ]
    return of_weights or calls


def _check_pair(forward: Operator, backward: Operator) -> None:
    """Raise `InvalidInput` if the gradient's operator does not read the layer's input.

    Gradients of weights read no weights, so the shapes of the inputs are compared.
    """
    if forward.inputs is None or backward.inputs is None:
        return
    read = forward.inputs.dims[0]
    if read and read not in backward.inputs.dims:
        raise InvalidInput(
            "the backward pass must go through convolutions in the reverse order, but one with an "
            f"input of {list(read)} meets a gradient that reads "
            f"{[list(dims) for dims in backward.inputs.dims if dims]}"
        )
