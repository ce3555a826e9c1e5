"""Op graphs of the zoo's BERTs on a device that is assumed: for models that nobody profiled.

Nothing here was measured, and everything made of it says so (`source="assumed"`). An op's time is the larger of its arithmetic over the
device's rate and its memory traffic over the memory's (the roofline; Williams et al., CACM 52(4), 2009), and at least the time to start
a kernel. A backward op of a layer with weights does twice the arithmetic and traffic of its forward op: the gradient of the input and
that of the weights. The sequence of ops is that of the published model: a projection, its bias, a softmax are an op each, so that there
is something to fuse.

| symbol | meaning |
|---|---|
| n | tokens of a replica's step: batch times sequence length |
| h | hidden size |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.profiling.op_graph import Op, OpGraph
from autotune.workload import Variable
from autotune.zoo.architectures import MODELS

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class AssumedDevice:
    """What an op's time is assumed from. The defaults are an NVIDIA V100's data sheet (fp32 15.7 TFLOP/s, 900 GB/s) times `efficiency`."""

    flop_per_s: float = 15.7e12
    memory_bytes_per_s: float = 900e9
    efficiency: float = 0.6
    kernel_s: float = 5e-6

    def __post_init__(self) -> None:
        if min(self.flop_per_s, self.memory_bytes_per_s, self.efficiency) <= 0 or self.kernel_s < 0:
            raise InvalidInput(f"an assumed device needs rates and an efficiency above 0, but is {self}")

    def seconds(self, flop: float, moved_bytes: float) -> float:
        return max(flop / self.flop_per_s, moved_bytes / self.memory_bytes_per_s) / self.efficiency + self.kernel_s


_BERTS = {"bert-3l": (3, 256, 4), "bert-6l": (6, 512, 8), "bert-base": (12, 768, 12), "bert-large": (24, 1024, 16)}
"""Layers, hidden size, heads; as in `architectures.MODELS`."""


def bert_ops(name: str, batch: int, sequence: int = 128, device: AssumedDevice | None = None) -> OpGraph:
    """The op graph of one of the zoo's BERTs in pre-training. Its variables are those of `architectures.workload(name)`."""
    if name not in _BERTS:
        raise InvalidInput(f"times are assumed for {', '.join(_BERTS)}, but {name!r} was asked for; give measured times")
    if batch < 1 or sequence < 1:
        raise InvalidInput(f"a step needs a batch and a sequence of at least 1, but has {batch} and {sequence}")
    layers, hidden, heads = _BERTS[name]
    made = _Bert(device or AssumedDevice(), batch * sequence, sequence, hidden, heads, {v.name: v for v in MODELS[name].variables()})
    return made.graph(name, layers)


