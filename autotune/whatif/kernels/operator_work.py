"""Arithmetic and traffic of products and convolutions, from the shapes of their inputs.

symbol          meaning
flops           floating-point operations, two per multiply-add
elements        elements read and written once each
layout          elements of tensors whose layout cuDNN changes for kernels on tensor cores
directions      1 for a forward product; for a convolution's backward, how many gradients it makes
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import gcd, prod

from autotune.profiling.formats.op_inputs import OpInputs
from autotune.whatif.base import Operator
from autotune.whatif.kernels.kernel_classes import KernelClass

ALIGNED = 8
"""Tensor cores read 16 bytes at once: fast kernels need dimensions that this divides (16 bit)."""
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operator -> the place of its first factor."""
_FORWARD = ("aten::cudnn_convolution", "aten::miopen_convolution")
_BACKWARD = "aten::convolution_backward"


@dataclass(frozen=True)
class ProductWork:
    """The work of one call; see the table of symbols.

    `alignment`: the largest power of two, up to `ALIGNED`, that divides all sizes of a product.
    """

    kind: KernelClass
    flops: float
    elements: float
    layout: float = 0.0
    directions: int = 1
    alignment: int = 8


def product_work(operator: Operator) -> ProductWork | None:
    """None for operators other than products and convolutions, and without recorded shapes."""
    inputs = operator.inputs
    if inputs is None:
        return None
    try:
        if operator.name in _PRODUCTS:
            return _matrix_product(inputs, _PRODUCTS[operator.name])
        if operator.name in _FORWARD:
            return _forward(inputs)
        if operator.name == _BACKWARD:
            return _backward(inputs)
    except (IndexError, ValueError, ZeroDivisionError, TypeError):
        return None  # the shapes are not those of this operator
    return None


def _matrix_product(inputs: OpInputs, first: int) -> ProductWork:
    one, two = inputs.dims[first], inputs.dims[first + 1]
    rows, inner, columns = one[-2], one[-1], two[-1]
    count = prod(one[:-2])
    return ProductWork(
        KernelClass.GEMM,
        flops=2.0 * count * rows * inner * columns,
        elements=float(count * (rows * inner + inner * columns + rows * columns)),
        alignment=gcd(rows, inner, columns, ALIGNED),
    )


def _forward(inputs: OpInputs) -> ProductWork:
    data, weight = inputs.dims[:2]
    padding, stride, dilation = (json.loads(inputs.values[place]) for place in (2, 3, 4))
    sizes = [
        (size + 2 * pad - wide * (kernel - 1) - 1) // step + 1
        for size, kernel, pad, step, wide in zip(
            data[2:], weight[2:], padding, stride, dilation, strict=True
        )
    ]
    return _convolution((data[0], weight[0], *sizes), data, weight, 1)


def _backward(inputs: OpInputs) -> ProductWork:
    gradient, data, weight = inputs.dims[:3]
    wanted = inputs.values[10].strip("[]").split(",")[:2]
    directions = sum(one.strip() == "True" for one in wanted)
    return _convolution(gradient, data, weight, directions)


def _convolution(
    out: tuple[int, ...], data: tuple[int, ...], weight: tuple[int, ...], directions: int
) -> ProductWork:
    if len(out) != len(data) or len(data) != len(weight) or len(data) < 3:
        raise ValueError("a convolution has tensors of equal rank")
    # a pointwise convolution is a product on the tensors as they are, if their rows are aligned
    pointwise = prod(weight[2:]) == 1 and out[2:] == data[2:] and prod(out[2:]) % ALIGNED == 0
    return ProductWork(
        KernelClass.CONVOLUTION,
        flops=2.0 * prod(out) * prod(weight[1:]) * directions,
        elements=float((prod(out) + prod(data) + prod(weight)) * directions),
        layout=0.0 if pointwise else float((prod(out) + prod(data)) * directions),
        directions=directions,
    )
