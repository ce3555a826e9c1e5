"""Holds a copy-on-write view of folders in a mount namespace; run by its path, without our code.

It reads one line of JSON from stdin: the folders, the folders inside them that stay real, and where
copies may lie. It mounts an overlay over each folder in a mount namespace of its own (without root
in a user namespace of its own), and a copy over each file that is mounted inside. It answers by one
line: its process id and the namespace, which other processes enter, or the reason why there is no
view. When stdin is closed, it removes the copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

PREFIX = "autotune-view-"
REMOVAL_S = 10.0
"""Time for processes inside to end: until then they may write into folders that are removed."""
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000  # linux/sched.h
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 0x1000, 0x4000, 0x80000, 2  # linux/mount.h


def main() -> int:
    request = json.loads(sys.stdin.buffer.readline())
    parents: list[str] = request["parents"]
    remove_abandoned(parents)
    view = _View(request["folders"], request["kept"])
    try:
        view.mount(parents)
    except OSError as error:
        _answer(reason=f"{error.filename}: {error.strerror}")
        return 0
    if os.fork():  # a supervisor that ends kills its children, but not theirs
        return 0
    namespace = Path("/proc/self/ns/mnt").stat().st_ino
    _answer(holder=os.getpid(), namespace=namespace, scratch=str(view.scratch))
    while os.read(0, 1):
        pass
    view.remove()
    return 0


def _answer(**values: object) -> None:
    os.write(1, f"{json.dumps(values)}\n".encode())


def remove_abandoned(parents: Iterable[str]) -> None:
    """Remove this user's scratch folders that no holder has locked, as after its kill -9."""
    for scratch in (path for parent in parents for path in Path(parent).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if scratch.lstat().st_uid == os.getuid() and (lock := _locked(scratch)) is not None:
                _remove(scratch, time.monotonic())
                os.close(lock)


def _locked(scratch: Path) -> int | None:
    """A descriptor that locks the folder until it is closed; None if another process has it."""
    descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


class _View:
    """Overlays over `folders`, in which `kept` stays real."""

    def __init__(self, folders: list[str], kept: list[str]) -> None:
        self._folders = folders
        self._kept = [path for path in kept if _stays_real(path, folders)]
        self._mounted: list[str] = []
        self.scratch: Path | None = None
        self._lock: int | None = None

    def mount(self, parents: list[str]) -> None:
        """Copies lie below the first of `parents` that can hold them, or in memory.

        Raises `OSError` with a file name.
        """
        outside = [parent for parent in parents if not _is_inside(parent, self._folders)]
        if not outside:
            raise OSError(errno.ENOENT, "copies would lie inside the folders", ", ".join(parents))
        in_user_namespace = _enter_namespaces()
        targets = sorted({*self._folders, *_mounts_inside(self._folders)})
        # Before the first mount, which hides what is below it.
        covered = {path: os.open(path, os.O_PATH) for path in targets}
        real = {path: os.open(path, os.O_PATH) for path in self._kept}
        for parent, in_memory in (*((path, False) for path in outside), (outside[0], True)):
            try:
                self._make_scratch(parent, in_memory)
                for number, (path, descriptor) in enumerate(covered.items()):
                    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                        self._cover(path, descriptor, number, in_user_namespace)
                    else:
                        self._cover_file(path, descriptor, number)
                for path, descriptor in real.items():
                    self._mount(f"/proc/self/fd/{descriptor}", path, "", _MS_BIND | _MS_REC)
                return
            except OSError as error:
                problem = error
                self.remove()
        raise problem

    def _make_scratch(self, parent: str, in_memory: bool) -> None:
        while self._lock is None:  # another job may take it for abandoned before it is locked
            self.scratch = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            with contextlib.suppress(FileNotFoundError):
                self._lock = _locked(self.scratch)
        if in_memory:
            self._mount("tmpfs", str(self.scratch), "tmpfs", 0, "mode=0700")

    def _cover(self, path: str, lower: int, number: int, in_user_namespace: bool) -> None:
        assert self.scratch is not None
        status = os.fstat(lower)
        upper, work = (self.scratch / f"{kind}{number}" for kind in ("upper", "work"))
        upper.mkdir()
        work.mkdir()
        with contextlib.suppress(OSError):  # an owner who has no id in a user namespace
            os.chown(upper, status.st_uid, status.st_gid)
        upper.chmod(status.st_mode & 0o7777)
        # Descriptors, as commas and colons in a path would have a meaning.
        descriptors = [os.open(folder, os.O_PATH) for folder in (upper, work)]
        layers = zip(("lowerdir", "upperdir", "workdir"), (lower, *descriptors), strict=True)
        options = ",".join(f"{name}=/proc/self/fd/{descriptor}" for name, descriptor in layers)
        options += ",userxattr" if in_user_namespace else ",redirect_dir=on"
        self._mount("overlay", path, "overlay", 0, options)
        for descriptor in descriptors:
            os.close(descriptor)

    def _cover_file(self, path: str, file: int, number: int) -> None:
        """Mount a copy; a file that is read-only here, or no plain file, stays real."""
        assert self.scratch is not None
        source, status = f"/proc/self/fd/{file}", os.fstat(file)
        if stat.S_ISREG(status.st_mode) and not os.fstatvfs(file).f_flag & os.ST_RDONLY:
            copy = self.scratch / f"file{number}"
            shutil.copy2(source, copy)
            with contextlib.suppress(OSError):  # as in `_cover`
                os.chown(copy, status.st_uid, status.st_gid)
            source = str(copy)
        self._mount(source, path, "", _MS_BIND)

    def _mount(self, source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        _mount(source, target, kind, flags, options)
        self._mounted.append(target)

    def remove(self) -> None:
        """Unmount everything and remove the copies."""
        while self._mounted:
            _libc.umount2(os.fsencode(self._mounted.pop()), _MNT_DETACH)
        if self.scratch is not None:
            _remove(self.scratch, time.monotonic() + REMOVAL_S)
        if self._lock is not None:
            os.close(self._lock)
        self.scratch = self._lock = None


_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = (os.fsencode(word) or None for word in (source, target, kind))
    if _libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"{kind or 'mount'} at {target}")


def _unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "namespaces")


