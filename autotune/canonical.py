"""Canonical JSON and its hash: content defines identity."""

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
"""Metadata of a field added to its class after values were stored.

The canonical form contains it only if it differs from its default, so stored values keep their id.
"""

_STORED = "stored"


def stored_as(name: str, spellings: Mapping[Any, str]) -> dict[str, Any]:
    """Metadata of a field that is stored as `name`, its values as their `spellings`."""
    return {_STORED: (name, spellings)}


def stored_fields(kind: type[Any]) -> dict[str, tuple[str, Mapping[Any, str]]]:
    """Field -> (stored name, stored spellings) of a dataclass with `stored_as` fields."""
    return {
        field.name: field.metadata[_STORED]
        for field in dataclasses.fields(kind)
        if _STORED in field.metadata
    }


_PLAIN = frozenset({str, int, float, bool, type(None)})
_FIELDS: dict[type[Any], tuple[tuple[str, str, Mapping[Any, str] | None, Any], ...]] = {}
"""Fields of each class: name, stored name, stored spellings, and the value that is left out."""
_ALWAYS = object()


def to_data(value: Any) -> Any:
    """Convert a (nested) dataclass value to JSON types; tuples become lists, enums their values."""
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
                (
                    field.name,
                    *field.metadata.get(_STORED, (field.name, None)),
                    field.default if "later" in field.metadata else _ALWAYS,
                )
                for field in dataclasses.fields(kind)
            )
        data = {}
        for name, stored_name, spellings, left_out in _FIELDS[kind]:
            item = getattr(value, name)
            if left_out is _ALWAYS or item != left_out:
                data[stored_name] = to_data(item) if spellings is None else spellings[item]
        return data
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{kind.__name__} has no canonical form")


def canonical_json(value: Any) -> str:
    """The unique text of a value: sorted keys, no spaces, no NaN or infinity."""
    return json.dumps(
        to_data(value), sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    )


def content_id(prefix: str, value: Any) -> str:
    """`prefix-` and 64 bits of the SHA-256 of the canonical JSON."""
    return f"{prefix}-{hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]}"
