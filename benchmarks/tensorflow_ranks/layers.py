"""Layers of emulated models: their variables and the times of their passes."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.zoo.architectures import workload


@dataclass(frozen=True)
class TimedLayer:
    """A variable with the seconds of its layer's two passes."""

    name: str
    elements: int
    forward_s: float
    backward_s: float


def layers_of(model: str, count: int, grad_bytes: int, compute_s: float) -> list[TimedLayer]:
    """A model of the zoo as `count` layers of neighbours, with `grad_bytes` in all.

    The backward pass takes two thirds of `compute_s`. Each layer takes the same time, whatever its
    variables: convolutions at the front have few parameters and much work.
    """
    variables = workload(model).variables[::-1]  # in the order of the forward pass
    total = sum(variable.elements for variable in variables)
    size = [0] * count
    for number, variable in enumerate(variables):
        size[number * count // len(variables)] += variable.elements
    scale = grad_bytes / 4 / total
    each_s = compute_s / (3 * count)
    return [
        TimedLayer(f"layer_{number}", max(round(elements * scale), 1), each_s, 2 * each_s)
        for number, elements in enumerate(size)
    ]