def _enter_namespaces() -> bool:
    """Leave the machine's mounts; return whether that needed a user namespace."""
    ids = (("uid_map", os.getuid()), ("gid_map", os.getgid()))
    try:
        _unshare(_CLONE_NEWNS)
        own_user = False
    except OSError:
        _unshare(_CLONE_NEWNS | _CLONE_NEWUSER)
        own_user = True
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in ids:
            Path(f"/proc/self/{name}").write_text(f"{number} {number} 1")
    _mount("none", "/", "", _MS_REC | _MS_SLAVE)  # later mounts of the machine still arrive
    return own_user


def _mounts_inside(folders: list[str]) -> list[str]:
    """Mounts below the folders, which an overlay over a folder would hide."""
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    # Spaces and the like are written as octal numbers: see proc(5).
    points = [line.split()[4].decode("unicode_escape").encode("latin-1") for line in lines]
    paths = (os.fsdecode(point) for point in points)
    return [path for path in paths if path not in folders and _is_inside(path, folders)]


def _is_inside(path: str, folders: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _stays_real(path: str, folders: list[str]) -> bool:
    """Whether `path` is below a folder, and no folder below it."""
    return _is_inside(path, folders) and not any(_is_inside(folder, [path]) for folder in folders)


def _remove(folder: Path, until_s: float) -> None:
    """Remove the folder; try again until `until_s` while processes write into it."""
    while folder.exists():
        for work in folder.glob("work*/work"):  # overlayfs takes all permissions from it
            with contextlib.suppress(OSError):
                work.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > until_s:
            return
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
