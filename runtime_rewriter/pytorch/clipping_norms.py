"""The 2-norms of gradients, with the bits of torch's `clip_grad_norm_`."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ELEMENTS_PER_LOAD = 4
"""Elements that a thread of torch's kernel for the norms of many tensors loads at once (`kILP` in
`aten/src/ATen/native/cuda/MultiTensorApply.cuh`). It adds the values of a tensor in another order
if the address of the first one is not a multiple of their size."""


def norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each gradient, 0-dimensional and of its dtype.

    On a GPU torch takes the norms of all gradients at once, and adds in another order than
    `vector_norm`.
    """
    if not gradients or not gradients[0].is_cuda:
        return [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return _at_once(gradients, 2)


def all_finite(gradients: Sequence[Tensor], norms: Tensor) -> Tensor:
    """Return whether each gradient, with this norm, has finite values only: (gradients,), bool.

    A norm may also overflow. A GPU is not waited for to know whether one did.
    """
    if norms.is_cuda:
        return torch.stack([norm.isfinite() for norm in _at_once(gradients, math.inf)])
    finite = norms.isfinite()
    if finite.all():
        return finite
    return torch.stack([gradient.isfinite().all() for gradient in gradients])


def aligned(values: Tensor) -> Tensor:
    """Return the values, or a copy on a GPU if their norm would not be that of a whole tensor.

    A part of a message may begin anywhere; a tensor of its own begins where a load does.
    """
    load_bytes = _ELEMENTS_PER_LOAD * values.element_size()
    return values.clone() if values.is_cuda and values.data_ptr() % load_bytes else values


def _at_once(gradients: Sequence[Tensor], order: float) -> list[Tensor]:
    """As torch does: the norms of all gradients of one dtype together."""
    norms: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        places = [place for place, one in enumerate(gradients) if one.dtype == dtype]
        of_dtype = torch._foreach_norm([gradients[place] for place in places], order)
        norms.update(zip(places, of_dtype, strict=True))
    return [norms[place] for place in range(len(gradients))]
