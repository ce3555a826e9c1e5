"""Addresses of memory that the script has asked for, through which it may read at any time.

An address is a number: nothing counts its owners, as torch counts the tensors on a storage. So the
memory counts as aliased from then on. Packages that use an address at once, or only to tell
tensors apart, do not count.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

AT_ONCE = frozenset(
    ("torch", "triton", "safetensors", "transformers", "accelerate", "runtime_rewriter")
)
"""Packages that keep no address. torch's `__cuda_array_interface__` hands one to the script."""

_ASKED_FOR: set[int] = set()
_OF_STORAGE: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr


def note_addresses() -> None:
    """Note all addresses that the script asks for from now on.

    It stays until the process ends: a script may ask at any time.
    """
    if torch.UntypedStorage.data_ptr is not _OF_STORAGE:
        return
    places: tuple[tuple[Any, Callable[[Any], int]], ...] = (
        (Tensor, lambda tensor: _OF_STORAGE(tensor.untyped_storage())),
        (torch.UntypedStorage, _OF_STORAGE),
        (torch.TypedStorage, lambda storage: _OF_STORAGE(storage._untyped_storage)),
    )
    for kind, address_of in places:
        kind.data_ptr = _noting(kind.data_ptr, address_of)


def address_is_known(storage: torch.UntypedStorage) -> bool:
    """Whether the script has asked for the address of this memory, or of memory before it there."""
    return bool(_ASKED_FOR) and _OF_STORAGE(storage) in _ASKED_FOR


def _noting(own: Callable[[Any], int], address_of: Callable[[Any], int]) -> Callable[[Any], int]:
    def data_ptr(self: Any) -> int:
        address = own(self)
        caller = sys._getframe(1)
        package = str(caller.f_globals.get("__name__", "")).partition(".")[0]
        if package not in AT_ONCE or caller.f_code.co_name == "__cuda_array_interface__":
            _ASKED_FOR.add(address_of(self))
        return address

    data_ptr.__doc__ = own.__doc__
    return data_ptr
