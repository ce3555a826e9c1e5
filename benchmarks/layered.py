"""Models that are nothing but variables and the times of their layers, for emulated accelerators.

`workload_of` is what such a model's accelerators wait for; `benchmarks.layers_script` trains a module with the same variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from autotune.workload import Variable, Workload

FORWARD_SHARE = 1 / 3
"""Of a layer's time; the backward pass computes two gradients, of the input and of the parameters."""
NAMES = ("weight", "bias", "scale", "shift")


@dataclass(frozen=True)
class Layer:
    """`shapes` of its variables, which are all needed at its beginning; `seconds` of one step. `rows`: of a lookup in a sparse table."""

    shapes: tuple[tuple[int, ...], ...]
    seconds: float
    rows: int = 0

    def names(self, number: int) -> list[str]:
        return [f"{number}.{name}" for name, _ in zip(NAMES, self.shapes, strict=False)]


def workload_of(model: str, layers: Sequence[Layer], update_s: float = 0.0) -> Workload:
    """Forward a third and backward two thirds of each layer's time; a layer's gradients are ready when its backward pass ends."""
    forward_s = [layer.seconds * FORWARD_SHARE for layer in layers]
    backward_s = [layer.seconds - own for layer, own in zip(layers, forward_s, strict=True)]
    needed_s = [end - own for end, own in zip(accumulate(forward_s), forward_s, strict=True)]
    ready_s = list(accumulate(reversed(backward_s)))[::-1]
    variables = [
        Variable(name, shape, sparse=layer.rows > 0, ready_s=ready_s[number], needed_s=needed_s[number])
        for number, layer in enumerate(layers)
        for name, shape in zip(layer.names(number), layer.shapes, strict=True)
    ]
    edges = tuple((before, before + 1) for before in range(len(variables) - 1))
    return Workload(model, tuple(variables[::-1]), edges, sum(forward_s), sum(backward_s), update_s)
