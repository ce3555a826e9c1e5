"""What the names of operators tell: kinds of layers, and which operators have parameters."""

from __future__ import annotations

import re

_KINDS = {
    "linear": "linear",
    "addmm": "linear",
    "mm": "linear",
    "matmul": "linear",
    "bilinear": "bilinear",
    "batch_norm": "batch_norm",
    "_batch_norm_impl_index": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
    "native_batch_norm": "batch_norm",
    "layer_norm": "layer_norm",
    "native_layer_norm": "layer_norm",
    "group_norm": "group_norm",
    "native_group_norm": "group_norm",
    "instance_norm": "instance_norm",
    "embedding": "embedding",
    "embedding_bag": "embedding_bag",
    "lstm": "lstm",
    "gru": "gru",
    "rnn_tanh": "rnn",
    "rnn_relu": "rnn",
    "lstm_cell": "lstm_cell",
    "gru_cell": "gru_cell",
    "prelu": "prelu",
}
"""Operator -> the kind of its instances."""
_CONV = re.compile(r"(?:cudnn_|miopen_|mkldnn_|_)?conv(?:olution|_transpose[123]d|[123]d)$")
_MAY_HAVE_NONE = frozenset({"mm", "matmul"})
"""Operators that multiply activations as well."""
_PREPARES = re.compile(r"aten::(?:t|transpose|to|_to_copy|view|permute|expand|detach|alias)$")
"""What is done to a parameter before the operator that uses it."""
_BIAS = ("aten::add", "aten::add_")


def kind_of(name: str) -> str:
    """The kind of an instance whose operator has this name."""
    plain = name.removeprefix("aten::").rstrip("_")
    return "conv" if _CONV.match(plain) else _KINDS.get(plain, plain)


def always_has_parameters(name: str) -> bool:
    """Whether every operator of this name has parameters."""
    plain = name.removeprefix("aten::")
    return plain not in _MAY_HAVE_NONE and bool(plain in _KINDS or _CONV.match(plain))


def prepares(name: str) -> bool:
    """Whether an operator may only bring a parameter into form for the one that uses it."""
    return bool(_PREPARES.match(name))


def adds_bias(name: str) -> bool:
    """Whether an operator with parameters behind a matrix product adds its bias."""
    return name in _BIAS


def operator_class(name: str) -> str:
    """A spelling that operators and nodes share: `aten::cudnn_convolution`, `CudnnConvolution`."""
    plain = re.sub(r"Backward\d*$", "", name.removeprefix("aten::")).replace("_", "").lower()
    return "conv" if re.search(r"conv(?:olution)?(?:transpose)?(?:[123]d)?$", plain) else plain
