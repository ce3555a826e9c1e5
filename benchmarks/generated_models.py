"""Models of four kinds, small enough that a step of four ranks takes 0.05 to 0.3 s over emulated links of about 1 Gbit/s.

Shapes follow the kind of network that gives a model its name, with fewer channels; times are assumed, in the proportion of a layer's
work where that is known. `UPDATE_S_PER_PARAMETER`: what torch's SGD with momentum takes on one thread of the machine of docs/results.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import prod
from types import MappingProxyType

from autotune.workload import Workload
from benchmarks.cross_step_model import LAYERS
from benchmarks.layered import Layer, workload_of

UPDATE_S_PER_PARAMETER = 7e-10
LOOKUP_ROWS = 2048


def cross_step() -> tuple[Layer, ...]:
    """The model of `benchmarks.cross_step_model`: the last layers are the largest."""
    return tuple(Layer(((parameters,),), seconds) for parameters, seconds in LAYERS)


def vgg_like() -> tuple[Layer, ...]:
    """Thirteen convolutions and three dense layers that hold two thirds of the parameters (Simonyan and Zisserman, 2015, table 1)."""
    channels = (3, 16, 16, 32, 32, 64, 64, 64, 128, 128, 128, 128, 128, 128)
    seconds = (0.006, 0.02, 0.012, 0.02, 0.01, 0.016, 0.016, 0.008, 0.012, 0.012, 0.004, 0.004, 0.004)
    convolutions = [Layer(((out, into, 3, 3), (out,)), own) for into, out, own in zip(channels, channels[1:], seconds, strict=False)]
    dense = [Layer(((1024, 1568), (1024,)), 0.004), Layer(((1024, 1024), (1024,)), 0.002), Layer(((10, 1024), (10,)), 0.001)]
    return (*convolutions, *dense)


def densenet_like() -> tuple[Layer, ...]:
    """Forty-eight pairs of convolutions, each behind a normalization: some three hundred small variables (Huang et al., 2017)."""
    layers = []
    for block in range(4):
        for number in range(12):
            into = 24 * (block + 1) + 12 * number
            layers.append(Layer(((96, into, 1, 1), (into,), (into,)), 0.0015))
            layers.append(Layer(((24, 96, 3, 3), (96,), (96,)), 0.0015))
    return (Layer(((24, 3, 7, 7),), 0.006), *layers, Layer(((100, 204), (100,)), 0.0005))


def transformer_like() -> tuple[Layer, ...]:
    """An embedding, three blocks of attention and a feed-forward net, and a head (Vaswani et al., 2017)."""
    width, words = 256, 2000
    layers = [Layer(((words, width),), 0.002)]
    for _ in range(3):
        layers.append(Layer(((width,), (width,)), 0.001))
        layers.append(Layer(((3 * width, width), (3 * width,)), 0.012))
        layers.append(Layer(((width, width), (width,)), 0.006))
        layers.append(Layer(((width,), (width,)), 0.001))
        layers.append(Layer(((4 * width, width), (4 * width,)), 0.014))
        layers.append(Layer(((width, 4 * width), (width,)), 0.014))
    return (*layers, Layer(((words, width),), 0.01))


def embedding_like() -> tuple[Layer, ...]:
    """A table of which a step reads a few rows, with a sparse gradient, below four dense layers."""
    sizes = (512, 768, 512, 256, 64)
    dense = [Layer(((out, into), (out,)), 0.012) for into, out in pairwise(sizes)]
    return (Layer(((20_000, 64),), 0.008, LOOKUP_ROWS), *dense, Layer(((1, 64), (1,)), 0.001))


MODELS: Mapping[str, Callable[[], tuple[Layer, ...]]] = MappingProxyType(
    {
        "layers": cross_step,
        "vgg_like": vgg_like,
        "densenet_like": densenet_like,
        "transformer_like": transformer_like,
        "embedding_like": embedding_like,
    }
)


def profile(model: str) -> Workload:
    """What emulated accelerators wait for."""
    layers = MODELS[model]()
    parameters = sum(prod(shape) for layer in layers if layer.rows == 0 for shape in layer.shapes)
    return workload_of(model, layers, parameters * UPDATE_S_PER_PARAMETER)
