"""A device with assumed times, and nets whose ops take these times.

Nobody measured them; every result says `source="assumed"`. The time of an op is the larger of its
arithmetic by the device's rate and its memory traffic by the memory's rate (the roofline; Williams
et al., CACM 52(4), 2009), plus the time to start a kernel. A backward op moves twice the
bytes of its forward op. That of a matrix product or of a layer with weights also does twice the
arithmetic: C = A B needs dA = dC B^T and dB = A^T dC, whether B is a weight or an activation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.profiling.op_graph import Op, OpGraph
from autotune.zoo.architectures import MODELS

_FLOAT_BYTES = 4
POINTWISE_FLOP = 5.0
"""Operations per element of an activation, normalization or sum; memory bounds all of them."""
ADAM = 7.0
"""Adam reads the gradient, the parameter and two moments, and writes the last three."""
MOMENTUM = 5.0
"""SGD with momentum reads the gradient, the parameter and the momentum; it writes the last two."""


@dataclass(frozen=True)
class AssumedDevice:
    """Rates of a device: by default the data sheet of an NVIDIA V100, times `efficiency`.

    The data sheet states 15.7 TFLOP/s in fp32 and 900 GB/s.
    """

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
        bound_s = max(flop / self.flop_per_s, moved_bytes / self.memory_bytes_per_s)
        return bound_s / self.efficiency + self.kernel_s

    @property
    def text(self) -> str:
        """The assumptions, for a reader of the results."""
        rates = f"{self.flop_per_s / 1e12:g} TFLOP/s and {self.memory_bytes_per_s / 1e9:g} GB/s"
        return (
            f"from FLOPs and bytes on an {self.name} that reaches {self.efficiency:.0%} "
            f"of the {rates} of its data sheet"
        )


class Net(ABC):
    """Ops of one replica's training step on a `batch`, added in forward order with their inputs."""

    def __init__(self, device: AssumedDevice, model: str, batch: int) -> None:
        self.device = device
        self.model = model
        self.batch = batch
        self.variables = {variable.name: variable for variable in MODELS[model].variables()}
        self._ops: list[Op] = []
        self._edges: list[tuple[int, int]] = []

    @abstractmethod
    def op_graph(self) -> OpGraph:
        """Build the ops of the whole model."""

    def op(
        self,
        name: str,
        flop: float,
        moved: float,
        written: float,
        reads: Iterable[int],
        names: Iterable[str] = (),
        gradient: float = 0.0,
        is_matmul: bool = False,
    ) -> int:
        """An op that moves `moved` and writes `written` elements; its number.

        `names`: its variables. `gradient`: further elements that its backward op writes.
        `is_matmul`: it multiplies two matrices, which both need a gradient.
        """
        variables = tuple(self.variables[variable] for variable in names)
        forward_s = self.device.seconds(flop, moved * _FLOAT_BYTES)
        backward_flop = (2 if is_matmul or variables else 1) * flop
        backward_s = self.device.seconds(backward_flop, (2 * moved + gradient) * _FLOAT_BYTES)
        code = f"{name.rsplit('/', 1)[-1]} {flop:g} {moved:g}"
        self._ops.append(Op(name, code, forward_s, backward_s, written * _FLOAT_BYTES, variables))
        number = len(self._ops) - 1
        self._edges.extend((before, number) for before in sorted(set(reads)))
        return number

    def gather(self, name: str, table: str, elements: float, moved: float) -> int:
        """Look up `elements` of a table; the gradient of a dense table is written in full."""
        variable = self.variables[table]
        gradient = 0.0 if variable.sparse else float(variable.elements)
        return self.op(name, 0.0, moved, elements, (), (table,), gradient=gradient)

    def pointwise(
        self, name: str, elements: float, reads: tuple[int, ...], names: Iterable[str] = ()
    ) -> int:
        moved = (len(reads) + 1) * elements
        return self.op(name, POINTWISE_FLOP * elements, moved, elements, reads, names)

    def product(
        self, name: str, read: int, rows: float, inputs: int, outputs: int, *names: str
    ) -> int:
        """`rows` vectors times a matrix; without `names`, it is a variable of another op."""
        moved = rows * (inputs + outputs) + inputs * outputs
        flop = 2 * rows * inputs * outputs
        return self.op(name, flop, moved, rows * outputs, (read,), names, is_matmul=True)

    def graph(self, update_passes: float) -> OpGraph:
        """The graph; the optimizer reads and writes each dense parameter `update_passes` times."""
        in_ops = {variable.name for op in self._ops for variable in op.variables}
        assert in_ops == set(self.variables), set(self.variables) - in_ops
        updated_bytes = sum(v.grad_bytes for v in self.variables.values() if not v.sparse)
        update_s = self.device.seconds(0.0, update_passes * updated_bytes)
        ops, edges = tuple(self._ops), tuple(self._edges)
        return OpGraph(self.model, ops, edges, update_s, source="assumed")
