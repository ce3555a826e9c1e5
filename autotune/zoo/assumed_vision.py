"""Op graphs of the zoo's image classifiers on an assumed device (`assumed_device`).

Kernel shapes are those of `architectures`. The sides of the feature maps are those of the published
models: 224 pixels in, 299 for Inception. A convolution with its bias, a normalization, an
activation, a pooling, a sum and a concatenation are an op each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autotune.profiling.op_graph import OpGraph
from autotune.zoo.assumed_device import MOMENTUM, Net


@dataclass(frozen=True)
class _Map:
    """The output of an op: `channels` feature maps of `side` by `side` pixels."""

    op: int
    side: int
    channels: int


class Vision(Net):
    """An image classifier; `batch` counts images."""

    def op_graph(self) -> OpGraph:
        {
            "resnet": self._resnet,
            "vgg": self._vgg,
            "densenet": self._densenet,
            "inception": self._inception,
        }[re.split(r"[-0-9]", self.model)[0]]()
        return self.graph(MOMENTUM)

    @property
    def _image_side(self) -> int:
        return 299 if self.model.startswith("inception") else 224

    def _elements(self, side: int, channels: int) -> float:
        return float(self.batch * side * side * channels)

    def _conv(self, name: str, read: _Map | None, side: int) -> _Map:
        height, width, inputs, outputs = self.variables[f"{name}/kernel"].shape
        written = self._elements(side, outputs)
        side_in, reads = (read.side, (read.op,)) if read is not None else (self._image_side, ())
        moved = self._elements(side_in, inputs) + written + height * width * inputs * outputs
        flop = 2 * written * height * width * inputs
        names = self._present(f"{name}/kernel", f"{name}/bias")
        return _Map(self.op(name, flop, moved, written, reads, names), side, outputs)

    def _present(self, *names: str) -> list[str]:
        """The names of variables that this model has."""
        return [name for name in names if name in self.variables]

    def _pointwise(self, name: str, *reads: _Map) -> _Map:
        """An op on one map or the sum of several, with the variables of a normalization, if any."""
        side, channels = reads[0].side, reads[0].channels
        names = self._present(f"{name}/gamma", f"{name}/beta")
        inputs = tuple(read.op for read in reads)
        op = self.pointwise(name, self._elements(side, channels), inputs, names)
        return _Map(op, side, channels)

    def _conv_norm(
        self, conv: str, norm: str, read: _Map | None, side: int, active: bool = True
    ) -> _Map:
        normed = self._pointwise(norm, self._conv(conv, read, side))
        return self._pointwise(f"{norm}/relu", normed) if active else normed

    def _pool(self, name: str, read: _Map, side: int) -> _Map:
        before = self._elements(read.side, read.channels)
        after = self._elements(side, read.channels)
        return _Map(self.op(name, before, before + after, after, (read.op,)), side, read.channels)

    def _concat(self, name: str, *reads: _Map) -> _Map:
        side, channels = reads[0].side, sum(read.channels for read in reads)
        elements = self._elements(side, channels)
        op = self.op(name, 0.0, 2 * elements, elements, tuple(read.op for read in reads))
        return _Map(op, side, channels)

    def _dense(self, name: str, read: int) -> int:
        inputs, outputs = self.variables[f"{name}/kernel"].shape
        names = (f"{name}/kernel", f"{name}/bias")
        return self.product(name, read, float(self.batch), inputs, outputs, *names)

    def _classified(self, at: _Map) -> None:
        self._dense("predictions", self._pool("global_pool", at, 1).op)

    def _resnet(self) -> None:
        """resnet50 (v1.5) halves the sides in a block's second convolution, v1 in its first."""
        late = self.model == "resnet50"
        at = self._pool("pool1", self._conv_norm("conv1_conv", "conv1_bn", None, 112), 56)
        for stage in range(4):
            side, block = 56 // 2**stage, 1
            while (name := f"conv{stage + 2}_block{block}") + "_1_conv/kernel" in self.variables:
                shortcut, first_side = at, side
                if block == 1:
                    shortcut = self._conv_norm(
                        f"{name}_0_conv", f"{name}_0_bn", at, side, active=False
                    )
                    first_side = at.side if late else side
                at = self._conv_norm(f"{name}_1_conv", f"{name}_1_bn", at, first_side)
                at = self._conv_norm(f"{name}_2_conv", f"{name}_2_bn", at, side)
                at = self._conv_norm(f"{name}_3_conv", f"{name}_3_bn", at, side, active=False)
                at = self._pointwise(f"{name}/relu", self._pointwise(f"{name}/add", shortcut, at))
                block += 1
        self._classified(at)

    def _vgg(self) -> None:
        at: _Map | None = None
        for block in range(5):
            side, index = 224 // 2**block, 1
            while (name := f"block{block + 1}_conv{index}") + "/kernel" in self.variables:
                at = self._pointwise(f"{name}/relu", self._conv(name, at, side))
                index += 1
            assert at is not None
            at = self._pool(f"block{block + 1}_pool", at, side // 2)
        assert at is not None
        number = at.op
        for name in ("fc1", "fc2"):
            number = self._dense(name, number)
            number = self.pointwise(f"{name}/relu", float(self.batch * 4096), (number,))
        self._dense("predictions", number)

    def _densenet(self) -> None:
        at = self._pool("pool1", self._conv_norm("conv1/conv", "conv1/bn", None, 112), 56)
        for stage in range(4):
            block = 1
            while (name := f"conv{stage + 2}_block{block}") + "_1_conv/kernel" in self.variables:
                ready = self._pointwise(f"{name}_0_relu", self._pointwise(f"{name}_0_bn", at))
                narrow = self._conv_norm(f"{name}_1_conv", f"{name}_1_bn", ready, at.side)
                grown = self._conv(f"{name}_2_conv", narrow, at.side)
                at = self._concat(f"{name}_concat", at, grown)
                block += 1
            if stage < 3:
                name = f"pool{stage + 2}"
                ready = self._pointwise(f"{name}_relu", self._pointwise(f"{name}_bn", at))
                halved = self._conv(f"{name}_conv", ready, at.side)
                at = self._pool(f"{name}_pool", halved, at.side // 2)
        self._classified(self._pointwise("relu", self._pointwise("bn", at)))

    def _inception(self) -> None:
        at: _Map | None = None
        for index, side in enumerate((149, 147, 147, 73, 71)):
            at = self._conv_norm(f"stem/{index}/conv", f"stem/{index}/bn", at, side)
            if index in (2, 4):
                at = self._pool(f"stem/pool{index}", at, 73 if index == 2 else 35)
        assert at is not None
        for block in range(11):
            at = self._mixed(block, at)
        self._classified(at)

    def _mixed(self, block: int, read: _Map) -> _Map:
        """A block of parallel branches.

        The blocks 3 and 8 halve the sides in the last convolution of every branch.
        """
        name, halved = f"mixed{block}", {3: 17, 8: 8}.get(block)
        ends: list[_Map] = []
        for branch in range(4):
            path = f"{name}/branch{branch}"
            steps = 0
            while f"{path}/{steps}/conv/kernel" in self.variables:
                steps += 1
            at = self._pool(f"{name}/pool", read, read.side) if branch == 3 else read
            for index in range(steps):
                step = f"{path}/{index}"
                side = halved if halved and index == steps - 1 else read.side
                at = self._conv_norm(f"{step}/conv", f"{step}/bn", at, side)
            wide = [
                f"{path}/{part}"
                for part in ("wide", "high")
                if f"{path}/{part}/conv/kernel" in self.variables
            ]
            if wide:
                ends += [self._conv_norm(f"{end}/conv", f"{end}/bn", at, read.side) for end in wide]
            elif steps:
                ends.append(at)
            elif halved:
                ends.append(self._pool(f"{name}/pool", read, halved))
                break
        return self._concat(f"{name}/concat", *ends)
