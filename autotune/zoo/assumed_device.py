"""A device whose times are assumed, and a net that is written down on it op by op.

Nothing here was measured, and everything made of it says so (`source="assumed"`). An op's time is the larger of its arithmetic over the
device's rate and its memory traffic over the memory's (the roofline; Williams et al., CACM 52(4), 2009), and at least the time to start
a kernel. A backward op of a layer with weights does twice the arithmetic and traffic of its forward op: the gradient of the input and
that of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.profiling.op_graph import Op, OpGraph
from autotune.workload import Variable

_FLOAT_BYTES = 4
POINTWISE_FLOP = 5.0
"""Of one element of an activation, a normalization, a sum; memory bounds all of them."""


@dataclass(frozen=True)
class AssumedDevice:
    """What an op's time is assumed from. The defaults are an NVIDIA V100's data sheet (fp32 15.7 TFLOP/s, 900 GB/s) times `efficiency`."""

    flop_per_s: float = 15.7e12
    memory_bytes_per_s: float = 900e9
    efficiency: float = 0.6
    kernel_s: float = 5e-6
    name: str = "NVIDIA V100"

    def __post_init__(self) -> None:
        if min(self.flop_per_s, self.memory_bytes_per_s, self.efficiency) <= 0 or self.kernel_s < 0:
            raise InvalidInput(
                f"an assumed device needs rates and an efficiency above 0, but is {self}"
            )

    def seconds(self, flop: float, moved_bytes: float) -> float:
        return (
            max(flop / self.flop_per_s, moved_bytes / self.memory_bytes_per_s) / self.efficiency
            + self.kernel_s
        )

    @property
    def text(self) -> str:
        """What a reader must know of it."""
        rates = f"{self.flop_per_s / 1e12:g} TFLOP/s and {self.memory_bytes_per_s / 1e9:g} GB/s"
        return f"from FLOPs and bytes on an {self.name} that reaches {self.efficiency:.0%} of the {rates} of its data sheet"


class Net:
    """Adds ops in forward order and remembers what each reads. All counts are of one replica's step."""

    def __init__(self, device: AssumedDevice, variables: Iterable[Variable]) -> None:
        self.device, self.variables = device, {variable.name: variable for variable in variables}
        self._ops: list[Op] = []
        self._edges: list[tuple[int, int]] = []

    def op(
        self,
        name: str,
        flop: float,
        moved: float,
        made: float,
        reads: Iterable[int],
        names: Iterable[str] = (),
        gradient: float = 0.0,
    ) -> int:
        """An op of `flop` operations that moves `moved` and makes `made` elements; backward it writes `gradient` elements on top."""
        variables = tuple(self.variables[own] for own in names)
        forward_s = self.device.seconds(flop, moved * _FLOAT_BYTES)
        backward_s = self.device.seconds(
            (2 if variables else 1) * flop, (2 * moved + gradient) * _FLOAT_BYTES
        )
        code = f"{name.rsplit('/', 1)[-1]} {flop:g} {moved:g}"
        self._ops.append(Op(name, code, forward_s, backward_s, made * _FLOAT_BYTES, variables))
        self._edges.extend((before, len(self._ops) - 1) for before in sorted(set(reads)))
        return len(self._ops) - 1

    def pointwise(
        self, name: str, elements: float, reads: tuple[int, ...], names: Iterable[str] = ()
    ) -> int:
        return self.op(
            name, POINTWISE_FLOP * elements, (len(reads) + 1) * elements, elements, reads, names
        )

    def product(
        self,
        name: str,
        read: int,
        rows: float,
        inputs: int,
        outputs: int,
        names: Iterable[str] = (),
    ) -> int:
        """`rows` vectors times a matrix."""
        moved = rows * (inputs + outputs) + inputs * outputs
        return self.op(name, 2 * rows * inputs * outputs, moved, rows * outputs, (read,), names)

    def graph(self, model: str, update_passes: float, rows_only: bool = False) -> OpGraph:
        """`update_passes`: how often the optimizer reads or writes a parameter's bytes; of `rows_only` gradients hardly any."""
        left = set(self.variables) - {
            variable.name for op in self._ops for variable in op.variables
        }
        assert not left, left
        updated = sum(
            variable.grad_bytes
            for variable in self.variables.values()
            if not (rows_only and variable.sparse)
        )
        update_s = self.device.seconds(0.0, update_passes * updated)
        return OpGraph(model, tuple(self._ops), tuple(self._edges), update_s, source="assumed")


ADAM = 7.0
"""Adam reads the gradient, the parameter and two moments and writes the last three."""
MOMENTUM = 5.0
"""Stochastic gradient descent with momentum reads the gradient, the parameter and the momentum and writes the last two."""
