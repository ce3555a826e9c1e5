"""Identity is content: canonical JSON and the hash of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

LATER = MappingProxyType({"later": True})
"""Metadata of a field that its class got after values of it had been stored: the canonical form has it only where it differs from its
default, so what was stored keeps its identity."""

_PLAIN = frozenset({str, int, float, bool, type(None)})
_FIELDS: dict[type[Any], tuple[tuple[str, Any], ...]] = {}
"""Name and the value with which it is left out, of the fields of each class; with `_ALWAYS` it never is."""
_ALWAYS = object()


def to_data(value: Any) -> Any:
    """Plain JSON types of a (nested) dataclass value; tuples become lists, enums their values."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, tuple | list):
        return [item if type(item) in _PLAIN else to_data(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        if kind not in _FIELDS:  # a strategy has thousands of values of four types
            _FIELDS[kind] = tuple(
                (own.name, own.default if "later" in own.metadata else _ALWAYS)
                for own in dataclasses.fields(kind)
            )
        present = ((name, getattr(value, name), left_out) for name, left_out in _FIELDS[kind])
        return {
            name: to_data(held)
            for name, held, left_out in present
            if left_out is _ALWAYS or held != left_out
        }
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{kind.__name__} has no canonical form")


def canonical_json(value: Any) -> str:
    """The one text of a value: sorted keys, no spaces, NaN and infinity refused."""
    return json.dumps(
        to_data(value), sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    )


def content_id(prefix: str, value: Any) -> str:
    """`prefix-` and 64 bits of the SHA-256 of the canonical JSON."""
    return f"{prefix}-{hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]}"
