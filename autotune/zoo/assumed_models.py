"""Op graphs of all models of the zoo on an assumed device; here those that are neither images' nor BERTs."""

from __future__ import annotations

from autotune.errors import InvalidInput
from autotune.profiling.op_graph import OpGraph
from autotune.zoo.architectures import MODELS
from autotune.zoo.assumed_bert import bert_ops
from autotune.zoo.assumed_device import ADAM, AssumedDevice, Net
from autotune.zoo.assumed_vision import vision_ops

SENTENCE = 32
"""Tokens of a sentence in the transformer's attention: about the mean of WMT'14 English-German with its subtokens."""


def assumed_ops(
    model: str, batch: int | None = None, device: AssumedDevice | None = None
) -> OpGraph:
    """The op graph of a model of the zoo; `batch` in its own unit, by default that of its row. Raises `InvalidInput`.

    Its variables are those of `architectures.workload(model)`, in the same order.
    """
    if model not in MODELS:
        raise InvalidInput(
            f"times are assumed for the zoo's models {', '.join(MODELS)}, but {model!r} was asked for"
        )
    batch, device = (
        MODELS[model].batch_per_gpu if batch is None else batch,
        device or AssumedDevice(),
    )
    if batch < 1:
        raise InvalidInput(f"a step needs a batch of at least 1, but has {batch}")
    if model.startswith("bert"):
        return bert_ops(model, batch, device)
    if model.startswith("ncf"):
        return _NeuMF(device, model, batch).written()
    if model == "transformer":
        return _Transformer(device, batch).written()
    return vision_ops(model, batch, device)


class _Transformer(Net):
    """`tokens` go through the encoder and as many through the decoder."""

    def __init__(self, device: AssumedDevice, tokens: int) -> None:
        super().__init__(device, MODELS["transformer"].variables())
        self.tokens = float(tokens)
        self.vocabulary, self.hidden = self.variables["embedding_and_softmax/weights"].shape
        self.heads = self.variables["encoder/layer_0/self_attention/query/kernel"].shape[1]
        self.filters = self.variables["encoder/layer_0/ffn/filter_layer/kernel"].shape[1]

    def written(self) -> OpGraph:
        """The table is read first, so its gradient, which the softmax shares, is final at the end of the backward pass."""
        elements = self.tokens * self.hidden
        read = self.op(
            "embedding/gather",
            0.0,
            4 * elements,
            2 * elements,
            (),
            ("embedding_and_softmax/weights",),
        )
        ends: list[int] = []
        for stack, sublayers in (
            ("encoder", ("self_attention",)),
            ("decoder", ("self_attention", "encdec_attention")),
        ):
            at, layer = read, 0
            while f"{stack}/layer_{layer}/ffn/layer_norm/gamma" in self.variables:
                for sublayer in sublayers:
                    at = self._attention(
                        f"{stack}/layer_{layer}/{sublayer}",
                        at,
                        ends[0] if sublayer == "encdec_attention" else None,
                    )
                at = self._feed_forward(f"{stack}/layer_{layer}/ffn", at)
                layer += 1
            ends.append(self._norm(f"{stack}/layer_norm", at))
        logits = self.product("softmax/matmul", ends[1], self.tokens, self.hidden, self.vocabulary)
        self.pointwise("softmax/loss", self.tokens * self.vocabulary, (logits,))
        return self.graph("transformer", ADAM)

    def _norm(self, name: str, read: int) -> int:
        return self.pointwise(
            name, self.tokens * self.hidden, (read,), (f"{name}/gamma", f"{name}/beta")
        )

    def _attention(self, name: str, read: int, memory: int | None) -> int:
        """Keys and values come from `memory`, the encoder's end, where there is one."""
        n, h = self.tokens, self.hidden
        normed = self._norm(f"{name}/layer_norm", read)
        query, key, value = (
            self.product(
                f"{name}/{part}",
                normed if memory is None or part == "query" else memory,
                n,
                h,
                h,
                (f"{name}/{part}/kernel",),
            )
            for part in ("query", "key", "value")
        )
        scores = n * self.heads * SENTENCE
        product = self.op(
            f"{name}/scores", 2 * n * SENTENCE * h, 2 * n * h + scores, scores, (query, key)
        )
        weights = self.pointwise(f"{name}/softmax", scores, (product,))
        mixed = self.op(
            f"{name}/mix", 2 * n * SENTENCE * h, 2 * n * h + scores, n * h, (weights, value)
        )
        made = self.product(
            f"{name}/output_transform", mixed, n, h, h, (f"{name}/output_transform/kernel",)
        )
        return self.pointwise(f"{name}/residual", n * h, (read, made))

    def _feed_forward(self, name: str, read: int) -> int:
        n, h = self.tokens, self.hidden
        at = self._norm(f"{name}/layer_norm", read)
        for layer, inputs, outputs in (
            ("filter_layer", h, self.filters),
            ("output_layer", self.filters, h),
        ):
            at = self.product(
                f"{name}/{layer}",
                at,
                n,
                inputs,
                outputs,
                (f"{name}/{layer}/kernel", f"{name}/{layer}/bias"),
            )
        return self.pointwise(f"{name}/residual", n * h, (read, at))


class _NeuMF(Net):
    """Rows of two tables, a product of their first factors, a perceptron of the rest."""

    def __init__(self, device: AssumedDevice, model: str, batch: int) -> None:
        super().__init__(device, MODELS[model].variables())
        self.model, self.batch = model, float(batch)

    def written(self) -> OpGraph:
        """The gradient of a table that is not sparse is written in full."""
        tables = ["embedding_user/embeddings", "embedding_item/embeddings"]
        found, width = [], self.variables[tables[0]].shape[1]
        for name in tables:
            rows = self.batch * width
            gradient = 0.0 if self.variables[name].sparse else float(self.variables[name].elements)
            found.append(
                self.op(f"{name}/gather", 0.0, 2 * rows, rows, (), (name,), gradient=gradient)
            )
        product = self.pointwise("product", self.batch * width, tuple(found))
        layers = [
            own for own in self.variables if own.startswith("dense_") and own.endswith("/kernel")
        ]
        at = self.op("concat", 0.0, 2 * self.batch * width, self.batch * width, tuple(found))
        for kernel in layers:
            inputs, outputs = self.variables[kernel].shape
            name = kernel.removesuffix("/kernel")
            at = self.product(name, at, self.batch, inputs, outputs, (kernel, f"{name}/bias"))
            at = self.pointwise(f"{name}/relu", self.batch * outputs, (at,))
        both = self.op("concat_all", 0.0, 2 * self.batch * width, self.batch * width, (product, at))
        inputs, outputs = self.variables["rating/kernel"].shape
        self.product("rating", both, self.batch, inputs, outputs, ("rating/kernel", "rating/bias"))
        return self.graph(self.model, ADAM, rows_only=True)
