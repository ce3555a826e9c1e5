"""Files, folders, globs and archives as a list of byte streams. Everything is bounded: the files come from other people.

An archive is read once from front to back and nothing is written to disk.
"""

from __future__ import annotations

import glob
import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from autotune.errors import InvalidInput

MAX_BYTES = 16 * 2**30
"""Of one trace when unpacked."""
MAX_RATIO = 300
"""Unpacked over packed bytes, beyond the first `FREE_BYTES`: traces shrink 10 to 60 times, a file made to fill the memory 1000 times."""
FREE_BYTES = 64 * 2**20
MAX_FILES = 20_000
_SNIFFED = 2**16

_ENDINGS = (".json", ".json.gz", ".pt.trace.json.gz")
_ARCHIVES = (".tar", ".tar.gz", ".tgz")

_RANK_IN_NAME = re.compile(
    r"(?:^|[^a-z])(?:rank|worker|trainer|gpu|r)[_.\-]?(\d{1,6})(?!\d)", re.IGNORECASE
)
_LAST_NUMBER = re.compile(r"(\d{1,6})(?:\.[a-z.]*)?$", re.IGNORECASE)

Read = Callable[[int], bytes]


@dataclass(frozen=True)
class Source:
    """`name`: path, within an archive `archive:member`. `open()` is a context manager that gives a bounded `read(n)`."""

    name: str
    open: Callable[[], AbstractContextManager[Read]]

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.name.rpartition(":")[2]).name


def find_sources(paths: str | Path | Sequence[str | Path]) -> Iterator[Source]:
    """Every trace file of `paths` in the order given, within a folder or archive sorted by name (archives: as they lie).

    The sources of an archive must be read as they come, before the next one is asked for. Raises `InvalidInput` where a path is missing.
    """
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    if not listed:
        raise InvalidInput("at least one trace is needed, but no path was given")
    for path in _expanded(listed):
        name = path.name.lower()
        if name.endswith(_ARCHIVES):
            yield from _members(path)
        else:
            yield Source(str(path), partial(_open_file, path))


def holds_traces(path: Path) -> bool:
    """Whether it is a folder or a packed file, whose contents `find_sources` checks, or begins as a Kineto trace does."""
    if path.is_dir() or not path.is_file():
        return path.is_dir()
    if path.name.lower().endswith((*_ARCHIVES, ".gz")):
        return True
    with path.open("rb") as file:
        return b'"traceEvents"' in file.read(_SNIFFED)


def rank_in_name(source: str) -> int | None:
    """The rank that the name of a source tells, as in `rank3.json.gz`, `traces.tar:worker3_step_12.json` or `dlrm_eg_3.json`."""
    name = source.replace(":", "/").rpartition("/")[2]
    match = _RANK_IN_NAME.search(name) or _LAST_NUMBER.search(name.partition(".")[0])
    return int(match.group(1)) if match else None


def _expanded(paths: Sequence[str | Path]) -> Iterator[Path]:
    count = 0
    for given in paths:
        path = Path(given)
        if path.is_dir():
            found = sorted(
                p
                for p in path.rglob("*")
                if p.is_file() and p.name.lower().endswith((*_ENDINGS, *_ARCHIVES))
            )
            wanted = "a folder of traces must hold .json, .json.gz or .tar.gz files"
        elif path.exists():
            found, wanted = [path], ""
        else:
            found = sorted(Path(p) for p in glob.glob(str(given), recursive=True))  # noqa: PTH207 - a pattern may be absolute
            wanted = "a trace must exist"
        if not found:
            raise InvalidInput(f"{wanted}, but {given} has none; check the path")
        count += len(found)
        if count > MAX_FILES:
            raise InvalidInput(
                f"at most {MAX_FILES} trace files are read at once, but {given} makes them more"
            )
        yield from found


@contextmanager
def _open_file(path: Path) -> Iterator[Read]:
    try:
        with path.open("rb") as raw:
            yield _unpacked(raw, str(path))
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path}: {error.strerror or error}; check the path and its permissions"
        ) from error


def _unpacked(raw: IO[bytes], where: str) -> Read:
    """A bounded `read`. Whether a file is packed is told from its first bytes; its name may lie."""
    counted = _Counted(raw)
    buffered = io.BufferedReader(counted)
    packed = buffered.peek(2)[:2] == b"\x1f\x8b"
    stream: IO[bytes] = gzip.GzipFile(fileobj=buffered) if packed else buffered  # type: ignore[assignment]
    total = 0

    def read(count: int) -> bytes:
        nonlocal total
        try:
            data = stream.read(count)
        except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
            raise InvalidInput(
                f"{where} must be a complete gzip file, but is not: {error}"
            ) from error
        total += len(data)
        _check_size(total, counted.taken if packed else None, where)
        return data

    return read


def _check_size(unpacked: int, packed: int | None, where: str) -> None:
    if unpacked > MAX_BYTES:
        raise InvalidInput(
            f"{where} may hold at most {MAX_BYTES} bytes when unpacked, but has more"
        )
    if packed is not None and unpacked > FREE_BYTES + MAX_RATIO * packed:
        raise InvalidInput(
            f"{where} unpacks to more than {MAX_RATIO} times its size, which no trace does; it is refused"
        )


class _Counted(io.RawIOBase):
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


def _members(path: Path) -> Iterator[Source]:
    """The traces of an archive. A member is opened once, when its turn has come; links and devices are left out."""
    try:
        with path.open("rb") as raw:
            read = _unpacked(raw, str(path))
            with tarfile.open(fileobj=_Readable(read), mode="r|") as archive:  # type: ignore[call-overload]
                found = 0
                for number, member in enumerate(archive):
                    if number >= MAX_FILES:
                        raise InvalidInput(
                            f"an archive may hold at most {MAX_FILES} files, but {path} has more"
                        )
                    if member.isfile() and member.name.lower().endswith(_ENDINGS):
                        found += 1
                        yield Source(
                            f"{path}:{member.name}", partial(_open_member, archive, member, path)
                        )
                if not found:
                    raise InvalidInput(
                        f"an archive of traces must hold .json or .json.gz files, but {path} has none"
                    )
    except tarfile.TarError as error:
        raise InvalidInput(f"{path} must be a tar archive, but is not: {error}") from error
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from error


@contextmanager
def _open_member(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> Iterator[Read]:
    stream = archive.extractfile(member)
    if stream is None:
        raise InvalidInput(f"{path}:{member.name} must be a plain file")
    yield _unpacked(stream, f"{path}:{member.name}")


class _Readable:
    """What `tarfile` needs of a stream."""

    def __init__(self, read: Read) -> None:
        self.read = read
