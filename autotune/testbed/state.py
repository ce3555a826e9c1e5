"""Records of testbeds, one JSON file each, written before the first namespace is created.

Everything that exists is recorded, and anything without a record belongs to others. A namespace is
recorded by its name just before it is created and by its inode right afterwards. A namespace that
somebody deleted and created again is therefore not the recorded one. At most one namespace has a
name without an inode, if its maker died in between: it may be ours or somebody else's.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.canonical import to_data
from autotune.errors import EmulationError, InvalidInput
from autotune.parsing import parse, read_json, refuse_newer
from autotune.testbed.layout import NAME, Layout
from autotune.testbed.machine import Process, inode

STATE_DIRECTORY = Path("/run/autotune-testbeds")
SCHEMA = 3
LOCK_TIMEOUT_S = 60.0
SCRATCH_PREFIX = "autotune."
LONGEST_SCRATCH_BYTES = 32
"""A Unix socket's path has at most 107 bytes. Ray and a directory of `ray_nodes` take 75 of
them."""


@dataclass(frozen=True)
class Namespace:
    """`inode`: 0 from just before the namespace is created until it is."""

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    inode: int = 0

    @property
    def ours(self) -> int | None:
        """The inode of the namespace with this name, if it surely is the recorded one."""
        return self.inode if self.inode and inode(self.name) == self.inode else None

    @property
    def undecided(self) -> int | None:
        """The inode of the namespace with this name, if it may be ours or somebody else's."""
        return None if self.inode else inode(self.name)


@dataclass(frozen=True)
class Recorded:
    """A testbed as recorded.

    It ends with its `maker` if `owned`, and if the maker dies before it is `complete`.
    `namespaces`: those created until now; the last one may be just about to be. `scratch`: its
    directory, which is removed with it; None if it could not be created.
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
        """Whether nobody needs it any more, as the process that it belonged to has died."""
        return (self.owned or not self.complete) and not self.maker.alive

    @property
    def inodes(self) -> frozenset[int]:
        """Inodes of the namespaces that exist and surely are the recorded ones."""
        inodes = (namespace.ours for namespace in self.namespaces)
        return frozenset(inode for inode in inodes if inode is not None)

    def before_creating(self, name: str) -> Recorded:
        """The same, with a namespace that is about to be created."""
        return replace(self, namespaces=(*self.namespaces, Namespace(name)))

    def created(self, name: str) -> Recorded:
        """The same, with the inode of the namespace that was just created."""
        namespace = Namespace(name, inode(name) or 0)
        others = (namespace if item.name == name else item for item in self.namespaces)
        return replace(self, namespaces=tuple(others))

    def without(self, name: str) -> Recorded:
        """The same without a namespace that belongs to somebody else."""
        others = tuple(item for item in self.namespaces if item.name != name)
        return replace(self, namespaces=others)


@dataclass(frozen=True)
class Unreadable:
    """A file in the place of a record that this version cannot read."""

    name: str
    reason: str


@dataclass(frozen=True)
class States:
    """The files of a directory: NAME.json, NAME.log (the relay's output) and the lock."""

    directory: Path = STATE_DIRECTORY

    def path(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def all(self) -> tuple[Recorded, ...]:
        """All records by name, without unreadable ones and files that are being written."""
        return tuple(item for item in self._read_all() if isinstance(item, Recorded))

    def unreadable(self) -> tuple[Unreadable, ...]:
        """Unreadable files by name: one such file hinders no other testbed."""
        return tuple(item for item in self._read_all() if isinstance(item, Unreadable))

    def _read_all(self) -> Iterator[Recorded | Unreadable]:
        for path in sorted(self.directory.glob("*.json")):
            try:
                if (recorded := self.read(path.stem)) is not None:
                    yield recorded
            except InvalidInput as error:
                yield Unreadable(path.stem, str(error))

    def read(self, name: str) -> Recorded | None:
        """The testbed of this name, or None; raises `InvalidInput` for a file that is not ours."""
        path = self.path(name)
        if not NAME.fullmatch(name) or not path.is_file():
            return None
        data = read_json(path)
        refuse_newer(data, SCHEMA, "testbed", str(path))
        return parse(Recorded, data, str(path))

    def write(self, recorded: Recorded) -> None:
        """Write the whole record or nothing, also if the process is killed in between."""
        path = self.path(recorded.layout.name)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(to_data(recorded), indent=1))
        partial.replace(path)

    def remove(self, name: str) -> None:
        """Remove the files of this name, the record last."""
        path = self.path(name)
        for file in (self.log(name), path.with_suffix(".partial"), path):
            file.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other makers and removers; the kernel frees the lock of a process that dies.

        Raises `EmulationError` after `LOCK_TIMEOUT_S`.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidInput(
                f"testbeds are recorded in {self.directory}, but it cannot be written "
                f"({error.strerror}); run as root"
            ) from error
        try:
            _wait_for(lock, self.directory)
            yield
        finally:
            os.close(lock)


def _wait_for(lock: int, directory: Path) -> None:
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline_s:
                raise EmulationError(
                    f"another process has been busy with a testbed in {directory} for "
                    f"{LOCK_TIMEOUT_S:g} s; try again later"
                ) from error
        time.sleep(0.02)


def new_scratch() -> Path:
    """A short unused path in the temporary directory, for `make_scratch`."""
    name = SCRATCH_PREFIX + secrets.token_hex(4)
    path = Path(tempfile.gettempdir()) / name
    short = len(os.fsencode(path)) <= LONGEST_SCRATCH_BYTES
    return path if short else Path("/tmp") / name


def make_scratch(path: Path) -> str:
    """Create the directory for this user alone; return the reason of a failure, or ""."""
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def remove_scratch(path: Path) -> None:
    """Remove the directory with its content, if it is ours: no link, this user's, with our prefix.

    Raises `EmulationError` if some of it stays.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    ours = (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and path.name.startswith(SCRATCH_PREFIX)
        and path.is_absolute()
    )
    if not ours:
        return
    shutil.rmtree(path, ignore_errors=True)  # a process that ends may still write there
    try:
        if path.exists():
            shutil.rmtree(path)
    except OSError as error:
        raise EmulationError(
            f"the directory {path} of a testbed could not be removed: {error.strerror}; remove it"
        ) from error
