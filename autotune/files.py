"""Read and write regular files only: a FIFO would block, and a device has no end.

A file is checked before it is opened and again afterwards, and never read beyond its bound, also
if it grows meanwhile. A written file is complete or absent.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from autotune.errors import InvalidInput

MAX_FILE_BYTES = 64 * 2**20
"""A BERT-large strategy with every variable in 40 shards is about 3 MB."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading; raises `InvalidInput` for anything else."""
    try:
        _check_regular(path, path.stat().st_mode)
        # Between the check and the opening another file may take the name: never wait for it.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            _check_regular(path, os.fstat(handle).st_mode)
            return os.fdopen(handle, "rb")
        except BaseException:
            os.close(handle)
            raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, InvalidInput):
            raise
        raise _unreadable(path, error) from error


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The file's bytes, or `InvalidInput` if it is missing, too large or no regular file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise InvalidInput(f"{path} may hold at most {max_bytes} bytes, but has {size}")
        data = b""
        try:  # `read` allocates what it is asked for, so ask for what there is
            while part := file.read(min(max(size, 2**16), max_bytes) + 1):
                data += part
                if len(data) > max_bytes:
                    break
        except OSError as error:
            raise _unreadable(path, error) from error
    if len(data) > max_bytes:
        raise InvalidInput(f"{path} may hold at most {max_bytes} bytes, but has more")
    return data


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Read a text file. Raises `InvalidInput` if it is missing, too large or not UTF-8."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} must be UTF-8 text, but byte {error.start} is not") from error


def is_file(path: Path) -> bool:
    """Whether there is a regular file. Raises `InvalidInput` for a path that cannot be searched."""
    return _is_kind(path, stat.S_ISREG)


def is_folder(path: Path) -> bool:
    """Whether there is a folder. Raises `InvalidInput` for a path that cannot be searched."""
    return _is_kind(path, stat.S_ISDIR)


def _is_kind(path: Path, kind: Callable[[int], bool]) -> bool:
    """`Path.is_file` and the like raise for a folder without search permission."""
    try:
        return kind(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # also a loop of links; a NUL in the path
        raise _unreadable(path, error) from error


@contextmanager
def whole_file(path: Path, what: str, private: bool = False) -> Iterator[IO[bytes]]:
    """Write a file atomically and durably: `path` has the old or the new content.

    Only its owner may read a `private` one. A link is followed to its file. Raises `InvalidInput`
    if the path is no regular file, or if the file cannot be written.
    """
    target = _target(path, what)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:50]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if not private:  # `mkstemp` made it for its owner only
                Path(temporary).chmod(0o666 & ~_umask())
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritable(path, what, error) from error


def write_whole(path: Path, text: str, what: str, private: bool = False) -> None:
    """Write a text atomically, as `whole_file` does."""
    with whole_file(path, what, private) as file:
        file.write(text.encode("utf-8"))


def refuse_unwritable(path: Path | None) -> None:
    """Raise `InvalidInput` if no file can be written at `path`, before the work that it is for."""
    if path is None:
        return
    target = _target(path, "the result")
    folder = next(parent for parent in target.parents if parent.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInput(
            f"cannot write the result to {path}: this user may not write in {folder}; choose "
            "another path"
        )


def _target(path: Path, what: str) -> Path:
    """The file that the path's links end at. Raises `InvalidInput` unless it is regular or new."""
    try:
        target = path.resolve()
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a NUL in the path
        raise _unwritable(path, what, error) from error
    _check_regular(path, mode)
    return target


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise InvalidInput(f"{path} must be a regular file, but is {kind}; give another path")


def _unreadable(path: Path, error: Exception) -> InvalidInput:
    return InvalidInput(f"cannot read {path}: {_reason(error)}; check the path and its permissions")


def _unwritable(path: Path, what: str, error: Exception) -> InvalidInput:
    return InvalidInput(f"cannot write {what} to {path} ({_reason(error)}); choose another path")


def _reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or error


def _umask() -> int:
    """The mode bits that the user withholds from new files; there is no call that only reads."""
    bits = os.umask(0o077)
    os.umask(bits)
    return bits
