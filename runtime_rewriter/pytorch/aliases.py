"""Other tensors on the same memory, whose reads cannot be observed.

A tensor on the memory of a parameter (`.data`, `detach()`, a view, a value of an earlier
`state_dict()`, another parameter tied to it) sees a late update without calling anything of ours.
Such variables do not cross the step. torch counts the tensors that share a storage, but has no
public call for this number. Where `COUNTS_ALIASES` is False, plans that cross the step are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runtime_rewriter.pytorch.addresses import address_is_known
from runtime_rewriter.pytorch.optimizer_guard import attributes_of

_USE_COUNT: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _references(storage: torch.UntypedStorage) -> tuple[int, int]:
    """The owners of `storage`, which a local variable of the caller names, and the references to
    its Python object."""
    assert _USE_COUNT is not None
    return _USE_COUNT(storage._cdata), sys.getrefcount(storage)


def _calibrated() -> tuple[int, int] | None:
    """What a tensor without aliases has; None if torch does not count as we rely on."""
    if _USE_COUNT is None:
        return None
    try:
        tensor = torch.empty(2)
        storage = tensor.untyped_storage()
        sole = _references(storage)
        alias = tensor.detach()
        counted = _references(storage)[0] == sole[0] + 1
        del alias
        return sole if counted and _references(storage) == sole else None
    except (RuntimeError, TypeError):
        return None


_SOLE = _calibrated()
COUNTS_ALIASES = _SOLE is not None
"""Whether this version of torch tells how many tensors share a storage."""


NO_COUNT = "this version of torch does not tell which tensors share the memory of a parameter"


def has_alias(tensor: Tensor, borrowed: bool = False) -> bool:
    """Whether another tensor, a process or C code may read or write the memory of `tensor`.

    Sparse tensors, whose parts have storages of their own, count as aliased. With `borrowed`, so
    does memory that torch has not allocated, such as an array's (`torch.from_numpy`) or a loaded
    file's: its storage cannot be resized.
    """
    if tensor.layout is not torch.strided:
        return True
    storage = tensor.untyped_storage()
    return (
        _references(storage) != _SOLE
        or (borrowed and not storage.resizable())
        or _is_known_elsewhere(tensor, storage)
    )


def _is_known_elsewhere(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether another process shares the tensor's memory, or the script has asked for its
    address."""
    # Not by way of the tensor, whose own `is_shared` costs more than all else here.
    return (tensor.is_cpu and storage.is_shared()) or address_is_known(storage)


def aliased(tensors: Sequence[Tensor]) -> set[int]:
    """The positions of tensors with an alias or on borrowed memory, other than neighbors among
    `tensors` that share a storage without overlapping, as the weights of a recurrent layer on a GPU
    do."""
    with_alias = {
        position for position, tensor in enumerate(tensors) if has_alias(tensor, borrowed=True)
    }
    sharing: dict[int, list[int]] = {}
    for position in with_alias:
        if tensors[position].layout is torch.strided:
            identity = tensors[position].untyped_storage()._cdata
            sharing.setdefault(identity, []).append(position)
    for positions in sharing.values():
        first = tensors[positions[0]]
        storage = first.untyped_storage()
        owners, references = _references(storage)
        ours = (owners - len(positions) + 1, references) == _SOLE
        if (
            ours
            and storage.resizable()
            and not _is_known_elsewhere(first, storage)
            and not _overlap([tensors[position] for position in positions])
        ):
            with_alias.difference_update(positions)
    return with_alias


def without_alias(tensors: Mapping[int, Tensor]) -> set[int]:
    """The keys of the tensors that are not `aliased`."""
    places = aliased(list(tensors.values()))
    return {key for place, key in enumerate(tensors) if place not in places}


def _overlap(tensors: Sequence[Tensor]) -> bool:
    spans = sorted(
        (
            tensor.storage_offset(),
            1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)),
        )
        for tensor in tensors
        if tensor.numel()
    )
    return any(start + length > after for (start, length), (after, _) in pairwise(spans))


def state_is_held(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether the script may read the state of `parameter` without `optimizer.state`: it holds a
    reference to the state, or to one of its tensors, or a tensor on the memory of one."""
    states: Any = attributes_of(optimizer)["state"]
    if sys.getrefcount(states) > _LOCAL + 1:
        return True
    state = states.get(parameter)
    if state is None:
        return False
    return sys.getrefcount(state) > _LOCAL + 1 or any(_is_held(state, name) for name in state)


def _is_held(state: dict[str, Any], name: str) -> bool:
    value = state[name]
    if not isinstance(value, Tensor):
        return False
    return sys.getrefcount(value) > _LOCAL + 1 or has_alias(value)


def _local_references() -> int:
    value = object()
    return sys.getrefcount(value)


_LOCAL = _local_references()
"""References to an object that only one local variable names."""
