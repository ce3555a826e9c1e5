"""Changes modules of Horovod when the script imports them, and only then."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from autotune.garbage import collection_paused

Change = Callable[[ModuleType, ExitStack], None]
"""Replaces attributes of a module that was imported; the stack restores them."""


@contextmanager
def changed_on_import(changes: Mapping[str, Change]) -> Iterator[None]:
    """Make each change when its module is imported inside, or at once if it was imported before.

    All changes are undone at the end.
    """
    with ExitStack() as undo:
        for name in changes.keys() & sys.modules.keys():
            changes[name](sys.modules[name], undo)
        finder = _Finder({name: changes[name] for name in changes.keys() - sys.modules}, undo)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


def replace_attribute(owner: Any, name: str, value: object, undo: ExitStack) -> None:
    """Set an attribute until `undo` is closed."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def replace_function(package: str, owner: Any, name: str, value: object, undo: ExitStack) -> None:
    """Replace `owner`'s function in all loaded modules of `package`, which import it by name."""
    original = getattr(owner, name)
    for module_name, module in list(sys.modules.items()):
        if f"{module_name}.".startswith(f"{package}.") and getattr(module, name, None) is original:
            replace_attribute(module, name, value, undo)


class _Finder(MetaPathFinder):
    """Finds a module as the other finders do, with a loader that then makes the change."""

    def __init__(self, changes: Mapping[str, Change], undo: ExitStack) -> None:
        self._changes, self._undo = changes, undo
        self._finding = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._changes or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._changes[fullname], self._undo)
        return spec


class _Loader(Loader):
    """Runs a module by its own loader, and then makes the change.

    Without collections, which would take a quarter of the import of TensorFlow.
    """

    def __init__(self, loader: Any, change: Change, undo: ExitStack) -> None:
        self._loader, self._change, self._undo = loader, change, undo

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        with collection_paused():
            self._loader.exec_module(module)
        self._change(module, self._undo)

    def __getattr__(self, name: str) -> Any:  # resources of the package
        return getattr(self._loader, name)
