"""Hooks on the script's modules that copies of these modules leave behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """A forward hook or forward pre-hook; it does nothing on a copied or unpickled module.

    So a script may copy or save its module as a whole at any time. `copy.deepcopy` would otherwise
    copy everything behind a bound method.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: object) -> None:
        self._call(*arguments)

    @property
    def owner(self) -> object:
        return getattr(self._call, "__self__", None)

    def __deepcopy__(self, memo: object) -> ModuleHook:
        return ModuleHook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_nothing,)


def _nothing(*arguments: object) -> None:
    """The hook of a copy."""
