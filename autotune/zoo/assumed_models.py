"""Op graphs of all models of the zoo on an assumed device, and the nets of its text models.

Each op of a published model is one op here: a projection, its bias and a softmax are separate, so
that fusion has candidates.

| symbol | meaning |
|---|---|
| n | tokens of a replica's step |
| h | hidden size |
"""

from __future__ import annotations

from autotune.errors import InvalidInput
from autotune.profiling.op_graph import OpGraph
from autotune.zoo.architectures import MODELS
from autotune.zoo.assumed_device import ADAM, AssumedDevice, Net
from autotune.zoo.assumed_vision import Vision

SENTENCE = 32
"""Tokens of a sentence in the transformer: about the mean of WMT'14 English-German in subtokens."""
SEQUENCE = 128
"""Tokens of an example in nine tenths of BERT's pre-training (Devlin et al., appendix A.2)."""


def assumed_ops(
    model: str, batch: int | None = None, device: AssumedDevice | None = None
) -> OpGraph:
    """The op graph of a model of the zoo; `batch` in its own unit, by default that of Table 1.

    Its variables are those of `architectures.workload(model)`, in the same order. Raises
    `InvalidInput` for an unknown model, or a batch below 1.
    """
    if model not in MODELS:
        raise InvalidInput(
            f"times are assumed for the zoo's models {', '.join(MODELS)}, "
            f"but {model!r} was asked for"
        )
    size = MODELS[model].batch_per_gpu if batch is None else batch
    if size < 1:
        raise InvalidInput(f"a step needs a batch of at least 1, but has {size}")
    families: dict[str, type[Net]] = {"bert": _Bert, "ncf": _NeuMF, "transformer": _Transformer}
    net = families.get(model.partition("-")[0], Vision)
    return net(device or AssumedDevice(), model, size).op_graph()


class _Bert(Net):
    """BERT in pre-training; `batch` counts examples."""

    def __init__(self, device: AssumedDevice, model: str, batch: int) -> None:
        super().__init__(device, model, batch)
        self.tokens = batch * SEQUENCE
        query = self.variables["transformer/layer_0/self_attention/query/kernel"]
        self.hidden, self.heads, _ = query.shape

    def op_graph(self) -> OpGraph:
        at, layer = self._embeddings(), 0
        while (name := f"transformer/layer_{layer}") + "/output/kernel" in self.variables:
            at = self._layer(name, at)
            layer += 1
        self._training_heads(at)
        return self.graph(ADAM)

    def _dense(self, name: str, read: int, inputs: int, outputs: int) -> int:
        """The product with the kernel, then the bias."""
        product = self.product(
            f"{name}/matmul", read, self.tokens, inputs, outputs, f"{name}/kernel"
        )
        elements = float(self.tokens * outputs)
        return self.pointwise(f"{name}/add_bias", elements, (product,), (f"{name}/bias",))

    def _norm(self, name: str, *reads: int) -> int:
        elements = float(self.tokens * self.hidden)
        total = reads[0]
        if len(reads) > 1:
            total = self.pointwise(f"{name}/residual", elements, reads)
        scale = (f"{name}/gamma", f"{name}/beta")
        return self.pointwise(f"{name}/normalize", elements, (total,), scale)

    def _embeddings(self) -> int:
        elements = float(self.tokens) * float(self.hidden)
        gathered = [
            self.gather(f"{name}/gather", f"{name}/embeddings", elements, 2 * elements)
            for name in ("word_embeddings", "position_embedding", "type_embeddings")
        ]
        total = self.pointwise("embeddings/add", elements, tuple(gathered))
        return self._norm("embeddings/layer_norm", total)

    def _layer(self, name: str, read: int) -> int:
        attended = self._attention(name, read)
        normed = self._norm(f"{name}/self_attention_layer_norm", read, attended)
        inner = self._dense(f"{name}/intermediate", normed, self.hidden, 4 * self.hidden)
        active = self.pointwise(f"{name}/gelu", float(self.tokens * 4 * self.hidden), (inner,))
        outer = self._dense(f"{name}/output", active, 4 * self.hidden, self.hidden)
        return self._norm(f"{name}/output_layer_norm", normed, outer)

    def _attention(self, layer: str, read: int) -> int:
        n, h = float(self.tokens), self.hidden
        name = f"{layer}/self_attention"
        query, key, value = (
            self._dense(f"{name}/{part}", read, h, h) for part in ("query", "key", "value")
        )
        scores = n * self.heads * SEQUENCE
        flop, moved = 2 * n * SEQUENCE * h, 2 * n * h + scores
        product = self.op(f"{name}/scores", flop, moved, scores, (query, key), is_matmul=True)
        weights = self.op(f"{name}/softmax", 5 * scores, 2 * scores, scores, (product,))
        mixed = self.op(f"{name}/mix", flop, moved, n * h, (weights, value), is_matmul=True)
        return self._dense(f"{layer}/self_attention_output", mixed, h, h)

    def _training_heads(self, read: int) -> None:
        """Both heads of the pre-training.

        The large product with the word table belongs to the embedding, whose gradient is final at
        the end of the step.
        """
        n, h = float(self.tokens), self.hidden
        vocabulary = self.variables["word_embeddings/embeddings"].shape[0]
        name = "cls/predictions"
        transformed = self._dense(f"{name}/transform/dense", read, h, h)
        active = self.pointwise(f"{name}/transform/gelu", n * h, (transformed,))
        normed = self._norm(f"{name}/transform/layer_norm", active)
        masked = 0.15 * n  # share of predicted tokens, BERT, sec. 3.1
        words = masked * vocabulary
        logits = self.product(f"{name}/matmul", normed, masked, h, vocabulary)
        bias = f"{name}/output_bias/bias"
        self.op(f"{name}/add_bias", words, 2 * masked * vocabulary, 0.0, (logits,), (bias,))
        pooled = self._dense("pooler_transform", read, h, h)
        self._dense("classification/logits", pooled, h, 2)


