"""Calls the backward pass of a recurrent layer on a processor, with inputs of recorded shapes.

`aten::mkldnn_rnn_layer_backward` reads a workspace that only the forward pass can size and fill;
with another one it may end the process. So a forward pass runs first, and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

BACKWARD = "aten::mkldnn_rnn_layer_backward"
_RENAMED = {"cx_": "cx_tmp", **{f"weight{at}": f"weight{at + 1}" for at in range(4)}}
"""Arguments of the forward pass that the backward pass names otherwise."""


def backward_call(inputs: Sequence[Any]) -> Callable[[], Any]:
    """A function that differentiates the layer; `inputs`: in the order of the backward operator.

    Raises `ValueError` for another number of inputs, and what torch raises if they fit no layer.
    """
    names = [one.name for one in torch.ops.aten.mkldnn_rnn_layer_backward.default._schema.arguments]
    if len(inputs) != len(names):
        raise ValueError(f"{BACKWARD} takes {len(names)} inputs, but {len(inputs)} were recorded")
    given = dict(zip(names, inputs, strict=True))
    forward = torch.ops.aten.mkldnn_rnn_layer.default
    arguments = [given[_RENAMED.get(one.name, one.name)] for one in forward._schema.arguments]
    leaves = [one.requires_grad_() for one in arguments if isinstance(one, Tensor)]
    with torch.enable_grad():
        output = forward(*arguments)[0]
    ones = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, leaves, ones, retain_graph=True, allow_unused=True)
