"""Files, folders, globs and archives as byte streams.

Everything is bounded, since the files come from other people. An archive is read once from front to
back, and nothing is written to disk.
"""

from __future__ import annotations

import glob
import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Self

from autotune.errors import InvalidInput
from autotune.files import is_file, is_folder, open_regular
from autotune.profiling.formats.json_stream import Read

MAX_BYTES = 16 * 2**30
"""Limit of one unpacked trace."""
MAX_RATIO = 300
"""Limit of unpacked over packed bytes, beyond the first `FREE_BYTES`.

Traces shrink 10 to 60 times, a file designed to fill the memory 1000 times."""
FREE_BYTES = 64 * 2**20
MAX_FILES = 20_000
MAX_VISITED = 200_000
"""Files and folders that are visited below one folder of traces."""
_SNIFFED_BYTES = 2**16

MAX_HEADER_BYTES = 2**20
"""Limit of an archive's headers that hold a long name, or further attributes."""
_CUT_OFF = (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError)
_ENDINGS = (".json", ".json.gz", ".pt.trace.json.gz", ".et")
_METADATA = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_ARCHIVES = (".tar", ".tar.gz", ".tgz")


@dataclass(frozen=True)
class TraceSource:
    """`name`: path, within an archive `archive:member`. `open()` yields a bounded `Read`."""

    name: str
    open: Callable[[], AbstractContextManager[Read]]

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.name.rpartition(":")[2]).name


def find_sources(paths: str | Path | Sequence[str | Path]) -> Iterator[TraceSource]:
    """Yield every trace file of `paths` in the given order.

    A folder is sorted by name, without hidden files. An archive keeps its order, and each of its
    sources must be read before the next one is requested. Raises `InvalidInput` for a missing path.
    """
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    if not listed:
        raise InvalidInput("at least one trace is needed, but no path was given")
    for path in _expanded(listed):
        if path.name.lower().endswith(_ARCHIVES):
            yield from _members(path)
        else:
            yield TraceSource(str(path), partial(_open_file, path))


def holds_traces(path: Path) -> bool:
    """Whether the path is a folder, a packed file, or a file that begins as a Kineto trace does.

    `find_sources` checks the contents of folders and packed files. Raises `InvalidInput` for a
    path that may not be searched.
    """
    if is_folder(path) or not is_file(path):
        return is_folder(path)
    if path.name.lower().endswith((*_ARCHIVES, ".gz")):
        return True
    with open_regular(path) as file:
        return b'"traceEvents"' in file.read(_SNIFFED_BYTES)


def _expanded(paths: Sequence[str | Path]) -> Iterator[Path]:
    count = 0
    for given in paths:
        path = Path(given)
        rule = "a trace must exist"
        if is_folder(path):
            rule = "a folder of traces must hold .json, .json.gz, .et or .tar.gz files"
            files = sorted(_inside(path))
        elif is_file(path) or path.exists():
            files = [path]
        else:
            matches = glob.glob(str(given), recursive=True)  # noqa: PTH207 - may be absolute
            files = sorted(map(Path, matches))
        if not files:
            raise InvalidInput(f"{rule}, but {given} has none; check the path")
        count += len(files)
        if count > MAX_FILES:
            limit = f"at most {MAX_FILES} trace files are read at once"
            raise InvalidInput(f"{limit}, but {given} exceeds that")
        yield from files


