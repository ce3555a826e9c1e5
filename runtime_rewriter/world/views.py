"""Makes copy-on-write views of folders, so that trials cannot change the user's files."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import LaunchError
from runtime_rewriter.file_view import FileView
from runtime_rewriter.world.ray_folder import without_folder

START_S = 30.0
END_S = 30.0
"""Time for the copies to be removed."""
_HOLDER = Path(__file__).with_name("view_holder.py")


@dataclass(frozen=True)
class Protected:
    """Folders that a view covers, and folders inside them that stay real; absolute paths."""

    folders: tuple[str, ...]
    kept: tuple[str, ...] = ()

    @staticmethod
    def of(folders: Iterable[Path], kept: Iterable[Path] = ()) -> Protected:
        """Without folders inside others, and with symbolic links followed."""
        real = sorted({str(folder.resolve()) for folder in folders})
        outermost = [
            path
            for path in real
            if not any(path != other and Path(path).is_relative_to(other) for other in real)
        ]
        return Protected(tuple(outermost), tuple(str(path.resolve()) for path in kept))

    def here(self, further: Sequence[str] = ()) -> Protected:
        """Those that exist on this machine, and `further` ones."""
        folders = [Path(path) for path in (*self.folders, *further)]
        kept = [Path(path) for path in self.kept]
        existing = [[path for path in paths if path.is_dir()] for paths in (folders, kept)]
        return Protected.of(*existing)


class HeldView:
    """A new view, until `end` or the end of this process. Raises `LaunchError` if there is none."""

    def __init__(self, protected: Protected) -> None:
        if "/" in protected.folders:
            raise LaunchError("/: the root folder cannot be covered")
        self._process = subprocess.Popen(
            # -I -S: it needs the standard library only, and starts in a fraction of the time
            [sys.executable, "-I", "-S", str(_HOLDER)],
            cwd="/",
            env=without_folder(os.environ),  # it removes the copies when Ray was killed
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        request = {
            "folders": protected.folders,
            "kept": protected.kept,
            "parents": _scratch_parents(),
        }
        answer = self._answer(f"{json.dumps(request)}\n".encode())
        if "holder" not in answer:
            self.end()
            raise LaunchError(answer.get("reason", "the process that makes it gave no answer"))
        self.view = FileView(answer["holder"], answer["namespace"])
        self.scratch = Path(answer["scratch"])
        """Where the copies lie; in memory, if they can lie nowhere else."""

    def _answer(self, request: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(request)
            self._process.stdin.flush()
        line = self._output(START_S).partition(b"\n")[0]
        answer: dict[str, Any] = json.loads(line or b"{}")
        return answer

    def _output(self, timeout_s: float) -> bytes:
        """What the holder writes within the timeout; nothing when it has ended."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return b""
        return os.read(self._process.stdout.fileno(), 2**16)

    def end(self, timeout_s: float = END_S) -> None:
        """Remove the copies. The processes inside should have ended. May be called again.

        A holder that does not end in time is killed; the next one removes its copies.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.stdout.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)  # it is about to end, on a busy machine after a while


def held_view(protected: Protected, host: str) -> HeldView:
    """A new view on `host`. Raises `LaunchError` with the fix."""
    try:
        return HeldView(protected)
    except LaunchError as error:
        folders = " and ".join(protected.folders)
        raise LaunchError(
            f"trials must not change the files in {folders}, but {host} cannot give them a "
            f"copy-on-write view ({error}); add --writes-are-fine if they may change",
            anchor="no-view",
        ) from error


def refusal_reason(protected: Protected) -> str:
    """Why this machine cannot make a view of the folders; empty if it can."""
    try:
        HeldView(protected.here()).end()
    except LaunchError as error:
        return str(error)
    return ""


def _scratch_parents() -> list[str]:
    """Folders for copies: the one of temporary files, and the one of large ones (FHS 5.15)."""
    parents = dict.fromkeys([os.environ.get("TMPDIR", ""), "/var/tmp", tempfile.gettempdir()])
    return [parent for parent in parents if os.access(parent, os.W_OK | os.X_OK)]
