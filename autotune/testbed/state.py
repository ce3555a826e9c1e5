"""What is recorded about a testbed, in one JSON file each, written before the first namespace is made.

So everything that exists is recorded, and what no file records is nobody's to touch here. A namespace is recorded by its name just before
it is made and by its inode right afterwards: one that was deleted and made again by somebody else is not the recorded one. Of at most one
namespace only the name is known: its maker died in between, so it may be ours or somebody else's.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.canonical import to_data
from autotune.errors import EmulationError, InvalidInput
from autotune.parsing import parse, read_json, refuse_newer
from autotune.testbed.layout import NAME, Layout
from autotune.testbed.namespaces import inode
from autotune.testbed.processes import Process

STATE_DIRECTORY = Path("/run/autotune-testbeds")
SCHEMA = 3
LOCK_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Namespace:
    """`inode`: 0 from just before the namespace is made until it is."""

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    inode: int = 0

    @property
    def ours(self) -> int | None:
        """The inode of the namespace that has this name now, if it surely is the one recorded."""
        return self.inode if self.inode and inode(self.name) == self.inode else None

    @property
    def undecided(self) -> int | None:
        """The inode of the namespace that has this name now, if it may be ours or somebody else's."""
        return None if self.inode else inode(self.name)


@dataclass(frozen=True)
class Recorded:
    """A testbed as recorded. `maker` made it; it ends with the maker if `owned`, and if the maker dies before it is `complete`.

    `namespaces`: those made until now, the last one perhaps only about to be. `scratch`: its directory, which is removed with it;
    None where it could not be made.
    """

    __pydantic_config__ = {"extra": "forbid"}

    layout: Layout
    maker: Process
    owned: bool
    scratch: Path | None
    namespaces: tuple[Namespace, ...] = ()
    complete: bool = False
    relay: Process | None = None
    schema: int = SCHEMA

    @property
    def left_over(self) -> bool:
        """Nobody needs it any more: who it belonged to has died."""
        return (self.owned or not self.complete) and not self.maker.alive

    @property
    def inodes(self) -> frozenset[int]:
        """Of the namespaces that exist and surely are the recorded ones."""
        return frozenset(
            found for namespace in self.namespaces if (found := namespace.ours) is not None
        )

    def making(self, name: str) -> Recorded:
        """The same, with a namespace that is about to be made."""
        return replace(self, namespaces=(*self.namespaces, Namespace(name)))

    def made(self, name: str) -> Recorded:
        """The same, with the inode of a namespace that was just made."""
        now = inode(name) or 0
        return replace(
            self,
            namespaces=tuple(
                replace(item, inode=now) if item.name == name else item for item in self.namespaces
            ),
        )

    def not_made(self, name: str) -> Recorded:
        """The same without a namespace that turned out to be somebody else's."""
        return replace(
            self, namespaces=tuple(item for item in self.namespaces if item.name != name)
        )


@dataclass(frozen=True)
class Unreadable:
    """A file that should be a record, but is none that this version can read."""

    name: str
    reason: str


@dataclass(frozen=True)
class States:
    """The files of a directory: NAME.json, NAME.log (the relay's words) and the lock."""

    directory: Path = STATE_DIRECTORY

    def path(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def all(self) -> tuple[Recorded, ...]:
        """By name; files that are being written are not among them, nor are unreadable ones."""
        return tuple(item for item in self._found() if isinstance(item, Recorded))

    def unreadable(self) -> tuple[Unreadable, ...]:
        """By name: one such file hinders no other testbed."""
        return tuple(item for item in self._found() if isinstance(item, Unreadable))

    def _found(self) -> Iterator[Recorded | Unreadable]:
        for path in sorted(self.directory.glob("*.json")):
            try:
                if (recorded := self.read(path.stem)) is not None:
                    yield recorded
            except InvalidInput as error:
                yield Unreadable(path.stem, str(error))

    def read(self, name: str) -> Recorded | None:
        """None where there is no testbed of this name; raises `InvalidInput` for a file that is not ours."""
        path = self.path(name)
        if not NAME.fullmatch(name) or not path.is_file():
            return None
        data = read_json(path)
        refuse_newer(data, SCHEMA, "testbed", str(path))
        return parse(Recorded, data, str(path))

    def write(self, recorded: Recorded) -> None:
        """Whole or not at all, also when the process is killed in between."""
        path = self.path(recorded.layout.name)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(to_data(recorded), indent=1))
        partial.replace(path)

    def remove(self, name: str) -> None:
        for path in (
            self.log(name),
            self.path(name).with_suffix(".partial"),
            self.path(name),
        ):  # the record goes last
            path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One maker or remover at a time; the kernel frees the lock of one that dies. Raises `EmulationError` after a minute."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidInput(
                f"testbeds are recorded in {self.directory}, but it cannot be written ({error.strerror}); run as root"
            ) from error
        try:
            _wait_for(lock, self.directory)
            yield
        finally:
            os.close(lock)


def _wait_for(lock: int, directory: Path) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise EmulationError(
                    f"another process has been busy with a testbed in {directory} for {LOCK_PATIENCE_S:g} s; try again later"
                ) from error
        time.sleep(0.02)
