"""Run a training script and record some of its steps on every rank into a folder."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autotune.errors import LaunchError
from autotune.jobs.processes import Launched, launcher_needed, shell_status
from autotune.recordings.graph_file import GRAPH_FILE
from autotune.recordings.job_file import JOB_FILE, trace_name
from autotune.recordings.memory_file import MEMORY_FILE
from runtime_rewriter.recording.settings import RecordSettings
from runtime_rewriter.world.command import with_launcher
from runtime_rewriter.world.script_command import ScriptCommand
from runtime_rewriter.world.starting import launcher_words

STOPPING_S = 30.0
"""Time for the script to end once everything is written."""
_ASIDE = ".earlier-recording-"
_LOCK = "lock"
"""Locked while the command runs that has put a recording aside."""


def recorded_files(folder: Path) -> list[Path]:
    """The files of an earlier recording, and others with the names of its traces."""
    files = [folder / name for name in (JOB_FILE, MEMORY_FILE, GRAPH_FILE)]
    return [path for path in (*files, *sorted(folder.glob(trace_name("*")))) if path.exists()]


def clear_recording(folder: Path) -> None:
    """Delete the recording in a folder."""
    for path in recorded_files(folder):
        path.unlink(missing_ok=True)


@contextmanager
def earlier_kept(folder: Path) -> Iterator[None]:
    """Put an earlier recording aside, and back if the block fails; else delete it.

    In its place, its traces would be read along with the new ones. `restore_earlier` puts it back
    after `kill -9`.
    """
    earlier = recorded_files(folder)
    if not earlier:
        yield
        return
    with tempfile.TemporaryDirectory(prefix=_ASIDE, dir=folder) as aside, _locked(Path(aside)):
        _move(earlier, Path(aside))
        try:
            yield
        except BaseException:
            clear_recording(folder)
            _put_back(Path(aside), folder)
            raise


def restore_earlier(folder: Path) -> None:
    """Put back the recordings that killed commands left aside, unless there is a new one."""
    for aside in folder.glob(f"{_ASIDE}*"):
        with suppress(OSError), (aside / _LOCK).open("rb+") as lock:  # locked: its command runs
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (folder / JOB_FILE).exists():
                _put_back(aside, folder)
            shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(aside: Path) -> Iterator[None]:
    with (aside / _LOCK).open("wb") as lock:
        with suppress(OSError):  # a file system without locks, where no other command gets one
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _put_back(aside: Path, folder: Path) -> None:
    """The job file comes last: until then `restore_earlier` can go on."""
    _move(reversed(recorded_files(aside)), folder)


def _move(files: Iterable[Path], folder: Path) -> None:
    for path in files:
        with suppress(FileNotFoundError):  # the command on another host has moved it
            path.rename(folder / path.name)


def record(command: ScriptCommand, settings: RecordSettings, timeout_s: float) -> int:
    """Run until everything is written and the script has ended; return its `shell_status`.

    The status is 0 if we stopped the script (`settings.stop`). Raises `LaunchError` if nothing was
    recorded.
    """
    reports = Path(settings.reports)
    settings.write(reports / "settings.json")
    launcher = ("--record", str(reports / "settings.json"))
    if command.workers is None:
        launch = (sys.executable, *launcher_words())
        words = [*launch, *launcher, "--", *command.as_python_words()]
    else:
        words = with_launcher(command, command.workers, launcher)
    launched = Launched(words, command.environment)
    written = Path(settings.folder) / JOB_FILE
    with launched.signals_passed_on():
        status = launched.wait(time.monotonic() + timeout_s, written.exists)
        if written.exists() and status is None:
            patience_s = STOPPING_S if settings.stop else float("inf")
            status = launched.wait(time.monotonic() + patience_s, lambda: False)
            if status is None:
                launched.end()
                status = 0
        elif status is None:
            problem = f"nothing was recorded within {timeout_s:g} s (--timeout)"
            message = _failure_text(launched, reports, problem, command)
            launched.end()  # output after this is about the end
            raise LaunchError(message)
    if not written.exists():
        problem = f"nothing was recorded, and the script ended with status {status}"
        raise LaunchError(_failure_text(launched, reports, problem, command))
    return 0 if settings.stop else shell_status(status)


def _failure_text(launched: Launched, reports: Path, problem: str, command: ScriptCommand) -> str:
    """The problem with the ranks' own reports; without any, with the end of the output."""
    by_rank = {
        report["rank"]: report
        for report in (
            json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(reports.glob("rank*.report.json"))
        )
    }
    problems = [report["problem"] for report in by_rank.values() if "problem" in report]
    # A rank that ends breaks the connections of the others; another message names the cause.
    causes = [text for text in problems if "onnection" not in text]
    lines = list(dict.fromkeys(causes or problems))
    ranks = command.workers or 1
    if lines and (causes or len(by_rank) == ranks):
        reasons = "; ".join(lines[:3])
        return f"{problem}: {launcher_needed(reasons)}{reasons}"
    silent = [str(rank) for rank in range(ranks) if rank not in by_rank and command.nodes == 1]
    quiet = f"; rank {', '.join(silent)} reported nothing" if silent else ""
    first = "".join(f"; {line}" for line in lines[:1])
    return f"{problem}{quiet}{first}; {launched.last_output()}"
