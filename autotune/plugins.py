"""Registries of named extensions, which installed distributions extend through entry points."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from autotune.errors import InvalidInput

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class UnknownName(InvalidInput, KeyError):
    """A registry has no entry of this name; the message lists the names that it has."""

    __str__ = Exception.__str__  # that of KeyError shows the message in quotes


class Registry(Mapping[str, T]):
    """Entries by name, in the order of registration, followed by those of installed plugins.

    A distribution adds an entry with an entry point in `group`: the entry point's name is the
    entry's name, its object is the entry. The first look-up lists the entry points. Each one is
    imported when its entry is first used, so a broken plugin fails only where it is needed. While
    it is imported, its distribution may register its own entries itself, as a decorator does.
    """

    def __init__(self, group: str, kind: str) -> None:
        """`kind`: an entry as error messages call it, such as "builder"."""
        self.group = group
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._plugins: dict[str, EntryPoint] | None = None
        self._importing: EntryPoint | None = None

    def register(self, name: str, entry: T) -> None:
        """Add `entry`. Raises `InvalidInput` if the name is taken."""
        if name in self._entries or self._is_of_another_plugin(name):
            raise InvalidInput(f"{self.kind} {name!r} is already registered; choose another name")
        self._entries[name] = entry

    def _is_of_another_plugin(self, name: str) -> bool:
        """Whether an entry point has the name, and not one of the distribution being imported."""
        point = (self._plugins or {}).get(name)
        importing = self._importing
        return point is not None and (importing is None or _origin(point) != _origin(importing))

    def __getitem__(self, name: str) -> T:
        """The entry. Raises `UnknownName`, or `InvalidInput` if its plugin cannot be imported."""
        plugins = self._discover()
        if name in plugins and name not in self._entries:
            self._entries.setdefault(name, self._imported(plugins[name]))
        if name not in self._entries:
            raise UnknownName(f"there is no {self.kind} {name!r}; known are {', '.join(self)}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        plugins = self._discover()
        yield from (name for name in self._entries if name not in plugins)
        yield from plugins

    def __len__(self) -> int:
        return len(self._entries.keys() | self._discover().keys())

    @contextlib.contextmanager
    def separate(self) -> Iterator[None]:
        """Look for plugins again inside; entries added inside are dropped at the end."""
        entries, plugins = self._entries, self._plugins
        self._entries = {name: entries[name] for name in entries if name not in (plugins or {})}
        self._plugins = None
        try:
            yield
        finally:
            self._entries, self._plugins = entries, plugins

    def _imported(self, point: EntryPoint) -> Any:
        """The object of the entry point. Raises `InvalidInput` if it cannot be imported."""
        outer, self._importing = self._importing, point
        try:
            return point.load()
        except Exception as error:
            raise InvalidInput(
                f"{_text(point)} cannot be imported: {type(error).__name__}: {error}; "
                "repair or uninstall that distribution"
            ) from error
        finally:
            self._importing = outer

    def _discover(self) -> dict[str, EntryPoint]:
        """The entry points of the group, sorted by name. Raises `InvalidInput` for a taken name."""
        if self._plugins is None:
            from importlib.metadata import entry_points

            plugins: dict[str, EntryPoint] = {}
            for point in sorted(entry_points(group=self.group), key=lambda point: point.name):
                if point.name in self._entries or point.name in plugins:
                    raise InvalidInput(
                        f"{self.kind} {point.name!r} of {_text(point)} is already registered; "
                        "uninstall one of them or rename its entry point"
                    )
                plugins[point.name] = point
            self._plugins = plugins
        return self._plugins


def _text(point: EntryPoint) -> str:
    return f"entry point '{point.name} = {point.value}' ({point.group}) of {_origin(point)}"


def _origin(point: EntryPoint) -> str:
    """The distribution of an entry point."""
    return point.dist.name if point.dist else "an unknown distribution"
