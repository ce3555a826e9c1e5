"""The models of Table 1 of AutoSync's supplement (sec. 9.1) as workloads, computed from their architectures' hyperparameters.

Nothing here was measured: a workload of this module has shapes and an order, but no times and no edges.

The published models are TensorFlow's, so shapes are in TensorFlow's layout: a convolution's kernel is (height, width, inputs,
outputs), a dense layer's (inputs, outputs), and an attention projection's has its heads as an axis of their own. The functions list
the variables that are trained in forward order; moving statistics of batch normalization are not among them. Each docstring names the
implementation that it follows.

The table gives whole millions. Transformer and the two small BERTs fit it rounded up (61.4 to 62, 10.5 to 11, 35.4 to 36), ResNet50
cut off (23.5 to 23), the others rounded to the nearest; BERT-large's figure is its paper's. `Model.tolerance` is what this leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from autotune.errors import InvalidInput
from autotune.workload import Variable, Workload

Variables = tuple[Variable, ...]

IMAGENET_CLASSES = 1000
BERT_VOCABULARY = 30522
"""WordPiece, uncased English; of all published BERT configurations."""
BERT_POSITIONS = 512
BERT_SEGMENTS = 2
WMT_VOCABULARY = 33708
"""Subtokens of WMT'14 English and German in tensorflow/models, shared by both languages."""
NCF_USERS, NCF_ITEMS = 2_197_225, 855_776
"""Of MovieLens-20M expanded x16x32, as MLPerf's data generator states them."""


def _conv(
    name: str, size: tuple[int, int], inputs: int, outputs: int, bias: bool = False
) -> Variables:
    kernel = Variable(f"{name}/kernel", (*size, inputs, outputs))
    return (kernel, Variable(f"{name}/bias", (outputs,))) if bias else (kernel,)


def _norm(name: str, channels: int) -> Variables:
    """Batch or layer normalization."""
    return Variable(f"{name}/gamma", (channels,)), Variable(f"{name}/beta", (channels,))


def _dense(name: str, inputs: int, outputs: int) -> Variables:
    return Variable(f"{name}/kernel", (inputs, outputs)), Variable(f"{name}/bias", (outputs,))


# Image classification


def resnet(blocks: tuple[int, ...], conv_bias: bool) -> Variables:
    """ResNet with `blocks` bottlenecks per stage (He et al. 2016).

    With `conv_bias` that of tf.keras.applications, which AutoDist's published benchmark trains as ResNet101; without, that of
    tensorflow/models (its ResNet50 v1.5) and of torchvision.
    """

    def conv_norm(name: str, size: int, inputs: int, outputs: int) -> Variables:
        return _conv(f"{name}_conv", (size, size), inputs, outputs, conv_bias) + _norm(
            f"{name}_bn", outputs
        )

    found, channels = conv_norm("conv1", 7, 3, 64), 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            name = f"conv{stage + 2}_block{block + 1}"
            if block == 0:  # the shortcut has to change the number of channels
                found += conv_norm(f"{name}_0", 1, channels, 4 * width)
            found += conv_norm(f"{name}_1", 1, channels, width)
            found += conv_norm(f"{name}_2", 3, width, width)
            found += conv_norm(f"{name}_3", 1, width, 4 * width)
            channels = 4 * width
    return found + _dense("predictions", channels, IMAGENET_CLASSES)


def vgg(convolutions: tuple[tuple[int, int], ...]) -> Variables:
    """VGG with (number of 3x3 convolutions, channels) per block (Simonyan & Zisserman 2015) as in tf.keras.applications."""
    found: Variables = ()
    channels = 3
    for block, (count, width) in enumerate(convolutions):
        for index in range(count):
            found += _conv(f"block{block + 1}_conv{index + 1}", (3, 3), channels, width, bias=True)
            channels = width
    pixels = (
        224 // 2 ** len(convolutions)
    ) ** 2  # every block halves both sides of a 224x224 image
    return (
        found
        + _dense("fc1", pixels * channels, 4096)
        + _dense("fc2", 4096, 4096)
        + _dense("predictions", 4096, IMAGENET_CLASSES)
    )


