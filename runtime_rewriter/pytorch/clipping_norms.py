"""The 2-norms of gradients, with the bits of torch's `clip_grad_norm_`."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 4
"""Of torch's kernel for the norms of many tensors, which adds others in another order."""


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
    """The values where they are if a kernel on a GPU takes them as those of a tensor of its own,
    or a copy."""
    together = _ELEMENTS_AT_ONCE * values.element_size()
    return values.clone() if values.is_cuda and values.data_ptr() % together else values


def _at_once(gradients: Sequence[Tensor], order: float) -> list[Tensor]:
    """As torch does: the norms of all gradients of one dtype together."""
    norms: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        places = [place for place, one in enumerate(gradients) if one.dtype == dtype]
        found = torch._foreach_norm([gradients[place] for place in places], order)
        norms.update(zip(places, found, strict=True))
    return [norms[place] for place in range(len(gradients))]
