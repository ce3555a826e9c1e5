"""Op graphs of the zoo's image classifiers on an assumed device (`assumed_device`).

The kernels' shapes are those of `architectures`, the sides of the feature maps those of the published models: 224 pixels in, 299 for
Inception. A convolution with its bias, a normalization, an activation, a pooling, a sum and a concatenation are an op each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autotune.profiling.op_graph import OpGraph
from autotune.zoo.architectures import MODELS
from autotune.zoo.assumed_device import MOMENTUM, AssumedDevice, Net


@dataclass(frozen=True)
class _Map:
    """What an op made: `channels` feature maps of `side` by `side` pixels."""

    op: int
    side: int
    channels: int


class _Vision(Net):
    """`batch` images."""

    def __init__(self, device: AssumedDevice, model: str, batch: int) -> None:
        super().__init__(device, MODELS[model].variables())
        self.model, self.batch = model, batch

    def written(self) -> OpGraph:
        family = re.split(r"[-0-9]", self.model)[0]
        {
            "resnet": self._resnet,
            "vgg": self._vgg,
            "densenet": self._densenet,
            "inception": self._inception,
        }[family]()
        return self.graph(self.model, MOMENTUM)

    def _elements(self, side: int, channels: int) -> float:
        return float(self.batch * side * side * channels)

    def _conv(self, name: str, read: _Map | None, side: int) -> _Map:
        height, width, inputs, outputs = self.variables[f"{name}/kernel"].shape
        made = self._elements(side, outputs)
        side_in, reads = (read.side, (read.op,)) if read is not None else (2 * side, ())
        moved = self._elements(side_in, inputs) + made + height * width * inputs * outputs
        names = [own for own in (f"{name}/kernel", f"{name}/bias") if own in self.variables]
        return _Map(
            self.op(name, 2 * made * height * width * inputs, moved, made, reads, names),
            side,
            outputs,
        )

    def _pointwise(self, name: str, *reads: _Map) -> _Map:
        """Of one map, or the sum of several, with the normalization's variables where there are any of that name."""
        names = [own for own in (f"{name}/gamma", f"{name}/beta") if own in self.variables]
        own = self.pointwise(
            name,
            self._elements(reads[0].side, reads[0].channels),
            tuple(read.op for read in reads),
            names,
        )
        return _Map(own, reads[0].side, reads[0].channels)

    def _conv_norm(
        self, conv: str, norm: str, read: _Map | None, side: int, active: bool = True
    ) -> _Map:
        made = self._pointwise(norm, self._conv(conv, read, side))
        return self._pointwise(f"{norm}/relu", made) if active else made

    def _pool(self, name: str, read: _Map, side: int) -> _Map:
        before, after = (
            self._elements(read.side, read.channels),
            self._elements(side, read.channels),
        )
        return _Map(self.op(name, before, before + after, after, (read.op,)), side, read.channels)

    def _concat(self, name: str, *reads: _Map) -> _Map:
        channels = sum(read.channels for read in reads)
        made = self._elements(reads[0].side, channels)
        return _Map(
            self.op(name, 0.0, 2 * made, made, tuple(read.op for read in reads)),
            reads[0].side,
            channels,
        )

    def _dense(self, name: str, read: int) -> int:
        inputs, outputs = self.variables[f"{name}/kernel"].shape
        return self.product(
            name, read, float(self.batch), inputs, outputs, (f"{name}/kernel", f"{name}/bias")
        )

    def _classified(self, at: _Map) -> None:
        self._dense("predictions", self._pool("global_pool", at, 1).op)

    def _resnet(self) -> None:
        """Version 1.5 (ResNet-50 here) halves the sides in a block's second convolution, version 1 in its first."""
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
                grown = self._conv(
                    f"{name}_2_conv",
                    self._conv_norm(f"{name}_1_conv", f"{name}_1_bn", ready, at.side),
                    at.side,
                )
                at = self._concat(f"{name}_concat", at, grown)
                block += 1
            if stage < 3:
                name = f"pool{stage + 2}"
                ready = self._pointwise(f"{name}_relu", self._pointwise(f"{name}_bn", at))
                at = self._pool(
                    f"{name}_pool", self._conv(f"{name}_conv", ready, at.side), at.side // 2
                )
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
        """A block's branches side by side; the third and the eighth halve the sides in the last convolution of every branch."""
        name, halved = f"mixed{block}", {3: 17, 8: 8}.get(block)
        ends: list[_Map] = []
        for branch in range(4):
            steps = 0
            while f"{name}/branch{branch}/{steps}/conv/kernel" in self.variables:
                steps += 1
            at = self._pool(f"{name}/pool", read, read.side) if branch == 3 else read
            for index in range(steps):
                own = f"{name}/branch{branch}/{index}"
                at = self._conv_norm(
                    f"{own}/conv",
                    f"{own}/bn",
                    at,
                    halved if halved and index == steps - 1 else read.side,
                )
            wide = [
                own
                for part in ("wide", "high")
                if (own := f"{name}/branch{branch}/{part}") + "/conv/kernel" in self.variables
            ]
            if wide:
                ends += [self._conv_norm(f"{own}/conv", f"{own}/bn", at, read.side) for own in wide]
            elif steps:
                ends.append(at)
            elif halved:
                ends.append(self._pool(f"{name}/pool", read, halved))
                break
        return self._concat(f"{name}/concat", *ends)


def vision_ops(model: str, batch: int, device: AssumedDevice) -> OpGraph:
    """The op graph of one of the zoo's image classifiers in training."""
    return _Vision(device, model, batch).written()
