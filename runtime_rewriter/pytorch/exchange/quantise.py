"""int8: blocks of whole numbers with one scale each.

| symbol | meaning | shape |
|---|---|---|
| R | rows: parts of a message that travel to different ranks | |
| B | blocks of one row | |
| b | elements of one block, at most `INT8_BLOCK` | |
| v | values to send, in the gradient's dtype | (R, B, b) |
| s | scales, max|v| / 127 of each block, in the gradient's dtype | (R, B) |
| q | levels, v / s rounded to the nearest whole number | (R, B, b) |

A row travels as one run of bytes: its scales, then its levels. It decodes to q s, and v - q s is
the residual, sent with the next gradient (error feedback: Seide et al., Interspeech 2014;
Karimireddy et al., ICML 2019, Alg. 2). A block with an infinity or a NaN decodes to NaN, so all
ranks see the overflow and skip the step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runtime_rewriter.compression import LEVELS, RowLayout
from runtime_rewriter.pytorch.exchange.residuals import drop_non_finite_

_CACHED_ELEMENTS = 2**18
"""Elements that a CPU processes at a time. Several passes over 1 MiB stay in the cache: 20 ms
instead of 100 ms for 25 M float32 elements on one core."""


class QuantisedRows:
    """The bytes of R rows, uint8 of shape (R, row bytes), and views of their scales and levels."""

    def __init__(self, layout: RowLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        scales, levels = layout.blocks * dtype.itemsize, layout.blocks * layout.block
        # Rounded up, so that the scales of every row are aligned.
        width = scales + -(-levels // dtype.itemsize) * dtype.itemsize
        self.bytes = torch.zeros(layout.rows, width, dtype=torch.uint8, device=device)
        self.scales = self.bytes[:, :scales].view(dtype)
        cut = (layout.rows, layout.blocks, layout.block)
        self.levels = self.bytes[:, scales : scales + levels].view(torch.int8).view(cut)

    def encode_(self, values: Tensor) -> None:
        """Quantise the flat `values`, (R B b,), and leave the residual in them; 0 if not finite."""
        cut = self._cut(values)
        scratch = _scratch(cut)
        for row, blocks in _parts(cut):
            source = cut[row, blocks]
            work = scratch[: len(source)]
            scale = torch.abs(source, out=work).amax(1).div_(LEVELS)
            # An infinite scale becomes NaN: 0 times infinity is NaN, but 5 times infinity is not.
            scale += scale - scale
            # Values below 127 times the smallest normal number stay in the residual, so that
            # 1 / scale is finite.
            scale.masked_fill_(scale < torch.finfo(scale.dtype).tiny, 0.0)
            self.scales[row, blocks].copy_(scale)
            inverse = scale.reciprocal().masked_fill_(scale == 0, 0.0)
            torch.mul(source, inverse.unsqueeze(1), out=work)
            self.levels[row, blocks].copy_(work.round_())
            source.sub_(work.mul_(scale.unsqueeze(1)))
        drop_non_finite_(values, self.scales)

    def decode(self, out: Tensor) -> None:
        """Write the decoded rows into the flat `out`, (R B b,)."""
        cut = self._cut(out)
        for row, blocks in _parts(cut):
            self._decode(row, blocks, cut[row, blocks])

    def sum_into(self, out: Tensor) -> None:
        """Write the sum of the rows, in row order, into the flat `out`, (B b,)."""
        cut = out.view(1, self.layout.blocks, self.layout.block)
        scratch = _scratch(cut)
        for _, blocks in _parts(cut):
            total = cut[0, blocks]
            work = scratch[: len(total)]
            self._decode(0, blocks, total)
            for row in range(1, self.layout.rows):
                total += self._decode(row, blocks, work)

    def _decode(self, row: int, blocks: slice, out: Tensor) -> Tensor:
        return torch.mul(self.levels[row, blocks], self.scales[row, blocks].unsqueeze(1), out=out)

    def _cut(self, values: Tensor) -> Tensor:
        return values.view(self.layout.rows, self.layout.blocks, self.layout.block)


def _blocks_at_a_time(values: Tensor) -> int:
    _, blocks, block = values.shape
    return blocks if values.is_cuda else max(1, _CACHED_ELEMENTS // block)


def _scratch(values: Tensor) -> Tensor:
    return values.new_empty(min(values.shape[1], _blocks_at_a_time(values)), values.shape[2])


def _parts(values: Tensor) -> Iterator[tuple[int, slice]]:
    """Row and blocks of each part of `values`, (R, B, b), that is processed at once."""
    step = _blocks_at_a_time(values)
    for row in range(values.shape[0]):
        for start in range(0, values.shape[1], step):
            yield row, slice(start, start + step)