class _Transformer(Net):
    """`batch` tokens pass the encoder, and as many the decoder."""

    def __init__(self, device: AssumedDevice, model: str, batch: int) -> None:
        super().__init__(device, model, batch)
        self.tokens = float(batch)
        self.vocabulary, self.hidden = self.variables["embedding_and_softmax/weights"].shape
        self.heads = self.variables["encoder/layer_0/self_attention/query/kernel"].shape[1]
        self.filters = self.variables["encoder/layer_0/ffn/filter_layer/kernel"].shape[1]
        self.elements = self.tokens * self.hidden

    def op_graph(self) -> OpGraph:
        """The softmax shares the first table, so its gradient is final at the end."""
        elements, table = self.elements, "embedding_and_softmax/weights"
        read = self.gather("embedding/gather", table, 2 * elements, 4 * elements)
        encoded = self._stack("encoder", read, None)
        decoded = self._stack("decoder", read, encoded)
        logits = self.product("softmax/matmul", decoded, self.tokens, self.hidden, self.vocabulary)
        self.pointwise("softmax/loss", self.tokens * self.vocabulary, (logits,))
        return self.graph(ADAM)

    def _stack(self, stack: str, at: int, encoded: int | None) -> int:
        layer = 0
        while (name := f"{stack}/layer_{layer}") + "/ffn/layer_norm/gamma" in self.variables:
            at = self._attention(f"{name}/self_attention", at, None)
            if encoded is not None:
                at = self._attention(f"{name}/encdec_attention", at, encoded)
            at = self._feed_forward(f"{name}/ffn", at)
            layer += 1
        return self._norm(f"{stack}/layer_norm", at)

    def _norm(self, name: str, read: int) -> int:
        return self.pointwise(name, self.elements, (read,), (f"{name}/gamma", f"{name}/beta"))

    def _attention(self, name: str, read: int, encoded: int | None) -> int:
        """Keys and values come from `encoded`, the encoder's end, if it is given."""
        n, h = self.tokens, self.hidden
        normed = self._norm(f"{name}/layer_norm", read)
        source = normed if encoded is None else encoded
        query, key, value = (
            self.product(f"{name}/{part}", at, n, h, h, f"{name}/{part}/kernel")
            for part, at in (("query", normed), ("key", source), ("value", source))
        )
        scores = n * self.heads * SENTENCE
        flop, moved = 2 * n * SENTENCE * h, 2 * n * h + scores
        product = self.op(f"{name}/scores", flop, moved, scores, (query, key), is_matmul=True)
        weights = self.pointwise(f"{name}/softmax", scores, (product,))
        mixed = self.op(f"{name}/mix", flop, moved, n * h, (weights, value), is_matmul=True)
        output = f"{name}/output_transform"
        projected = self.product(output, mixed, n, h, h, f"{output}/kernel")
        return self.pointwise(f"{name}/residual", n * h, (read, projected))

    def _feed_forward(self, name: str, read: int) -> int:
        sizes = (
            ("filter_layer", self.hidden, self.filters),
            ("output_layer", self.filters, self.hidden),
        )
        at = self._norm(f"{name}/layer_norm", read)
        for layer, inputs, outputs in sizes:
            dense = f"{name}/{layer}"
            names = (f"{dense}/kernel", f"{dense}/bias")
            at = self.product(dense, at, self.tokens, inputs, outputs, *names)
        return self.pointwise(f"{name}/residual", self.elements, (read, at))


class _NeuMF(Net):
    """Rows of two tables: a product of their first factors, and a perceptron of the others."""

    def op_graph(self) -> OpGraph:
        batch = float(self.batch)
        gathered = []
        for name in ("embedding_user/embeddings", "embedding_item/embeddings"):
            rows = batch * self.variables[name].shape[1]
            gathered.append(self.gather(f"{name}/gather", name, rows, 2 * rows))
        product = self.pointwise("product", rows, tuple(gathered))
        at = self.op("concat", 0.0, 2 * rows, rows, tuple(gathered))
        for kernel, variable in self.variables.items():
            name = kernel.removesuffix("/kernel")
            if name.startswith("dense_") and name != kernel:
                inputs, outputs = variable.shape
                at = self.product(name, at, batch, inputs, outputs, kernel, f"{name}/bias")
                at = self.pointwise(f"{name}/relu", batch * outputs, (at,))
        both = self.op("concat_all", 0.0, 2 * rows, rows, (product, at))
        inputs, outputs = self.variables["rating/kernel"].shape
        self.product("rating", both, batch, inputs, outputs, "rating/kernel", "rating/bias")
        return self.graph(ADAM)
