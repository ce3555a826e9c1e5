"""Load simulators that were trained before the latest raw features existed.

A raw feature that is 0 for all strategies of its time leaves their predictions as they are if its
weights are 0. So a stored simulator predicts the same as when it was saved, and ignores what the
later features say about newer strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

LATER_FEATURES = frozenset({"primitive_direct_exchange", "largest_share", "log_pieces"})
"""Raw features since version 0.1; 0 for every strategy without a direct exchange."""


def are_widened_by(stored: Sequence[str], present: Sequence[str]) -> bool:
    """Whether the stored features are the present ones, in their order, without later ones."""
    missing = set(present) - set(stored)
    return missing <= LATER_FEATURES and [n for n in present if n not in missing] == list(stored)


def widened(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    stored: Sequence[str],
    present: Sequence[str],
    fill: float = 0.0,
) -> dict[str, Tensor]:
    """Insert `fill` for the later features into each tensor with a shorter axis than `shapes` asks.

    Tensors of other shapes stay as they are, for the network to refuse.
    """
    places = torch.tensor([index for index, name in enumerate(present) if name in set(stored)])
    return {
        name: _widened(tensor, shapes.get(name), len(stored), len(present), places, fill)
        for name, tensor in tensors.items()
    }


def _widened(
    tensor: Tensor, shape: torch.Size | None, stored: int, present: int, places: Tensor, fill: float
) -> Tensor:
    if shape is None or tensor.shape == shape or tensor.dim() != len(shape):
        return tensor
    pairs = list(zip(tensor.shape, shape, strict=True))
    axes = [axis for axis, pair in enumerate(pairs) if pair == (stored, present)]
    if len(axes) != 1 or any(pair[0] != pair[1] for at, pair in enumerate(pairs) if at != axes[0]):
        return tensor
    return torch.full(shape, fill, dtype=tensor.dtype).index_copy_(axes[0], places, tensor)
