"""A compressor: 15 levels, two per byte, and one float64 scale per payload."""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.strategy_space.compressors import CodecCosts, CompressorDescription

LEVELS = 7
SCALE_BYTES = 8


def payload_bytes(elements: int, element_bytes: int) -> int:
    return SCALE_BYTES + -(-elements // 2)


def encode(values: Tensor, payload: Tensor) -> None:
    scale = values.abs().amax().double() / LEVELS
    scale += scale - scale  # an infinity becomes NaN, which decodes to NaN everywhere
    payload[:SCALE_BYTES].view(torch.float64).copy_(scale)
    divisor = torch.where(scale > 0, scale, 1.0)
    levels = (values / divisor).nan_to_num_(0.0).round_().clamp_(-LEVELS, LEVELS)
    codes = torch.nn.functional.pad(levels, (0, values.numel() % 2)).add_(LEVELS).to(torch.uint8)
    payload[SCALE_BYTES:].copy_(codes[::2] + 16 * codes[1::2])


def decode(payload: Tensor, values: Tensor) -> None:
    scale = payload[:SCALE_BYTES].view(torch.float64)
    codes = torch.stack([payload[SCALE_BYTES:] % 16, payload[SCALE_BYTES:] // 16], dim=1).flatten()
    values.copy_((codes[: values.numel()].double() - LEVELS) * scale)


FOUR_BIT = CompressorDescription(
    name="four_bit",
    payload_bytes=payload_bytes,
    error_feedback=True,
    encode=encode,
    decode=decode,
    costs=CodecCosts(
        encode_s=1e-3, encode_s_per_element=3e-9, decode_s=5e-4, decode_s_per_element=2e-9
    ),
)
