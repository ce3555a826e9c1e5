"""Flushes before a script reads or replaces the state of an optimizer whose updates are due.

The optimizer is the same object with another class while updates are due. `param_groups` needs no
guard: a due update keeps the hyperparameters of its `step()`, and reads of the parameters are
watched.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

_FLUSH = "_autotune_flush"
_GUARDED_AS: dict[type, type] = {}
_PLAIN: dict[type, type] = {}


class _Guard:
    """Comes before the optimizer's own class; a property precedes an attribute of the instance."""

    @property
    def state(self) -> Any:
        return _flushed(self)["state"]

    @state.setter
    def state(self, state: Any) -> None:
        _flushed(self)["state"] = state

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return _flushed(self)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Its own class: a method that calls `super(self.__class__, self)`, as those of Horovod's
        optimizers do, would otherwise call itself."""
        return _PLAIN[type(self)]

    def __setstate__(self, state: Any) -> None:  # load_state_dict
        _flushed(self)
        self.__setstate__(state)

    def __reduce_ex__(self, protocol: Any) -> Any:  # copies and pickles
        _flushed(self)
        return self.__reduce_ex__(protocol)


attributes_of: Callable[[Optimizer], dict[str, Any]] = vars(Optimizer)["__dict__"].__get__
"""The instance's own attributes, read without a flush."""
_set_class: Callable[[Optimizer, type], None] = vars(object)["__class__"].__set__


def _flushed(optimizer: Any) -> dict[str, Any]:
    attributes = attributes_of(optimizer)
    flush: Callable[[], None] | None = attributes.get(_FLUSH)
    if flush is not None:  # another thread's read may have come first
        flush()
        unguard(optimizer)
    return attributes


def guard(optimizer: Optimizer, flush: Callable[[], None]) -> None:
    """Call `flush` once, before the next read or write of the state. It is not guarded then."""
    kind: Any = type(optimizer)
    if kind in _PLAIN:
        return
    if kind not in _GUARDED_AS:
        names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        guarded = type(kind.__name__, (_Guard, kind), names)
        _GUARDED_AS[kind], _PLAIN[guarded] = guarded, kind
    attributes_of(optimizer)[_FLUSH] = flush
    optimizer.__class__ = _GUARDED_AS[kind]


def unguard(optimizer: Optimizer) -> None:
    """Give the optimizer its own class back, if it is guarded."""
    kind = _PLAIN.get(type(optimizer))
    if kind is not None:
        _set_class(optimizer, kind)
        attributes_of(optimizer).pop(_FLUSH, None)


def plain_class(optimizer: Optimizer) -> type[Optimizer]:
    """The optimizer's own class, guarded or not."""
    kind = type(optimizer)
    return _PLAIN.get(kind, kind)
