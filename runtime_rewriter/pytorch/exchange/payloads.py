"""The bytes of a compressed message: int8, top-k, or the encoding of a plugin's quantiser."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from autotune.strategy_space.compressors import INT8_BLOCK, CompressorDescription
from autotune.strategy_space.plan import Message
from autotune.strategy_space.strategy import ROOTED, Compressor, Synchronizer
from runtime_rewriter.compression import RowLayout, picked
from runtime_rewriter.pytorch.exchange.quantise import QuantisedRows
from runtime_rewriter.pytorch.exchange.residuals import drop_non_finite_
from runtime_rewriter.pytorch.exchange.top_k import PickedRows

_ALIGNMENT = 8


class Payload(Protocol):
    """GradientRows of bytes, one per rank, uint8 of shape (R, row bytes)."""

    bytes: Tensor

    def encode_(self, values: Tensor) -> None:
        """Encode `values`, and leave in them what the bytes lose."""

    def sum_into(self, out: Tensor) -> None:
        """Write the sum of the decoded rows, in row order."""


class ShardedPayload(Payload, Protocol):
    """GradientRows that encode one shard of the message each."""

    def decode(self, out: Tensor) -> None:
        """Write the decoded rows, one behind the other."""


class EncodedRows:
    """GradientRows of a plugin's quantiser, each encoded by itself."""

    def __init__(
        self,
        description: CompressorDescription,
        layout: RowLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert description.payload_bytes and description.encode and description.decode
        self._encode, self._decode = description.encode, description.decode
        self._rows = layout.rows
        used = description.payload_bytes(layout.elements // layout.rows, dtype.itemsize)
        width = -(-used // _ALIGNMENT) * _ALIGNMENT
        self.bytes = torch.zeros(layout.rows, width, dtype=torch.uint8, device=device)
        self._payloads = self.bytes[:, :used]

    def encode_(self, values: Tensor) -> None:
        rows = values.view(self._rows, -1)
        decoded = torch.empty_like(rows[0])
        for row, payload in zip(rows, self._payloads, strict=True):
            self._encode(row, payload)
            self._decode(payload, decoded)
            row.sub_(decoded)
        drop_non_finite_(values, values)

    def decode(self, out: Tensor) -> None:
        for row, payload in zip(out.view(self._rows, -1), self._payloads, strict=True):
            self._decode(payload, row)

    def sum_into(self, out: Tensor) -> None:
        self._decode(self._payloads[0], out)
        decoded = torch.empty_like(out)
        for payload in self._payloads[1:]:
            self._decode(payload, decoded)
            out += decoded


def padded_elements(message: Message, ranks: int) -> int:
    """The length of a message's values for a sum over `ranks`: a multiple of these, whole rows.

    For a direct exchange: whole blocks, so that no owner's part needs more elements than it has.
    """
    if message.synchronizer is Synchronizer.DIRECT_EXCHANGE:
        block = owned_block(message)
        whole = message.elements > block and message.compressor.is_quantiser
        return -(-message.elements // block) * block if whole else message.elements
    multiple = -(-message.elements // ranks) * ranks
    if not message.compressor.is_quantiser:
        return multiple
    rows = 1 if message.synchronizer in ROOTED else ranks
    return max(multiple, row_layout(message, rows).elements)


def row_layout(message: Message, rows: int) -> RowLayout:
    """How a quantiser cuts the message into rows."""
    if message.compressor is Compressor.INT8:
        return RowLayout.of(message.elements, rows)
    return RowLayout(rows, 1, max(1, -(-message.elements // rows)))


def sharded_payload(message: Message, layout: RowLayout, values: Tensor) -> ShardedPayload:
    """GradientRows of a quantiser."""
    if message.compressor is Compressor.INT8:
        return QuantisedRows(layout, values.dtype, values.device)
    return EncodedRows(message.compressor.description, layout, values.dtype, values.device)


def whole_payload(message: Message, rows: int, values: Tensor) -> Payload:
    """GradientRows that encode the whole message each."""
    if message.compressor.is_quantiser:
        return sharded_payload(message, row_layout(message, 1).with_rows(rows), values)
    return _picked_payload(message, rows, values, message.elements)


def owned_block(message: Message) -> int:
    """The elements of a message that one rank must own together: those with one scale."""
    return INT8_BLOCK if message.compressor is Compressor.INT8 else 1


def owned_payload(message: Message, rows: int, part: Tensor) -> Payload:
    """GradientRows that encode one owner's part of the message each."""
    elements = part.numel()
    if message.compressor is Compressor.INT8:
        return QuantisedRows(RowLayout.of(elements, 1).with_rows(rows), part.dtype, part.device)
    if message.compressor.is_quantiser:
        return sharded_payload(message, RowLayout(rows, 1, elements), part)
    return _picked_payload(message, rows, part, elements)


def _picked_payload(message: Message, rows: int, values: Tensor, elements: int) -> PickedRows:
    assert message.ratio is not None
    return PickedRows(rows, picked(elements, message.ratio), values.dtype, values.device)
