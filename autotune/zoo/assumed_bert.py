"""Op graphs of the zoo's BERTs on a device that is assumed (`assumed_device`): for models that nobody profiled.

The sequence of ops is that of the published model: a projection, its bias, a softmax are an op each, so that there is something to fuse.

| symbol | meaning |
|---|---|
| n | tokens of a replica's step: batch times sequence length |
| h | hidden size |
"""

from __future__ import annotations

from autotune.profiling.op_graph import OpGraph
from autotune.zoo.architectures import MODELS
from autotune.zoo.assumed_device import ADAM, AssumedDevice, Net

_BERTS = {
    "bert-3l": (3, 256, 4),
    "bert-6l": (6, 512, 8),
    "bert-base": (12, 768, 12),
    "bert-large": (24, 1024, 16),
}
"""Layers, hidden size, heads; as in `architectures.MODELS`."""


SEQUENCE = 128
"""Tokens of an example: nine tenths of BERT's pre-training use so many (Devlin et al., appendix A.2)."""


def bert_ops(name: str, batch: int, device: AssumedDevice) -> OpGraph:
    """The op graph of one of the zoo's BERTs in pre-training, for so many examples."""
    return _Bert(device, name, batch * SEQUENCE, SEQUENCE).written()


class _Bert(Net):
    """`tokens` in sequences of `sequence`."""

    def __init__(self, device: AssumedDevice, name: str, tokens: int, sequence: int) -> None:
        super().__init__(device, MODELS[name].variables())
        self.layers, self.hidden, self.heads = _BERTS[name]
        self.name, self.tokens, self.sequence = name, tokens, sequence

    def written(self) -> OpGraph:
        at = self._embeddings()
        for layer in range(self.layers):
            at = self._layer(f"transformer/layer_{layer}", at)
        self._heads_of_training(at)
        return self.graph(self.name, ADAM)

    def _dense(self, name: str, read: int, inputs: int, outputs: int) -> int:
        """The product with the kernel, then the bias."""
        product = self.product(
            f"{name}/matmul", read, self.tokens, inputs, outputs, (f"{name}/kernel",)
        )
        return self.pointwise(
            f"{name}/add_bias", float(self.tokens * outputs), (product,), (f"{name}/bias",)
        )

    def _norm(self, name: str, reads: tuple[int, ...]) -> int:
        elements = float(self.tokens * self.hidden)
        total = self.pointwise(f"{name}/residual", elements, reads) if len(reads) > 1 else reads[0]
        return self.pointwise(
            f"{name}/normalize", elements, (total,), (f"{name}/gamma", f"{name}/beta")
        )

    def _embeddings(self) -> int:
        n, h = float(self.tokens), float(self.hidden)
        found = [
            self.op(f"{name}/gather", 0.0, 2 * n * h, n * h, (), (f"{name}/embeddings",))
            for name in ("word_embeddings", "position_embedding", "type_embeddings")
        ]
        total = self.pointwise("embeddings/add", n * h, tuple(found))
        return self._norm("embeddings/layer_norm", (total,))

    def _layer(self, name: str, read: int) -> int:
        attended = self._attention(name, read)
        normed = self._norm(f"{name}/self_attention_layer_norm", (read, attended))
        inner = self._dense(f"{name}/intermediate", normed, self.hidden, 4 * self.hidden)
        active = self.pointwise(f"{name}/gelu", float(self.tokens * 4 * self.hidden), (inner,))
        outer = self._dense(f"{name}/output", active, 4 * self.hidden, self.hidden)
        return self._norm(f"{name}/output_layer_norm", (normed, outer))

    def _attention(self, name: str, read: int) -> int:
        n, h = float(self.tokens), self.hidden
        scores = n * self.heads * self.sequence
        query, key, value = (
            self._dense(f"{name}/self_attention/{part}", read, h, h)
            for part in ("query", "key", "value")
        )
        product = self.op(
            f"{name}/self_attention/scores",
            2 * n * self.sequence * h,
            2 * n * h + scores,
            scores,
            (query, key),
        )
        weights = self.op(
            f"{name}/self_attention/softmax", 5 * scores, 2 * scores, scores, (product,)
        )
        mixed = self.op(
            f"{name}/self_attention/mix",
            2 * n * self.sequence * h,
            2 * n * h + scores,
            n * h,
            (weights, value),
        )
        return self._dense(f"{name}/self_attention_output", mixed, h, h)

    def _heads_of_training(self, read: int) -> None:
        """Both heads; the large product with the word table belongs to the embedding, whose gradient is final at the end of the step."""
        n, h = float(self.tokens), self.hidden
        vocabulary = self.variables["word_embeddings/embeddings"].shape[0]
        transformed = self._dense("cls/predictions/transform/dense", read, h, h)
        active = self.pointwise("cls/predictions/transform/gelu", n * h, (transformed,))
        normed = self._norm("cls/predictions/transform/layer_norm", (active,))
        masked = 0.15 * n  # BERT, sec. 3.1: the share of tokens that are predicted
        moved = masked * (h + vocabulary) + h * vocabulary
        logits = self.op(
            "cls/predictions/matmul",
            2 * masked * h * vocabulary,
            moved,
            masked * vocabulary,
            (normed,),
        )
        self.op(
            "cls/predictions/add_bias",
            masked * vocabulary,
            2 * masked * vocabulary,
            0.0,
            (logits,),
            ("cls/predictions/output_bias/bias",),
        )
        pooled = self._dense("pooler_transform", read, h, h)
        self._dense("classification/logits", pooled, h, 2)