class _Bert:
    """Adds ops in forward order and remembers what each reads."""

    def __init__(self, device: AssumedDevice, tokens: int, sequence: int, hidden: int, heads: int, variables: dict[str, Variable]) -> None:
        self.device, self.tokens, self.sequence, self.hidden, self.heads, self.variables = (
            device,
            tokens,
            sequence,
            hidden,
            heads,
            variables,
        )
        self.ops: list[Op] = []
        self.edges: list[tuple[int, int]] = []

    def graph(self, name: str, layers: int) -> OpGraph:
        at = self._embeddings()
        for layer in range(layers):
            at = self._layer(f"transformer/layer_{layer}", at)
        self._heads_of_training(at)
        left = set(self.variables) - {variable.name for op in self.ops for variable in op.variables}
        assert not left, left
        return OpGraph(name, tuple(self.ops), tuple(self.edges), self._update_s(), source="assumed")

    def _update_s(self) -> float:
        """Adam reads the gradient, the parameter and two moments and writes the last three."""
        return self.device.seconds(0.0, 7 * sum(variable.grad_bytes for variable in self.variables.values()))

    def _op(self, name: str, flop: float, moved: float, made: float, reads: Iterable[int], names: Iterable[str] = ()) -> int:
        """An op of `flop` operations that moves `moved` and makes `made` elements."""
        variables = tuple(self.variables[own] for own in names)
        forward_s = self.device.seconds(flop, moved * _FLOAT_BYTES)
        backward_s = self.device.seconds((2 if variables else 1) * flop, 2 * moved * _FLOAT_BYTES)
        code = f"{name.rsplit('/', 1)[-1]} {flop:g} {moved:g}"
        self.ops.append(Op(name, code, forward_s, backward_s, made * _FLOAT_BYTES, variables))
        self.edges.extend((before, len(self.ops) - 1) for before in sorted(set(reads)))
        return len(self.ops) - 1

    def _pointwise(self, name: str, width: int, reads: tuple[int, ...], names: Iterable[str] = ()) -> int:
        elements = float(self.tokens * width)
        return self._op(name, 5 * elements, (len(reads) + 1) * elements, elements, reads, names)

    def _dense(self, name: str, read: int, inputs: int, outputs: int) -> int:
        """The product with the kernel, then the bias."""
        n = float(self.tokens)
        moved = n * (inputs + outputs) + inputs * outputs
        product = self._op(f"{name}/matmul", 2 * n * inputs * outputs, moved, n * outputs, (read,), (f"{name}/kernel",))
        return self._pointwise(f"{name}/add_bias", outputs, (product,), (f"{name}/bias",))

    def _norm(self, name: str, reads: tuple[int, ...]) -> int:
        total = self._pointwise(f"{name}/residual", self.hidden, reads) if len(reads) > 1 else reads[0]
        return self._pointwise(f"{name}/normalize", self.hidden, (total,), (f"{name}/gamma", f"{name}/beta"))

    def _embeddings(self) -> int:
        n, h = float(self.tokens), float(self.hidden)
        found = [
            self._op(f"{name}/gather", 0.0, 2 * n * h, n * h, (), (f"{name}/embeddings",))
            for name in ("word_embeddings", "position_embedding", "type_embeddings")
        ]
        total = self._pointwise("embeddings/add", self.hidden, tuple(found))
        return self._norm("embeddings/layer_norm", (total,))

    def _layer(self, name: str, read: int) -> int:
        attended = self._attention(name, read)
        normed = self._norm(f"{name}/self_attention_layer_norm", (read, attended))
        inner = self._dense(f"{name}/intermediate", normed, self.hidden, 4 * self.hidden)
        active = self._pointwise(f"{name}/gelu", 4 * self.hidden, (inner,))
        outer = self._dense(f"{name}/output", active, 4 * self.hidden, self.hidden)
        return self._norm(f"{name}/output_layer_norm", (normed, outer))

    def _attention(self, name: str, read: int) -> int:
        n, h = float(self.tokens), self.hidden
        scores = n * self.heads * self.sequence
        query, key, value = (self._dense(f"{name}/self_attention/{part}", read, h, h) for part in ("query", "key", "value"))
        product = self._op(f"{name}/self_attention/scores", 2 * n * self.sequence * h, 2 * n * h + scores, scores, (query, key))
        weights = self._op(f"{name}/self_attention/softmax", 5 * scores, 2 * scores, scores, (product,))
        mixed = self._op(f"{name}/self_attention/mix", 2 * n * self.sequence * h, 2 * n * h + scores, n * h, (weights, value))
        return self._dense(f"{name}/self_attention_output", mixed, h, h)

    def _heads_of_training(self, read: int) -> None:
        """Both heads; the large product with the word table belongs to the embedding, whose gradient is final at the end of the step."""
        n, h = float(self.tokens), self.hidden
        vocabulary = self.variables["word_embeddings/embeddings"].shape[0]
        transformed = self._dense("cls/predictions/transform/dense", read, h, h)
        active = self._pointwise("cls/predictions/transform/gelu", h, (transformed,))
        normed = self._norm("cls/predictions/transform/layer_norm", (active,))
        masked = 0.15 * n  # BERT, sec. 3.1: the share of tokens that are predicted
        moved = masked * (h + vocabulary) + h * vocabulary
        logits = self._op("cls/predictions/matmul", 2 * masked * h * vocabulary, moved, masked * vocabulary, (normed,))
        self._op(
            "cls/predictions/add_bias", masked * vocabulary, 2 * masked * vocabulary, 0.0, (logits,), ("cls/predictions/output_bias/bias",)
        )
        pooled = self._dense("pooler_transform", read, h, h)
        self._dense("classification/logits", pooled, h, 2)
