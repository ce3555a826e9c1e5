"""Hashes that are computed once: a search looks up every strategy and message several times.

A class takes both functions in its body, since a frozen dataclass would replace an inherited hash.
Its cached property `_hash` computes the hash.
"""

from __future__ import annotations

from typing import Any, Protocol


class _Hashed(Protocol):
    @property
    def _hash(self) -> int: ...


def hash_once(hashed: _Hashed) -> int:
    """Return the hash; `__hash__` of the class."""
    return hashed._hash


def state_without_hash(hashed: object) -> dict[str, Any]:
    """Return what is pickled; `__getstate__` of the class. Other processes have other hashes."""
    return {name: value for name, value in vars(hashed).items() if name != "_hash"}