def _inside(folder: Path) -> Iterator[Path]:
    """The trace files below a folder, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename or folder), error) from error

    visited = 0
    for parent, folders, names in os.walk(folder, onerror=refuse):
        visited += len(folders) + len(names)
        folders[:] = [name for name in folders if not name.startswith(".")]
        if visited > MAX_VISITED:
            limit = f"at most {MAX_VISITED} files and folders"
            raise InvalidInput(f"a folder of traces may hold {limit}, but {folder} has more")
        for name in names:
            path = Path(parent, name)
            is_trace = name.lower().endswith((*_ENDINGS, *_ARCHIVES))
            if is_trace and not name.startswith(".") and is_file(path):
                yield path


@contextmanager
def _open_file(path: Path) -> Iterator[Read]:
    try:
        with open_regular(path) as raw:
            yield _unpacked(raw, str(path))
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InvalidInput:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InvalidInput(f"cannot read {path}: {reason}; check the path and its permissions")


def _unpacked(raw: IO[bytes], where: str) -> Read:
    """A bounded `read`. The first bytes decide whether the file is packed; its name may lie."""
    counted = _CountedStream(raw)
    buffered = io.BufferedReader(counted)
    packed = _peeked(buffered, where) == b"\x1f\x8b"
    stream = gzip.GzipFile(fileobj=buffered) if packed else buffered
    total = 0
    cut_off: InvalidInput | None = None

    def read(count: int) -> bytes:
        nonlocal total, cut_off
        if cut_off is not None:
            raise cut_off
        data = bytearray()
        try:
            while len(data) < count and (more := stream.read1(count - len(data))):
                data += more
        except _CUT_OFF as error:
            kind = "a complete gzip file" if packed else "complete"
            cut_off = InvalidInput(f"{where} must be {kind}, but is not: {error}")
            cut_off.__cause__ = error
            if not data:
                raise cut_off from error
        total += len(data)
        if total > MAX_BYTES:
            limit = f"at most {MAX_BYTES} bytes when unpacked"
            raise InvalidInput(f"{where} may hold {limit}, but has more")
        if packed and total > FREE_BYTES + MAX_RATIO * counted.taken:
            limit = f"more than {MAX_RATIO} times its size"
            raise InvalidInput(f"{where} unpacks to {limit}, which no trace does; it is refused")
        return bytes(data)

    return read


def _peeked(buffered: io.BufferedReader[_CountedStream], where: str) -> bytes:
    try:
        return buffered.peek(2)[:2]
    except _CUT_OFF as error:
        raise InvalidInput(f"{where} must be complete, but is not: {error}") from error


class _CountedStream(io.RawIOBase):
    """Counts the bytes taken from a stream."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.taken = 0

    def readable(self) -> bool:
        return True

    def readinto(self, target) -> int:  # type: ignore[no-untyped-def]
        data = self._raw.read(len(target))
        target[: len(data)] = data
        self.taken += len(data)
        return len(data)


def _members(path: Path) -> Iterator[TraceSource]:
    """Yield the traces of an archive, without its links and devices.

    A member is opened once, in its turn.
    """
    try:
        with open_regular(path) as raw:
            stream = _ReadableStream(_unpacked(raw, str(path)))
            with tarfile.open(  # type: ignore[call-overload]
                fileobj=stream, mode="r|", tarinfo=_BoundedInfo
            ) as archive:
                empty = True
                for number, member in enumerate(archive):
                    if number >= MAX_FILES:
                        limit = f"at most {MAX_FILES} files"
                        raise InvalidInput(f"an archive may hold {limit}, but {path} has more")
                    if member.isfile() and member.name.lower().endswith(_ENDINGS):
                        empty = False
                        opener = partial(_open_member, archive, member, path)
                        yield TraceSource(f"{path}:{member.name}", opener)
                if empty:
                    rule = "an archive of traces must hold .json, .json.gz or .et files"
                    raise InvalidInput(f"{rule}, but {path} has none")
    except (tarfile.TarError, RecursionError) as error:  # each header of a name reads the next
        raise InvalidInput(f"{path} must be a tar archive, but is not: {error}") from error
    except OSError as error:
        raise _unreadable(path, error) from error


class _BoundedInfo(tarfile.TarInfo):
    """A header of an archive. `tarfile` reads those of names and attributes whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.type in _METADATA and header.size > MAX_HEADER_BYTES:
            limit = f"at most {MAX_HEADER_BYTES} bytes of names and attributes"
            raise InvalidInput(f"a header of an archive may hold {limit}, but has {header.size}")
        return header


@contextmanager
def _open_member(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> Iterator[Read]:
    try:
        stream = archive.extractfile(member)
    except (tarfile.TarError, KeyError) as error:
        raise InvalidInput(f"{path}:{member.name} must be complete, but is not: {error}") from error
    if stream is None:
        raise InvalidInput(f"{path}:{member.name} must be a plain file")
    yield _unpacked(stream, f"{path}:{member.name}")


@dataclass(frozen=True)
class _ReadableStream:
    """The part of a stream that `tarfile` needs."""

    read: Read
