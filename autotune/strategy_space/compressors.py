"""Compressors: one description each, which plans, costs, memory and the runtime consult.

Compressors come in three kinds:

- A cast rounds each element to `wire_dtype`; the backend's own sums add what travels.
- A quantiser encodes runs of elements as bytes. Each rank decodes and sums the bytes of the others,
  and keeps what the bytes lose as its residual (error feedback). A plugin adds a quantiser.
- top-k and PowerSGD have a parameter of their own in the strategy (`ratio`, `rank`). PowerSGD is
  special: it exchanges two factors one after the other and has no payload of its own.

A distribution adds a quantiser with an entry point in the group `autotune.compressors`. The entry
point's object is a `CompressorDescription` with the entry point's name. All ranks and the driver
need the distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.errors import InvalidInput, InvalidStrategy
from autotune.plugins import Registry, UnknownName

if TYPE_CHECKING:
    from torch import Tensor

INT8_BLOCK = 1024
"""Elements that share one scale in int8."""

ASSUMED = "assumed"


@dataclass(frozen=True)
class CodecCosts:
    """Seconds of one CPU thread per payload and per element; `source`: where they were measured.

    A payload that is encoded is decoded, too, since ranks keep what it loses. The default source,
    "assumed", marks values that nobody measured.
    """

    encode_s: float
    encode_s_per_element: float
    decode_s: float
    decode_s_per_element: float
    source: str = ASSUMED


@dataclass(frozen=True)
class CompressorDescription:
    """A compressor by its stored `name`.

    `payload_bytes(n, b)`: wire bytes of n elements of b bytes each; None if it depends on a
    parameter in the strategy. `error_feedback`: ranks keep what it loses and send it later.
    `wire_dtype`: the dtype that travels, for casts only.

    Quantisers have the last three fields. `encode(values, payload)` fills a uint8 tensor of
    `payload_bytes` bytes, aligned to 8 bytes, from flat float32 or float64 values, and leaves the
    values unchanged. `decode(payload, values)` is its inverse up to rounding. A value that is not
    finite must decode to a value that is not finite, so that every rank sees an overflow. Both
    run on the device of the tensors, and give the same bits on every rank. The built-in int8 has
    neither: its kernels are part of the runtime.
    """

    name: str
    payload_bytes: Callable[[int, int], int] | None
    error_feedback: bool = False
    wire_dtype: str | None = None
    encode: Callable[[Tensor, Tensor], object] | None = None
    decode: Callable[[Tensor, Tensor], object] | None = None
    costs: CodecCosts | None = None


BUILT_IN = (
    CompressorDescription("none", lambda elements, size: elements * size),
    CompressorDescription(
        "fp16", lambda elements, size: elements * min(2, size), wire_dtype="float16"
    ),
    CompressorDescription(
        "bf16", lambda elements, size: elements * min(2, size), wire_dtype="bfloat16"
    ),
    CompressorDescription(
        "int8",
        lambda elements, size: elements + 4 * -(-elements // INT8_BLOCK),
        error_feedback=True,
    ),
    CompressorDescription("top_k", None, error_feedback=True),
    CompressorDescription("power_sgd", None, error_feedback=True),
)

COMPRESSORS: Registry[CompressorDescription] = Registry("autotune.compressors", "compressor")
for _description in BUILT_IN:
    COMPRESSORS.register(_description.name, _description)


def plugin_description(name: str) -> CompressorDescription:
    """The description that an installed distribution adds.

    Raises `InvalidStrategy` for an unknown name and `InvalidInput` for an invalid description.
    """
    try:
        description = COMPRESSORS[name]
    except UnknownName as error:
        raise InvalidStrategy(
            f"{error}; install the distribution that adds it as an entry point in "
            f"{COMPRESSORS.group!r}, here and on every rank"
        ) from None
    reason = _validation_error(name, description)
    if reason is not None:
        raise InvalidInput(f"the plugin of compressor {name!r} is invalid: {reason}")
    return description


def _validation_error(name: str, description: object) -> str | None:
    if not isinstance(description, CompressorDescription):
        kind = type(description).__name__
        return f"its entry point must be a CompressorDescription, but is a {kind}"
    if description.name != name:
        return f"its name must be that of its entry point, but is {description.name!r}"
    parts = ("payload_bytes", "encode", "decode", "costs")
    missing = [part for part in parts if getattr(description, part) is None]
    if missing:
        return f"a quantiser needs {', '.join(parts)}, but has no {', '.join(missing)}"
    if not description.error_feedback or description.wire_dtype is not None:
        return (
            "a quantiser keeps what it loses: set error_feedback = True and no wire_dtype; "
            "the numerics gate has no bound for gradients that are lost"
        )
    return None
