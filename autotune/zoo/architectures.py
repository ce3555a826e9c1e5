"""The models of Table 1 of AutoSync's supplement (sec. 9.1), computed from their hyperparameters.

Nothing here was measured: these workloads have shapes and an order, but no times and no edges.

The published models are TensorFlow's, and so are the shapes: a convolution's kernel is (height,
width, inputs, outputs), a dense layer's (inputs, outputs), and an attention projection's has an
axis of heads. The functions list trained variables in forward order, without the moving statistics
of batch normalization. Each docstring names the implementation that it follows.

The table states whole millions. Transformer and the two small BERTs are rounded up (61.4 to 62,
10.5 to 11, 35.4 to 36), ResNet50 is cut off (23.5 to 23), and the others are rounded to the
nearest; BERT-large's figure is its paper's. `Model.tolerance` covers these differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType

from autotune.errors import InvalidInput
from autotune.workload import Variable, Workload

Variables = tuple[Variable, ...]

IMAGENET_CLASSES = 1000
BERT_VOCABULARY = 30522
"""WordPiece, uncased English, in all published BERT configurations."""
BERT_POSITIONS = 512
BERT_SEGMENTS = 2
WMT_VOCABULARY = 33708
"""Subtokens of WMT'14 English and German in tensorflow/models, shared by both languages."""
NCF_USERS, NCF_ITEMS = 2_197_225, 855_776
"""MovieLens-20M expanded x16x32, as MLPerf's data generator states them."""


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

    With `conv_bias`: tf.keras.applications, which AutoDist's published benchmark trains as
    ResNet101. Without: tensorflow/models (its ResNet50 v1.5) and torchvision.
    """

    def conv_norm(name: str, size: int, inputs: int, outputs: int) -> Variables:
        return _conv(f"{name}_conv", (size, size), inputs, outputs, conv_bias) + _norm(
            f"{name}_bn", outputs
        )

    variables = conv_norm("conv1", 7, 3, 64)
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            name = f"conv{stage + 2}_block{block + 1}"
            if block == 0:  # the shortcut has to change the number of channels
                variables += conv_norm(f"{name}_0", 1, channels, 4 * width)
            variables += conv_norm(f"{name}_1", 1, channels, width)
            variables += conv_norm(f"{name}_2", 3, width, width)
            variables += conv_norm(f"{name}_3", 1, width, 4 * width)
            channels = 4 * width
    return variables + _dense("predictions", channels, IMAGENET_CLASSES)


def vgg(convolutions: tuple[tuple[int, int], ...]) -> Variables:
    """VGG with (3x3 convolutions, channels) per block (Simonyan & Zisserman 2015), as in Keras."""
    variables: Variables = ()
    channels = 3
    for block, (count, width) in enumerate(convolutions):
        for index in range(count):
            variables += _conv(
                f"block{block + 1}_conv{index + 1}", (3, 3), channels, width, bias=True
            )
            channels = width
    side = 224 // 2 ** len(convolutions)  # every block halves both sides of a 224x224 image
    variables += _dense("fc1", side * side * channels, 4096) + _dense("fc2", 4096, 4096)
    return variables + _dense("predictions", 4096, IMAGENET_CLASSES)


def densenet(blocks: tuple[int, ...], growth: int) -> Variables:
    """DenseNet-BC (Huang et al. 2017, compression 0.5) with `blocks` layers per stage, in Keras."""
    channels = 2 * growth
    variables = _conv("conv1/conv", (7, 7), 3, channels) + _norm("conv1/bn", channels)
    for stage, count in enumerate(blocks):
        for block in range(count):
            name = f"conv{stage + 2}_block{block + 1}"
            variables += _norm(f"{name}_0_bn", channels)
            variables += _conv(f"{name}_1_conv", (1, 1), channels, 4 * growth)
            variables += _norm(f"{name}_1_bn", 4 * growth)
            variables += _conv(f"{name}_2_conv", (3, 3), 4 * growth, growth)
            channels += growth
        if stage + 1 < len(blocks):
            variables += _norm(f"pool{stage + 2}_bn", channels)
            variables += _conv(f"pool{stage + 2}_conv", (1, 1), channels, channels // 2)
            channels //= 2
    return variables + _norm("bn", channels) + _dense("predictions", channels, IMAGENET_CLASSES)


_Step = tuple[int, int, int]
"""(height, width, outputs) of a convolution."""
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
    """Inception v3 (Szegedy et al. 2016) as in Keras.

    There is no auxiliary classifier, and normalization has no scale.
    """

    def conv_norm(name: str, height: int, width: int, inputs: int, outputs: int) -> Variables:
        kernel = _conv(f"{name}/conv", (height, width), inputs, outputs)
        return (*kernel, Variable(f"{name}/bn/beta", (outputs,)))

    def branch(name: str, inputs: int, steps: _Branch) -> Variables:
        variables: Variables = ()
        for index, (height, width, outputs) in enumerate(steps):
            variables += conv_norm(f"{name}/{index}", height, width, inputs, outputs)
            inputs = outputs
        return variables

    variables = branch("stem", 3, ((3, 3, 32), (3, 3, 32), (3, 3, 64), (1, 1, 80), (3, 3, 192)))
    for block, (inputs, branches) in enumerate(_inception_mixed()):
        for index, steps in enumerate(branches):
            variables += branch(f"mixed{block}/branch{index}", inputs, steps)
    # In the last two blocks, two of four branches end in a pair of parallel convolutions.
    for block, inputs in ((9, 1280), (10, 2048)):
        name = f"mixed{block}"
        variables += branch(f"{name}/branch0", inputs, ((1, 1, 320),))
        for index, steps in ((1, ((1, 1, 384),)), (2, ((1, 1, 448), (3, 3, 384)))):
            variables += branch(f"{name}/branch{index}", inputs, steps)
            variables += conv_norm(f"{name}/branch{index}/wide", 1, 3, 384, 384)
            variables += conv_norm(f"{name}/branch{index}/high", 3, 1, 384, 384)
        variables += branch(f"{name}/branch3", inputs, ((1, 1, 192),))
    return variables + _dense("predictions", 2048, IMAGENET_CLASSES)


# Translation and language modeling


def _attention(name: str, output: str, hidden: int, heads: int, bias: bool) -> Variables:
    width = hidden // heads
    variables: Variables = ()
    for part in ("query", "key", "value"):
        variables += (Variable(f"{name}/{part}/kernel", (hidden, heads, width)),)
        if bias:
            variables += (Variable(f"{name}/{part}/bias", (heads, width)),)
    variables += (Variable(f"{output}/kernel", (heads, width, hidden)),)
    return (*variables, Variable(f"{output}/bias", (hidden,))) if bias else variables


def transformer(
    layers: int, hidden: int, filters: int, heads: int, vocabulary: int = WMT_VOCABULARY
) -> Variables:
    """Transformer (Vaswani et al. 2017) as in official/nlp/transformer of tensorflow/models.

    Normalization comes first, attention has no biases, and positions are not learned. Input,
    output and softmax share one table, so its gradient is dense: the softmax fills every row.
    """

    def attention(name: str) -> Variables:
        output = f"{name}/output_transform"
        projections = _attention(name, output, hidden, heads, bias=False)
        return _norm(f"{name}/layer_norm", hidden) + projections

    def feed_forward(name: str) -> Variables:
        inner = _dense(f"{name}/filter_layer", hidden, filters)
        outer = _dense(f"{name}/output_layer", filters, hidden)
        return _norm(f"{name}/layer_norm", hidden) + inner + outer

    variables: Variables = (Variable("embedding_and_softmax/weights", (vocabulary, hidden)),)
    for stack, sublayers in (
        ("encoder", ("self_attention",)),
        ("decoder", ("self_attention", "encdec_attention")),
    ):
        for layer in range(layers):
            for sublayer in sublayers:
                variables += attention(f"{stack}/layer_{layer}/{sublayer}")
            variables += feed_forward(f"{stack}/layer_{layer}/ffn")
        variables += _norm(f"{stack}/layer_norm", hidden)
    return variables


def bert(layers: int, hidden: int, heads: int) -> Variables:
    """BERT (Devlin et al. 2019) for pre-training, as in official/nlp/bert of tensorflow/models.

    The output of the masked language model shares the word table, so the table's gradient is dense.
    Positions are sliced and segments multiplied as one-hot vectors, so those gradients are dense.
    """
    variables: Variables = (
        Variable("word_embeddings/embeddings", (BERT_VOCABULARY, hidden)),
        Variable("position_embedding/embeddings", (BERT_POSITIONS, hidden)),
        Variable("type_embeddings/embeddings", (BERT_SEGMENTS, hidden)),
    )
    variables += _norm("embeddings/layer_norm", hidden)
    for layer in range(layers):
        name = f"transformer/layer_{layer}"
        attention = f"{name}/self_attention"
        variables += _attention(attention, f"{attention}_output", hidden, heads, bias=True)
        variables += _norm(f"{name}/self_attention_layer_norm", hidden)
        variables += _dense(f"{name}/intermediate", hidden, 4 * hidden)
        variables += _dense(f"{name}/output", 4 * hidden, hidden)
        variables += _norm(f"{name}/output_layer_norm", hidden)
    variables += _dense("pooler_transform", hidden, hidden)
    variables += _dense("cls/predictions/transform/dense", hidden, hidden)
    variables += _norm("cls/predictions/transform/layer_norm", hidden)
    variables += (Variable("cls/predictions/output_bias/bias", (BERT_VOCABULARY,)),)
    # Is the second sentence the next one?
    return variables + _dense("classification/logits", hidden, 2)


# Recommendation


def neumf(sparse: bool, factors: int = 8, layers: tuple[int, ...] = (64, 32, 16, 8)) -> Variables:
    """Neural matrix factorization (He et al. 2017), by the defaults of tensorflow/models.

    As in official/recommendation, one table for users and one for items hold the factors of the
    product and the inputs of the perceptron. Only the data are MLPerf's: with the 64 factors and
    the layers 256, 256, 128, 64 of MLPerf's own model it would have 586 million parameters, not
    122. `sparse`: a step's gradient of a table is the rows of its batch (IndexedSlices).
    """
    width = factors + layers[0] // 2
    variables: Variables = (
        Variable("embedding_user/embeddings", (NCF_USERS, width), sparse=sparse),
        Variable("embedding_item/embeddings", (NCF_ITEMS, width), sparse=sparse),
    )
    for index, (inputs, outputs) in enumerate(pairwise(layers)):
        variables += _dense(f"dense_{index}", inputs, outputs)
    return variables + _dense("rating", factors + layers[-1], 1)


@dataclass(frozen=True)
class Model:
    """A row of Table 1. `variables` builds them in forward order.

    `stated_parameters` is the table's figure; `counted_parameters` is within `tolerance` (relative)
    of it. It excludes variables whose names begin with `not_counted`, as the table does; they are
    trained and synchronized all the same.
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


