"""The shapes of an operator's inputs, where they were recorded (`record_shapes=True`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_INPUTS, MAX_DIMS, MAX_SIZE, MAX_CHARS = 64, 16, 2**48, 80
ELEMENT_TYPES = ("double", "float", "c10::Half", "c10::BFloat16")
"""Types of the elements of parameters; they tell a tensor without dimensions from a number."""
ELEMENT_BYTES = {
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "short": 2,
    "short int": 2,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "int": 4,
    "float": 4,
    "long": 8,
    "long int": 8,
    "double": 8,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
"""Bytes of an element by the profiler's name of its type."""
TORCH_NAMES = {
    "double": "float64",
    "float": "float32",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}
"""The names that torch gives to the types of parameters, by the profiler's names."""
_Dims = tuple[int, ...]


@dataclass(frozen=True)
class OpInputs:
    """The inputs of an operator in the order of its arguments.

    - `dims`: the sizes of a tensor; () for numbers and lists of tensors. `types`: their types.
    - `values`: the values of numbers, as written by the profiler; "" for tensors.
    """

    dims: tuple[_Dims, ...]
    types: tuple[str, ...]
    values: tuple[str, ...] = ()

    def size_bytes(self, number: int = 0) -> int | None:
        """Bytes of a tensor; None for an input that there is not, or of another type."""
        if number >= len(self.dims) or self.types[number] not in ELEMENT_BYTES:
            return None
        return math.prod(self.dims[number]) * ELEMENT_BYTES[self.types[number]]


def op_inputs(args: Mapping[str, Any]) -> OpInputs | None:
    """The inputs that an event's arguments state; None where they state none that is plausible."""
    listed = args.get("Input Dims", args.get("Input dims"))
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_INPUTS:
        return None
    dims = tuple(_dims(one) for one in listed)
    types = _words(args.get("Input type"), len(listed))
    is_scalar = listed == [[]] and types[0] in ELEMENT_TYPES
    if not any(dims) and not is_scalar:
        return None
    values = _words(args.get("Concrete Inputs"), len(listed))
    return OpInputs(dims, types, values)


def _dims(value: Any) -> _Dims:
    """Sizes of a tensor; () for anything else."""
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        return ()
    if all(type(size) is int and 0 <= size <= MAX_SIZE for size in value):
        return tuple(value)
    return ()


def _words(value: Any, count: int) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) != count:
        return ("",) * count
    return tuple(str(word)[:MAX_CHARS] for word in value)