def densenet(blocks: tuple[int, ...], growth: int) -> Variables:
    """DenseNet-BC with `blocks` layers per stage (Huang et al. 2017, compression 0.5) as in tf.keras.applications."""
    channels = 2 * growth
    found = _conv("conv1/conv", (7, 7), 3, channels) + _norm("conv1/bn", channels)
    for stage, count in enumerate(blocks):
        for block in range(count):
            name = f"conv{stage + 2}_block{block + 1}"
            found += _norm(f"{name}_0_bn", channels) + _conv(
                f"{name}_1_conv", (1, 1), channels, 4 * growth
            )
            found += _norm(f"{name}_1_bn", 4 * growth) + _conv(
                f"{name}_2_conv", (3, 3), 4 * growth, growth
            )
            channels += growth
        if stage + 1 < len(blocks):
            found += _norm(f"pool{stage + 2}_bn", channels) + _conv(
                f"pool{stage + 2}_conv", (1, 1), channels, channels // 2
            )
            channels //= 2
    return found + _norm("bn", channels) + _dense("predictions", channels, IMAGENET_CLASSES)


_Step = tuple[int, int, int]
"""Height and width of a convolution, and its outputs."""
_Branch = tuple[_Step, ...]


def _inception_mixed() -> tuple[tuple[int, tuple[_Branch, ...]], ...]:
    """(Channels in, branches) of the blocks "mixed0" to "mixed10" of Inception v3."""

    def fine(pooled: int) -> tuple[_Branch, ...]:
        return (
            ((1, 1, 64),),
            ((1, 1, 48), (5, 5, 64)),
            ((1, 1, 64), (3, 3, 96), (3, 3, 96)),
            ((1, 1, pooled),),
        )

    def middle(width: int) -> tuple[_Branch, ...]:
        once: _Branch = ((1, 1, width), (1, 7, width), (7, 1, 192))
        twice: _Branch = ((1, 1, width), (7, 1, width), (1, 7, width), (7, 1, width), (1, 7, 192))
        return ((1, 1, 192),), once, twice, ((1, 1, 192),)

    halved: tuple[_Branch, ...] = (((3, 3, 384),), ((1, 1, 64), (3, 3, 96), (3, 3, 96)))
    halved_again: tuple[_Branch, ...] = (
        ((1, 1, 192), (3, 3, 320)),
        ((1, 1, 192), (1, 7, 192), (7, 1, 192), (3, 3, 192)),
    )
    inputs = (192, 256, 288, 288, 768, 768, 768, 768, 768)
    branches = (
        fine(32),
        fine(64),
        fine(64),
        halved,
        middle(128),
        middle(160),
        middle(160),
        middle(192),
        halved_again,
    )
    return tuple(zip(inputs, branches, strict=True))


def inception_v3() -> Variables:
    """Inception v3 (Szegedy et al. 2016) as in tf.keras.applications: no auxiliary classifier, normalization without a scale."""

    def conv_norm(name: str, height: int, width: int, inputs: int, outputs: int) -> Variables:
        return *_conv(f"{name}/conv", (height, width), inputs, outputs), Variable(
            f"{name}/bn/beta", (outputs,)
        )

    def branch(name: str, inputs: int, steps: _Branch) -> Variables:
        found: Variables = ()
        for index, (height, width, outputs) in enumerate(steps):
            found += conv_norm(f"{name}/{index}", height, width, inputs, outputs)
            inputs = outputs
        return found

    found = branch("stem", 3, ((3, 3, 32), (3, 3, 32), (3, 3, 64), (1, 1, 80), (3, 3, 192)))
    for block, (inputs, branches) in enumerate(_inception_mixed()):
        for index, steps in enumerate(branches):
            found += branch(f"mixed{block}/branch{index}", inputs, steps)
    for block, inputs in (
        (9, 1280),
        (10, 2048),
    ):  # two of the four branches end in a pair of convolutions side by side
        name = f"mixed{block}"
        found += branch(f"{name}/branch0", inputs, ((1, 1, 320),))
        for index, steps in ((1, ((1, 1, 384),)), (2, ((1, 1, 448), (3, 3, 384)))):
            found += branch(f"{name}/branch{index}", inputs, steps)
            found += conv_norm(f"{name}/branch{index}/wide", 1, 3, 384, 384) + conv_norm(
                f"{name}/branch{index}/high", 3, 1, 384, 384
            )
        found += branch(f"{name}/branch3", inputs, ((1, 1, 192),))
    return found + _dense("predictions", 2048, IMAGENET_CLASSES)


# Translation and language modeling


