"""Models of parameters and times only: real gradients and updates, computation as timed waits.

Each has the layers of a published architecture with smaller widths (11 to 20 MB of gradients), so a
step of four ranks takes 100 to 500 ms on emulated links of 1 Gbit/s. A layer computes for its share
of the multiplications. `step_s`, the time of one whole replica, makes communication take about as
long, where strategies differ most. `layers` has no published architecture: it compares
synchronization across steps. All times are assumed. `train_generated.py` trains the models.

| symbol | meaning | unit |
|---|---|---|
| work | multiplications of a layer's forward pass, for one example | relative to other layers |
| step_s | one replica's step: forward 1/3, backward 2/3, and the update | s |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import MappingProxyType

from autotune.errors import InvalidInput
from autotune.workload import Variable, Workload

FORWARD_SHARE = 1 / 3
VGG_BLOCKS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
VGG_DIVISOR = 7
DENSENET_BLOCKS, DENSENET_GROWTH = (6, 12, 24, 16), 20
TABLE_ROWS, TABLE_WIDTH, TABLE_TOUCHED = 40_000, 64, 4_000
MLP = (512, 1024, 1024, 512, 256, 1)
TRANSFORMER_WORDS, TRANSFORMER_WIDTH, TRANSFORMER_BLOCKS, TRANSFORMER_TOKENS = 2000, 256, 3, 128
TIMED_LAYERS = (
    (2_000, 0.030),
    (20_000, 0.030),
    (80_000, 0.030),
    (150_000, 0.030),
    (300_000, 0.030),
    (300_000, 0.030),
    (600_000, 0.020),
    (600_000, 0.020),
    (2_000_000, 0.006),
    (1_000_000, 0.004),
    (10_000, 0.001),
)
"""(parameters, seconds of one step) of every layer of `layers`, from the input to the loss."""


@dataclass(frozen=True)
class Layer:
    """`shapes`: (name, shape) of each variable. `touched`: table rows per step and rank, or 0."""

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    work: float
    touched: int = 0


@dataclass(frozen=True)
class GeneratedModel:
    """`layers` from the input to the loss.

    `update_s`: from the end of the passes to the next step.
    """

    name: str
    layers: tuple[Layer, ...]
    step_s: float
    update_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.update_s < self.step_s:
            raise InvalidInput(
                f"update_s of {self.name!r} must be in [0, step_s = {self.step_s}), "
                f"but is {self.update_s}"
            )

    @property
    def passes_s(self) -> list[tuple[float, float]]:
        """Return the (forward, backward) time of each layer, by its share of the work."""
        both_s, total = self.step_s - self.update_s, sum(layer.work for layer in self.layers)
        layers_s = [both_s * layer.work / total for layer in self.layers]
        return [(FORWARD_SHARE * layer_s, (1 - FORWARD_SHARE) * layer_s) for layer_s in layers_s]

    def workload(self) -> Workload:
        """Return one replica. Edges join variables that follow each other."""
        forward_s, backward_s = zip(*self.passes_s, strict=True)
        needed_s = [
            end - layer_s for end, layer_s in zip(accumulate(forward_s), forward_s, strict=True)
        ]
        ready_s = list(accumulate(reversed(backward_s)))[::-1]
        variables = tuple(
            Variable(
                f"{layer.name}.{name}",
                shape,
                "float32",
                layer.touched > 0,
                ready_s[number],
                needed_s[number],
                float(layer.touched) or None,
            )
            for number, layer in enumerate(self.layers)
            for name, shape in layer.shapes
        )
        edges = tuple(pairwise(range(len(variables))))
        return Workload(
            self.name, variables[::-1], edges, sum(forward_s), ready_s[0], self.update_s
        )


def _conv(name: str, side: int, size: int, inputs: int, outputs: int, bias: bool) -> Layer:
    """Return a convolution whose output has `side` x `side` pixels."""
    weight = ("weight", (outputs, inputs, size, size))
    shapes = (weight, ("bias", (outputs,))) if bias else (weight,)
    return Layer(name, shapes, float(side * side * size * size * inputs * outputs))


def _linear(name: str, inputs: int, outputs: int) -> Layer:
    return Layer(
        name, (("weight", (outputs, inputs)), ("bias", (outputs,))), float(inputs * outputs)
    )


def _norm(name: str, side: int, channels: int) -> Layer:
    """Return a normalization; memory traffic makes a value cost about ten multiplications."""
    return Layer(
        name, (("weight", (channels,)), ("bias", (channels,))), 10.0 * side * side * channels
    )


def vgg_like(divisor: int = VGG_DIVISOR) -> tuple[Layer, ...]:
    """VGG-16 (Simonyan & Zisserman 2015).

    Three quarters of all parameters are in one dense layer, which is ready first and needed last.
    """
    layers, channels, side = [], 3, 224
    for block, (count, width) in enumerate(VGG_BLOCKS):
        for number in range(count):
            layers.append(
                _conv(f"conv{block}_{number}", side, 3, channels, width // divisor, bias=True)
            )
            channels = width // divisor
        side //= 2
    hidden = 4096 // divisor
    sizes = (side * side * channels, hidden, hidden, 1000 // divisor)
    return *layers, *(_linear(f"fc{number}", *pair) for number, pair in enumerate(pairwise(sizes)))


def densenet_like(growth: int = DENSENET_GROWTH) -> tuple[Layer, ...]:
    """DenseNet-121 (Huang et al. 2017), another growth rate: 364 variables, most of them tiny."""
    channels, side = 2 * growth, 56
    layers = [_conv("stem", 112, 7, 3, channels, bias=False), _norm("stem_norm", 112, channels)]
    for stage, count in enumerate(DENSENET_BLOCKS):
        for number in range(count):
            name = f"block{stage}_{number}"
            layers += [
                _norm(f"{name}_norm0", side, channels),
                _conv(f"{name}_conv0", side, 1, channels, 4 * growth, bias=False),
            ]
            layers += [
                _norm(f"{name}_norm1", side, 4 * growth),
                _conv(f"{name}_conv1", side, 3, 4 * growth, growth, bias=False),
            ]
            channels += growth
        if stage + 1 < len(DENSENET_BLOCKS):
            layers += [
                _norm(f"pool{stage}_norm", side, channels),
                _conv(f"pool{stage}", side, 1, channels, channels // 2, bias=False),
            ]
            channels, side = channels // 2, side // 2
    return *layers, _norm("norm", side, channels), _linear("classifier", channels, 1000)


def embedding_like(
    rows: int = TABLE_ROWS, width: int = TABLE_WIDTH, touched: int = TABLE_TOUCHED
) -> tuple[Layer, ...]:
    """A recommender: a table, of which a step touches a tenth, and a perceptron.

    The table is needed first and ready last.
    """
    dense = [_linear(f"mlp{number}", *pair) for number, pair in enumerate(pairwise(MLP))]
    lookup = 0.2 * sum(
        layer.work for layer in dense
    )  # gathering rows multiplies nothing, but takes its time
    return Layer("table", (("weight", (rows, width)),), lookup, touched), *dense


def transformer_like(
    words: int = TRANSFORMER_WORDS,
    width: int = TRANSFORMER_WIDTH,
    blocks: int = TRANSFORMER_BLOCKS,
    tokens: int = TRANSFORMER_TOKENS,
) -> tuple[Layer, ...]:
    """Blocks of attention and a feed-forward net (Vaswani et al. 2017).

    An embedding and a head hold a third of all parameters.
    """
    layers = [
        Layer("embedding", (("weight", (words, width)),), 10.0 * width)
    ]  # rows are read and written, as by a normalization
    for number in range(blocks):
        name = f"block{number}"
        projection = _linear(f"{name}_projection", width, width)
        attention = replace(
            projection, work=projection.work + 2.0 * tokens * width
        )  # scores and their sums of values
        layers += [
            _norm(f"{name}_norm0", 1, width),
            _linear(f"{name}_heads", width, 3 * width),
            attention,
        ]
        layers += [
            _norm(f"{name}_norm1", 1, width),
            _linear(f"{name}_up", width, 4 * width),
            _linear(f"{name}_down", 4 * width, width),
        ]
    return *layers, _norm("norm", 1, width), _linear("head", width, words)


def large_late_layers() -> tuple[Layer, ...]:
    """The last layers are the largest, as in a network that ends in wide dense layers.

    They are ready first and needed last. The passes compute for 231 ms; four ranks at 1 Gbit/s move
    the gradients in 243 ms by a ring.
    """
    return tuple(
        Layer(str(number), (("weight", (size,)),), seconds)
        for number, (size, seconds) in enumerate(TIMED_LAYERS)
    )


MODELS: Mapping[str, GeneratedModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            GeneratedModel("vgg", vgg_like(), step_s=0.130, update_s=0.004),
            GeneratedModel("densenet", densenet_like(), step_s=0.150, update_s=0.008),
            GeneratedModel("embedding", embedding_like(), step_s=0.110, update_s=0.004),
            GeneratedModel("transformer", transformer_like(), step_s=0.150, update_s=0.004),
            GeneratedModel(
                "layers",
                large_late_layers(),
                step_s=sum(seconds for _, seconds in TIMED_LAYERS) + 0.0035,
                update_s=0.0035,
            ),
        )
    }
)