_IMAGES = partial(Model, "image classification", "ImageNet", 32)
_LANGUAGE = partial(Model, "language modeling", "Wiki & BookCorpus")
_NCF = partial(
    Model, "collaborative filtering", "MovieLens-20Mx16x32", 256, 122_000_000, 0.005
)  # 122.12 million
_RESNET50 = partial(resnet, (3, 4, 6, 3), conv_bias=False)
_VGG16 = partial(vgg, ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)))
_TRANSFORMER = partial(transformer, 6, 512, 2048, 8)

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        # 23 million is ResNet50 without its classifier (23.51); the trained model has 25.56. The 45
        # million of ResNet101 include the classifier: 44.60, and 42.55 without.
        "resnet50": _IMAGES(23_000_000, 0.025, _RESNET50, not_counted="predictions/"),
        "resnet101": _IMAGES(45_000_000, 0.01, partial(resnet, (3, 4, 23, 3), conv_bias=True)),
        "inception-v3": _IMAGES(24_000_000, 0.01, inception_v3),  # 23.82
        "vgg16": _IMAGES(138_000_000, 0.005, _VGG16),  # 138.36
        "densenet121": _IMAGES(8_000_000, 0.005, partial(densenet, (6, 12, 24, 16), 32)),  # 7.98
        # 61.36: the base model of tensorflow/models; its big model has 210.
        "transformer": Model(
            "machine translation",
            "WMT'14 en-de",
            5000,
            62_000_000,
            0.015,
            _TRANSFORMER,
            batch_unit="tokens",
        ),
        "ncf-dense": _NCF(partial(neumf, sparse=False)),
        "ncf-sparse": _NCF(partial(neumf, sparse=True)),
        # The widths of the two small ones are not published. 256 and 512, those of Google's small
        # BERT models, are nearest to the stated counts (10.48 and 35.36); with 768, as in the base
        # model, three layers would have 46.3 and six layers 67.6.
        "bert-3l": _LANGUAGE(32, 11_000_000, 0.05, partial(bert, 3, 256, 4)),
        "bert-6l": _LANGUAGE(32, 36_000_000, 0.02, partial(bert, 6, 512, 8)),
        "bert-base": _LANGUAGE(32, 110_000_000, 0.005, partial(bert, 12, 768, 12)),  # 110.11
        # 336.23; its paper rounds it to 340
        "bert-large": _LANGUAGE(8, 340_000_000, 0.015, partial(bert, 24, 1024, 16)),
    }
)
"""Name -> row of Table 1, which has twelve rows for the 11 models of the text."""


def zoo_name(name: str) -> str | None:
    """The zoo's name of a model, ignoring case and dashes; None if the zoo does not have it."""
    normalized = name.lower().replace("_", "-")
    return normalized if normalized in MODELS else None


def workload(name: str) -> Workload:
    """One replica of a model of Table 1, in gradient-ready order: the forward order reversed."""
    if name not in MODELS:
        raise InvalidInput(f"the zoo's models are {', '.join(MODELS)}, but {name!r} was asked for")
    return Workload(name, MODELS[name].variables()[::-1], device="cuda", source="assumed")