def _heads_in(name: str, hidden: int, heads: int, bias: bool) -> Variables:
    kernel = Variable(f"{name}/kernel", (hidden, heads, hidden // heads))
    return (kernel, Variable(f"{name}/bias", (heads, hidden // heads))) if bias else (kernel,)


def _attention(name: str, output: str, hidden: int, heads: int, bias: bool) -> Variables:
    projections = sum(
        (_heads_in(f"{name}/{part}", hidden, heads, bias) for part in ("query", "key", "value")), ()
    )
    kernel = Variable(f"{output}/kernel", (heads, hidden // heads, hidden))
    return (
        (*projections, kernel, Variable(f"{output}/bias", (hidden,)))
        if bias
        else (*projections, kernel)
    )


def transformer(
    layers: int, hidden: int, filters: int, heads: int, vocabulary: int = WMT_VOCABULARY
) -> Variables:
    """Transformer (Vaswani et al. 2017) as in official/nlp/transformer of tensorflow/models: normalization comes first, attention
    has no biases, positions are not learned. Input, output and softmax share one table, so its gradient is dense: the softmax fills
    every row of it.
    """

    def attention(name: str) -> Variables:
        return _norm(f"{name}/layer_norm", hidden) + _attention(
            name, f"{name}/output_transform", hidden, heads, bias=False
        )

    def feed_forward(name: str) -> Variables:
        filled = _dense(f"{name}/filter_layer", hidden, filters) + _dense(
            f"{name}/output_layer", filters, hidden
        )
        return _norm(f"{name}/layer_norm", hidden) + filled

    found: Variables = (Variable("embedding_and_softmax/weights", (vocabulary, hidden)),)
    for stack, sublayers in (
        ("encoder", ("self_attention",)),
        ("decoder", ("self_attention", "encdec_attention")),
    ):
        for layer in range(layers):
            for sublayer in sublayers:
                found += attention(f"{stack}/layer_{layer}/{sublayer}")
            found += feed_forward(f"{stack}/layer_{layer}/ffn")
        found += _norm(f"{stack}/layer_norm", hidden)
    return found


def bert(layers: int, hidden: int, heads: int) -> Variables:
    """BERT (Devlin et al. 2019) with both heads of its pre-training, as in official/nlp/bert of tensorflow/models.

    The masked language model's output shares the word table, so the table's gradient is dense; positions are sliced and segments
    multiplied as one-hot vectors, so those gradients are dense, too.
    """
    found: Variables = (
        Variable("word_embeddings/embeddings", (BERT_VOCABULARY, hidden)),
        Variable("position_embedding/embeddings", (BERT_POSITIONS, hidden)),
        Variable("type_embeddings/embeddings", (BERT_SEGMENTS, hidden)),
    )
    found += _norm("embeddings/layer_norm", hidden)
    for layer in range(layers):
        name = f"transformer/layer_{layer}"
        found += _attention(
            f"{name}/self_attention", f"{name}/self_attention_output", hidden, heads, bias=True
        )
        found += _norm(f"{name}/self_attention_layer_norm", hidden)
        found += _dense(f"{name}/intermediate", hidden, 4 * hidden) + _dense(
            f"{name}/output", 4 * hidden, hidden
        )
        found += _norm(f"{name}/output_layer_norm", hidden)
    found += _dense("pooler_transform", hidden, hidden)
    found += _dense("cls/predictions/transform/dense", hidden, hidden) + _norm(
        "cls/predictions/transform/layer_norm", hidden
    )
    found += (Variable("cls/predictions/output_bias/bias", (BERT_VOCABULARY,)),)
    return found + _dense(
        "classification/logits", hidden, 2
    )  # is the second sentence the next one?


# Recommendation


def neumf(sparse: bool, factors: int = 8, layers: tuple[int, ...] = (64, 32, 16, 8)) -> Variables:
    """Neural matrix factorization (He et al. 2017) as in official/recommendation of tensorflow/models, with its defaults.

    It keeps the factors of the product and the inputs of the perceptron in one table for users and one for items. Only the data are
    MLPerf's: with the 64 factors and the layers 256, 256, 128, 64 of MLPerf's own model it would have 586 million parameters and not 122.
    `sparse`: a step's gradient of a table is the rows of its batch (IndexedSlices); otherwise it is made dense before it is sent.
    """
    width = factors + layers[0] // 2
    found: Variables = (
        Variable("embedding_user/embeddings", (NCF_USERS, width), sparse=sparse),
        Variable("embedding_item/embeddings", (NCF_ITEMS, width), sparse=sparse),
    )
    for index, (inputs, outputs) in enumerate(pairwise(layers)):
        found += _dense(f"dense_{index}", inputs, outputs)
    return found + _dense("rating", factors + layers[-1], 1)


@dataclass(frozen=True)
class Model:
    """A row of Table 1. `variables` builds them in forward order.

    `stated_parameters` is the table's figure; `counted_parameters` is within `tolerance` (relative) of it. It leaves out the variables
    whose names begin with `not_counted`, where the table does so; they are trained and synchronized all the same.
    """

    task: str
    data: str
    batch_per_gpu: int
    stated_parameters: int
    tolerance: float
    variables: Callable[[], Variables]
    batch_unit: str = "examples"
    not_counted: str | None = None

    @property
    def parameters(self) -> int:
        return sum(variable.elements for variable in self.variables())

    @property
    def counted_parameters(self) -> int:
        left_out = self.not_counted
        return sum(
            v.elements
            for v in self.variables()
            if left_out is None or not v.name.startswith(left_out)
        )


_IC, _MT, _CF, _LM = (
    "image classification",
    "machine translation",
    "collaborative filtering",
    "language modeling",
)
_BOOKS, _MOVIES = "Wiki & BookCorpus", "MovieLens-20Mx16x32"

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        # 23 million is ResNet50 without its classifier (23.51); with it, as it is trained, it has 25.56. ResNet101's 45 million
        # include the classifier: 44.60, and 42.55 without.
        "resnet50": Model(
            _IC,
            "ImageNet",
            32,
            23_000_000,
            0.025,
            lambda: resnet((3, 4, 6, 3), conv_bias=False),
            not_counted="predictions/",
        ),
        "resnet101": Model(
            _IC, "ImageNet", 32, 45_000_000, 0.01, lambda: resnet((3, 4, 23, 3), conv_bias=True)
        ),
        "inception-v3": Model(_IC, "ImageNet", 32, 24_000_000, 0.01, inception_v3),  # 23.82
        "vgg16": Model(
            _IC,
            "ImageNet",
            32,
            138_000_000,
            0.005,
            lambda: vgg(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))),
        ),  # 138.36
        "densenet121": Model(
            _IC, "ImageNet", 32, 8_000_000, 0.005, lambda: densenet((6, 12, 24, 16), growth=32)
        ),  # 7.98
        # 61.36: the base model of tensorflow/models; its big one has 210. Its batches are counted in tokens.
        "transformer": Model(
            _MT,
            "WMT'14 en-de",
            5000,
            62_000_000,
            0.015,
            lambda: transformer(6, 512, 2048, 8),
            batch_unit="tokens",
        ),
        "ncf-dense": Model(
            _CF, _MOVIES, 256, 122_000_000, 0.005, lambda: neumf(sparse=False)
        ),  # 122.12
        "ncf-sparse": Model(_CF, _MOVIES, 256, 122_000_000, 0.005, lambda: neumf(sparse=True)),
        # The widths of the two small ones are not published. 256 and 512 are those of Google's small BERT models, the nearest to the
        # stated counts (10.48 and 35.36); with 768, as in the base model, three layers would have 46.3 and six 67.6.
        "bert-3l": Model(_LM, _BOOKS, 32, 11_000_000, 0.05, lambda: bert(3, 256, 4)),
        "bert-6l": Model(_LM, _BOOKS, 32, 36_000_000, 0.02, lambda: bert(6, 512, 8)),
        "bert-base": Model(
            _LM, _BOOKS, 32, 110_000_000, 0.005, lambda: bert(12, 768, 12)
        ),  # 110.11
        "bert-large": Model(
            _LM, _BOOKS, 8, 340_000_000, 0.015, lambda: bert(24, 1024, 16)
        ),  # 336.23; 340 is how its paper rounds it
    }
)
"""Name -> row of Table 1, which has twelve of them for what the text calls 11 models."""


def workload(name: str) -> Workload:
    """One replica of a model of Table 1: its variables in gradient-ready order, which is assumed to be the forward order reversed."""
    if name not in MODELS:
        raise InvalidInput(f"the zoo's models are {', '.join(MODELS)}, but {name!r} was asked for")
    return Workload(name, MODELS[name].variables()[::-1], device="cuda", source="assumed")
