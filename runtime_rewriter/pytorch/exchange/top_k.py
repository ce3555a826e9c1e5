"""top-k: the elements of largest magnitude, as values and indices.

| symbol | meaning | shape |
|---|---|---|
| n | elements of a message | |
| k | elements that travel, ceil(ratio n) | |
| R | rows: the picked elements of R ranks | |
| values | in the gradient's dtype | (R, k) |
| indices | int32, positions in the message; of equal magnitudes the first ones | (R, k) |

A row travels as one run of bytes: its values, then its indices. The other elements stay in the
residual and are sent with a later gradient (Stich et al., Sparsified SGD with Memory, NeurIPS 2018,
Alg. 1). Infinities and NaNs are larger than all numbers.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.arrays import IntArray
from runtime_rewriter.pytorch.exchange.residuals import drop_non_finite_

_SAMPLE = 2**16
"""About how many elements give a first threshold. An exact comparison costs ten times as much per
element as a comparison with the threshold."""
_STRIDE = 16
"""The smallest distance between sampled elements."""
_CACHED_ELEMENTS = 2**18
"""Elements that a CPU processes at a time, so that several passes stay in the cache."""
_BITS = {torch.float32: (torch.int32, 0x7FFFFFFF), torch.float64: (torch.int64, 0x7FFFFFFFFFFFFFFF)}
"""Without their sign the bits of IEEE 754 numbers are ordered as their magnitudes, and NaN comes
last."""


class PickedRows:
    """The bytes of R rows, uint8 of shape (R, row bytes), and views of their values and indices."""

    def __init__(self, rows: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        # Rounded up, so that the values of every row are aligned.
        width = -(-k * (dtype.itemsize + 4) // dtype.itemsize) * dtype.itemsize
        self.bytes = torch.zeros(rows, width, dtype=torch.uint8, device=device)
        self.values = self.bytes[:, : k * dtype.itemsize].view(dtype)
        index_bytes = self.bytes[:, k * dtype.itemsize : k * (dtype.itemsize + 4)]
        self.indices = index_bytes.view(torch.int32)

    def encode_(self, values: Tensor) -> None:
        """Move the k largest of the flat `values`, (n,), into the only row.

        Zeros replace them, and any other value that is not finite.
        """
        chosen = largest(values, self.values.shape[1])
        self.values[0].copy_(values[chosen])
        self.indices[0].copy_(chosen)
        values.index_fill_(0, chosen, 0.0)
        drop_non_finite_(values, self.values)

    def sum_into(self, out: Tensor) -> None:
        """Write the sum of all rows, in row order, into the flat `out`, (n,)."""
        out.zero_()
        for values, indices in zip(self.values, self.indices, strict=True):
            out.index_add_(0, indices, values)


def largest(values: Tensor, k: int) -> Tensor:
    """Positions of the k largest magnitudes in the flat `values`, int64; ascending on a CPU."""
    integer, without_sign = _BITS[values.dtype]
    bits = values.view(integer)
    if values.device.type != "cpu":
        return torch.topk(bits & without_sign, k, sorted=False).indices
    return torch.from_numpy(_largest(bits.numpy(), k, without_sign))


def _largest(bits: NDArray[np.signedinteger], k: int, without_sign: int) -> IntArray:
    """Bound the threshold from below by a sample, and compare only the elements above it exactly.

    For 25 M float32 elements and k = 1 % on one core, torch.topk needs 1.26 s, this a thirtieth.
    """
    bound = max(1, _lower_bound(bits, k, without_sign))
    positions, magnitudes = _above(bits, bound, without_sign)
    if len(positions) < k and bound > 1:  # the bound was too high
        positions, magnitudes = _above(bits, 1, without_sign)
    if len(positions) < k:  # a gradient of zeros, or nearly
        return np.sort(np.concatenate([positions, _zeros(bits, k - len(positions), without_sign)]))
    if len(positions) == k:
        return positions
    threshold = np.partition(magnitudes, len(magnitudes) - k)[len(magnitudes) - k]
    chosen = magnitudes > threshold
    ties = np.flatnonzero(magnitudes == threshold)
    chosen[ties[: k - int(np.count_nonzero(chosen))]] = True
    exact: IntArray = positions[chosen]
    return exact


def _lower_bound(bits: NDArray[np.signedinteger], k: int, without_sign: int) -> int:
    """Probably at most the k-th largest magnitude: three standard deviations of the binomial count
    and four elements below its place in the sample."""
    sample = bits[:: max(len(bits) // _SAMPLE, _STRIDE)] & without_sign
    expected = k / len(bits) * len(sample)
    rank = math.ceil(expected + 3 * math.sqrt(expected)) + 4
    if rank >= len(sample):
        return 0
    place = len(sample) - rank
    return int(np.partition(sample, place)[place])


def _above(
    bits: NDArray[np.signedinteger], bound: int, without_sign: int
) -> tuple[IntArray, NDArray[np.signedinteger]]:
    """Positions, ascending, and magnitudes of all elements not below the bound."""
    positions: list[IntArray] = []
    magnitudes: list[NDArray[np.signedinteger]] = []
    for start in range(0, len(bits), _CACHED_ELEMENTS):
        part = bits[start : start + _CACHED_ELEMENTS] & without_sign
        above = np.flatnonzero(part >= bound)
        positions.append(above + start)
        magnitudes.append(part[above])
    return np.concatenate(positions), np.concatenate(magnitudes)


def _zeros(bits: NDArray[np.signedinteger], count: int, without_sign: int) -> IntArray:
    """The first `count` positions of zeros; there must be as many."""
    positions: list[IntArray] = []
    for start in range(0, len(bits), _CACHED_ELEMENTS):
        part = bits[start : start + _CACHED_ELEMENTS] & without_sign
        positions.append(np.flatnonzero(part == 0)[:count] + start)
        count -= len(positions[-1])
        if count == 0:
            break
    return np.concatenate(positions)
