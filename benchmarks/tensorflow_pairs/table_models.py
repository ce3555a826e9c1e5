"""The zoo's models of Table 1 as TensorFlow graphs: their variables, forward passes and losses.

Shapes and names are those of `autotune.zoo.architectures`. The graphs are of TensorFlow 1's kind:
their variables need no memory until a session sets them, so that the largest ones can be rewritten
too. Batch normalization uses the batch's statistics and keeps no others. Dropout is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from autotune.workload import Variable, Workload
from autotune.zoo.architectures import workload as zoo
from runtime_rewriter.tensorflow.gradient_marks import marked_gradients
from runtime_rewriter.tensorflow.graph_view import TensorName
from runtime_rewriter.tensorflow.normal_form import add_ends, normal_form
from runtime_rewriter.tensorflow.training_graph import Feed, GraphVariable, TrainingGraph

v1 = tf.compat.v1

LABELS = "labels"
MASKED = 5
"""Masked words per sentence of BERT's pre-training, here at the first places."""


@dataclass(frozen=True)
class Example:
    """What a model reads: feeds of one example, (shape, exclusive limit of an index or None)."""

    feeds: Mapping[str, tuple[tuple[int, ...], int | None]]

    def batch(self, rows: int, seed: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(seed)
        return {
            name: random.normal(size=(rows, *shape)).astype("float32")
            if limit is None
            else random.integers(0, limit, (rows, *shape)).astype("int32")
            for name, (shape, limit) in self.feeds.items()
        }


class Net:
    """Layers that read variables by their names. Every variable must be read."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        self.variables: dict[str, Any] = {}
        for one in variables:
            start = v1.zeros_initializer()
            self.variables[one.name] = v1.get_variable(
                one.name, one.shape, one.dtype, start, use_resource=True
            )

    def __contains__(self, name: str) -> bool:
        return name in self.variables

    def read(self, name: str) -> Any:
        return self.variables[name]

    def conv(self, name: str, value: Any, stride: int = 1, padding: str = "SAME") -> Any:
        value = tf.nn.conv2d(value, self.read(f"{name}/kernel"), stride, padding)
        return value + self.read(f"{name}/bias") if f"{name}/bias" in self else value

    def batch_norm(self, name: str, value: Any, active: bool = True) -> Any:
        mean, variance = tf.nn.moments(value, [0, 1, 2])
        scale = self.read(f"{name}/gamma") if f"{name}/gamma" in self else None
        offset = self.read(f"{name}/beta")
        value = tf.nn.batch_normalization(value, mean, variance, offset, scale, 1e-3)
        return tf.nn.relu(value) if active else value

    def dense(self, name: str, value: Any) -> Any:
        return tf.matmul(value, self.read(f"{name}/kernel")) + self.read(f"{name}/bias")

    def layer_norm(self, name: str, value: Any) -> Any:
        mean, variance = tf.nn.moments(value, [-1], keepdims=True)
        scale, offset = self.read(f"{name}/gamma"), self.read(f"{name}/beta")
        return tf.nn.batch_normalization(value, mean, variance, offset, scale, 1e-6)

    def over_words(self, name: str, value: Any) -> Any:
        """A dense layer at each position of (batch, words, width)."""
        kernel, bias = self.read(f"{name}/kernel"), self.read(f"{name}/bias")
        return tf.einsum("bld,de->ble", value, kernel) + bias

    def attention(self, name: str, output: str, queries: Any, memory: Any, mask: Any = None) -> Any:
        parts = {}
        for part, source in (("query", queries), ("key", memory), ("value", memory)):
            projected = tf.einsum("bld,dhk->blhk", source, self.read(f"{name}/{part}/kernel"))
            bias = f"{name}/{part}/bias"
            parts[part] = projected + self.read(bias) if bias in self else projected
        width = parts["query"].shape[-1]
        scores = tf.einsum("bqhk,bmhk->bhqm", parts["query"], parts["key"]) / float(width) ** 0.5
        shares = tf.nn.softmax(scores if mask is None else scores + mask)
        mixed = tf.einsum("bhqm,bmhk->bqhk", shares, parts["value"])
        result = tf.einsum("bqhk,hkd->bqd", mixed, self.read(f"{output}/kernel"))
        bias = f"{output}/bias"
        return result + self.read(bias) if bias in self else result


def _cross_entropy(logits: Any, labels: Any) -> Any:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(losses)


def _classified(net: Net, value: Any, feeds: Mapping[str, Any]) -> Any:
    pooled = tf.reduce_mean(value, [1, 2])
    return _cross_entropy(net.dense("predictions", pooled), feeds[LABELS])


def _resnet(net: Net, feeds: Mapping[str, Any]) -> Any:
    value = net.batch_norm("conv1_bn", net.conv("conv1_conv", feeds["image"], 2))
    value = tf.nn.max_pool2d(value, 3, 2, "SAME")
    for stage in range(2, 6):
        block = 1
        while (name := f"conv{stage}_block{block}") + "_1_conv/kernel" in net:
            stride = 2 if block == 1 and stage > 2 else 1
            shortcut = value
            if block == 1:
                shortcut = net.conv(f"{name}_0_conv", value, stride)
                shortcut = net.batch_norm(f"{name}_0_bn", shortcut, active=False)
            value = net.batch_norm(f"{name}_1_bn", net.conv(f"{name}_1_conv", value, stride))
            value = net.batch_norm(f"{name}_2_bn", net.conv(f"{name}_2_conv", value))
            value = net.conv(f"{name}_3_conv", value)
            value = tf.nn.relu(shortcut + net.batch_norm(f"{name}_3_bn", value, active=False))
            block += 1
    return _classified(net, value, feeds)


def _vgg(net: Net, feeds: Mapping[str, Any]) -> Any:
    value = feeds["image"]
    for block in range(1, 6):
        index = 1
        while (name := f"block{block}_conv{index}") + "/kernel" in net:
            value = tf.nn.relu(net.conv(name, value))
            index += 1
        value = tf.nn.max_pool2d(value, 2, 2, "SAME")
    value = tf.reshape(value, [-1, net.read("fc1/kernel").shape[0]])
    for name in ("fc1", "fc2"):
        value = tf.nn.relu(net.dense(name, value))
    return _cross_entropy(net.dense("predictions", value), feeds[LABELS])


def _densenet(net: Net, feeds: Mapping[str, Any]) -> Any:
    value = net.batch_norm("conv1/bn", net.conv("conv1/conv", feeds["image"], 2))
    value = tf.nn.max_pool2d(value, 3, 2, "SAME")
    for stage in range(2, 6):
        block = 1
        while (name := f"conv{stage}_block{block}") + "_1_conv/kernel" in net:
            inner = net.conv(f"{name}_1_conv", net.batch_norm(f"{name}_0_bn", value))
            inner = net.conv(f"{name}_2_conv", net.batch_norm(f"{name}_1_bn", inner))
            value = tf.concat([value, inner], 3)
            block += 1
        if f"pool{stage}_bn/gamma" in net:
            value = net.conv(f"pool{stage}_conv", net.batch_norm(f"pool{stage}_bn", value))
            value = tf.nn.avg_pool2d(value, 2, 2, "SAME")
    return _classified(net, net.batch_norm("bn", value), feeds)


def _inception(net: Net, feeds: Mapping[str, Any]) -> Any:
    value = feeds["image"]
    for index in range(5):
        stride = 2 if index == 0 else 1
        value = net.batch_norm(f"stem/{index}/bn", net.conv(f"stem/{index}/conv", value, stride))
        if index in (2, 4):
            value = tf.nn.max_pool2d(value, 3, 2, "SAME")
    for block in range(11):
        value = _mixed(net, block, value)
    return _classified(net, value, feeds)


def _mixed(net: Net, block: int, value: Any) -> Any:
    """Parallel branches. Blocks 3 and 8 halve the sides in the last convolution of each."""
    halves, ends = block in (3, 8), []
    for branch in range(4):
        path, steps, at = f"mixed{block}/branch{branch}", 0, value
        while f"{path}/{steps}/conv/kernel" in net:
            steps += 1
        if branch == 3 and steps and not halves:
            at = tf.nn.avg_pool2d(value, 3, 1, "SAME")
        for index in range(steps):
            stride = 2 if halves and index == steps - 1 else 1
            step = f"{path}/{index}"
            at = net.batch_norm(f"{step}/bn", net.conv(f"{step}/conv", at, stride))
        parts = [f"{path}/{part}" for part in ("wide", "high") if f"{path}/{part}/bn/beta" in net]
        if parts:
            ends += [net.batch_norm(f"{one}/bn", net.conv(f"{one}/conv", at)) for one in parts]
        elif steps:
            ends.append(at)
    if halves:
        ends.append(tf.nn.max_pool2d(value, 3, 2, "SAME"))
    return tf.concat(ends, 3)


def _transformer(net: Net, feeds: Mapping[str, Any]) -> Any:
    table = net.read("embedding_and_softmax/weights")
    words = feeds[LABELS].shape[1]
    future = tf.linalg.band_part(tf.ones([words, words]), 0, -1) - tf.eye(words)
    encoded = _stack(net, "encoder", _embedded(table, feeds["source"]), None, 0.0)
    shifted = tf.pad(feeds[LABELS], [[0, 0], [1, 0]])[:, :-1]
    decoded = _stack(net, "decoder", _embedded(table, shifted), encoded, future * -1e9)
    logits = tf.einsum("bld,vd->blv", decoded, table)
    return _cross_entropy(logits, feeds[LABELS])


def _embedded(table: Any, words: Any) -> Any:
    # The softmax makes the table's gradient dense anyway: gather from the read value.
    rows = tf.gather(tf.convert_to_tensor(table), words)
    places = np.arange(int(words.shape[1]), dtype="float32")[:, None]
    rates = 1e4 ** (-np.arange(0, int(table.shape[1]), 2) / int(table.shape[1]))
    angles = places * rates.astype("float32")
    positions = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    return rows * float(table.shape[1]) ** 0.5 + positions


def _stack(net: Net, stack: str, value: Any, encoded: Any, mask: Any) -> Any:
    layer = 0
    while (name := f"{stack}/layer_{layer}") + "/ffn/layer_norm/gamma" in net:
        for sublayer in ("self_attention", "encdec_attention"):
            path = f"{name}/{sublayer}"
            if f"{path}/layer_norm/gamma" not in net:
                continue
            ready = net.layer_norm(f"{path}/layer_norm", value)
            own = sublayer == "self_attention"
            memory, hidden = (ready, mask) if own else (encoded, None)
            value += net.attention(path, f"{path}/output_transform", ready, memory, hidden)
        ready = net.layer_norm(f"{name}/ffn/layer_norm", value)
        inner = tf.nn.relu(net.over_words(f"{name}/ffn/filter_layer", ready))
        value += net.over_words(f"{name}/ffn/output_layer", inner)
        layer += 1
    return net.layer_norm(f"{stack}/layer_norm", value)


def _bert(net: Net, feeds: Mapping[str, Any]) -> Any:
    table = net.read("word_embeddings/embeddings")
    words = feeds["words"].shape[1]
    value = tf.gather(tf.convert_to_tensor(table), feeds["words"])
    value += tf.convert_to_tensor(net.read("position_embedding/embeddings"))[:words]
    segments = tf.one_hot(feeds["segments"], 2)
    value += tf.einsum("bls,sd->bld", segments, net.read("type_embeddings/embeddings"))
    value = net.layer_norm("embeddings/layer_norm", value)
    layer = 0
    while (name := f"transformer/layer_{layer}") + "/intermediate/kernel" in net:
        attention = f"{name}/self_attention"
        value += net.attention(attention, f"{attention}_output", value, value)
        value = net.layer_norm(f"{name}/self_attention_layer_norm", value)
        inner = tf.nn.gelu(net.over_words(f"{name}/intermediate", value))
        value = net.layer_norm(
            f"{name}/output_layer_norm", value + net.over_words(f"{name}/output", inner)
        )
        layer += 1
    masked = tf.nn.gelu(net.over_words("cls/predictions/transform/dense", value[:, :MASKED]))
    masked = net.layer_norm("cls/predictions/transform/layer_norm", masked)
    logits = tf.einsum("bld,vd->blv", masked, table)
    logits += net.read("cls/predictions/output_bias/bias")
    first = tf.nn.tanh(net.dense("pooler_transform", value[:, 0]))
    next_loss = _cross_entropy(net.dense("classification/logits", first), feeds["follows"])
    return _cross_entropy(logits, feeds[LABELS]) + next_loss


def _neumf(net: Net, feeds: Mapping[str, Any], sparse: bool, factors: int = 8) -> Any:
    products, inputs = [], []
    for name in ("user", "item"):
        table = net.read(f"embedding_{name}/embeddings")
        # A gather from the variable has the gradient as rows, one from its value a dense one.
        rows = tf.gather(table if sparse else table * 1.0, feeds[name])
        products.append(rows[:, :factors])
        inputs.append(rows[:, factors:])
    value, layer = tf.concat(inputs, 1), 0
    while f"dense_{layer}/kernel" in net:
        value = tf.nn.relu(net.dense(f"dense_{layer}", value))
        layer += 1
    both = tf.concat([products[0] * products[1], value], 1)
    logits = net.dense("rating", both)[:, 0]
    labels = tf.cast(feeds[LABELS], tf.float32)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(losses)


_WORDS = 16
_Forward = Callable[[Net, Mapping[str, Any]], Any]


def _images(side: int) -> Example:
    return Example({"image": ((side, side, 3), None), LABELS: ((), 1000)})


_BERT = Example(
    {
        "words": ((_WORDS,), 30000),
        "segments": ((_WORDS,), 2),
        "follows": ((), 2),
        LABELS: ((MASKED,), 30000),
    }
)
_RATING = Example({"user": ((), 100_000), "item": ((), 100_000), LABELS: ((), 2)})
_TRANSLATION = Example({"source": ((_WORDS,), 30000), LABELS: ((_WORDS,), 30000)})
TABLE: Mapping[str, tuple[_Forward, Example]] = {
    "resnet50": (_resnet, _images(64)),
    "resnet101": (_resnet, _images(64)),
    "inception-v3": (_inception, _images(75)),
    "vgg16": (_vgg, _images(224)),
    "densenet121": (_densenet, _images(64)),
    "transformer": (_transformer, _TRANSLATION),
    "ncf-dense": (partial(_neumf, sparse=False), _RATING),
    "ncf-sparse": (partial(_neumf, sparse=True), _RATING),
    "bert-3l": (_bert, _BERT),
    "bert-6l": (_bert, _BERT),
    "bert-base": (_bert, _BERT),
    "bert-large": (_bert, _BERT),
}
"""Model -> forward pass with loss, and an example. Images are small where the shapes allow it."""


def training_graph(model: str) -> TrainingGraph:
    """A step of Adam on the model's loss; the initial values of variables are left out."""
    forward, example = TABLE[model]
    workload: Workload = zoo(model)
    graph = tf.Graph()
    with graph.as_default(), marked_gradients() as marks:
        v1.enable_resource_variables()
        feeds = {
            name: v1.placeholder(tf.float32 if limit is None else tf.int32, [None, *shape], name)
            for name, (shape, limit) in example.feeds.items()
        }
        net = Net(workload.variables[::-1])
        loss = tf.identity(forward(net, feeds), "loss")
        optimizer = v1.train.AdamOptimizer(1e-3)
        train = optimizer.minimize(loss, var_list=list(net.variables.values()))
        graph_def = graph.as_graph_def()
        add_ends(graph_def, [train.name], [loss])
        named: list[str | None] = [variable.op.name for variable in marks.variables]
        every = [
            GraphVariable(one.op.name, tuple(one.shape.as_list()), one.dtype.base_dtype.name)
            for one in v1.global_variables()
        ]
    split = [Feed(name, TensorName(name, 0), split=True) for name in feeds]
    nothing: dict[str, Any] = dict.fromkeys((one.name for one in every), None)
    return normal_form(graph_def, every, named, split, ["loss"], nothing)


def started(training: TrainingGraph, seed: int) -> TrainingGraph:
    """Give variables initial values: normal kernels, scales of 1, and zeros for all else."""
    random = np.random.default_rng(seed)

    def value(one: GraphVariable) -> np.ndarray:
        if one.name.endswith("/gamma"):
            return np.ones(one.shape, one.dtype)
        if one.name in training.gradient_of and len(one.shape) > 1:
            inputs = int(np.prod(one.shape[:-1]))
            drawn: np.ndarray = random.standard_normal(one.shape) / inputs**0.5
            return drawn.astype(one.dtype)
        power = {"beta1_power": 0.9, "beta2_power": 0.999}.get(one.name, 0.0)
        return np.full(one.shape, power, one.dtype)

    return replace(training, initial={one.name: value(one) for one in training.variables})
