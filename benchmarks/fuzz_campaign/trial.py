"""Tries one input: through its reader in this process, or through the command line in a fork."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.fuzz_campaign.inputs import emptied, seeded, write_input
from benchmarks.fuzz_campaign.outcomes import Outcome, Result
from benchmarks.fuzz_campaign.readers import BY_NAME, FOLDER, Reader

LIMIT_S = 20.0
LIMIT_BYTES = 2 * 2**30
"""An input may take this much time, and memory beyond what the loaded program has."""
COMMAND_LINE = "cli."
"""Prefix of a reader's name for inputs that go through its command."""
_DETAIL_LINES = 6


def reader_of(name: str) -> Reader:
    return BY_NAME[name.removeprefix(COMMAND_LINE)]


def try_input(name: str, seed: int, number: int, folder: Path) -> Result:
    """Write the input into `folder` and read it; never raises for a fault of a reader."""
    reader, key = reader_of(name), f"{name}:{number}"
    write_input(reader, seeded(seed, name, number), emptied(folder))
    began_s = time.perf_counter()
    if name.startswith(COMMAND_LINE):
        outcome, detail = _through_command(reader, folder)
    else:
        outcome, detail = _through_reader(reader, folder)
    seconds = time.perf_counter() - began_s
    return Result(key, Outcome.HANG if seconds > LIMIT_S else outcome, detail, seconds)


def warm(name: str, folder: Path) -> None:
    """Read the valid sample, which loads every module that the reader needs."""
    reader = reader_of(name)
    for file, content in reader.sample().items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    reader.read(folder)
    if name.startswith(COMMAND_LINE):
        _load_command(reader)


def limit_memory() -> None:
    """Let this process's address space grow by `LIMIT_BYTES` from now on."""
    gc.collect()
    limit = _address_space_bytes() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _through_reader(reader: Reader, folder: Path) -> tuple[Outcome, str]:
    from autotune.errors import AutotuneError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # numpy: overflow, invalid value
            reader.read(folder)
    except AutotuneError:
        return Outcome.REFUSED, ""
    except MemoryError:
        return Outcome.OVER_MEMORY, _end_of_traceback()
    except Exception:  # noqa: BLE001 - every other exception is the fault that is looked for
        return Outcome.TRACEBACK, _end_of_traceback()
    return Outcome.ACCEPTED, ""


def _end_of_traceback() -> str:
    lines = traceback.format_exc(limit=-_DETAIL_LINES).strip().splitlines()
    return "\n".join(line[:200] for line in lines)


def _load_command(reader: Reader) -> None:
    from autotune.cli import argument_parser

    argument_parser(reader.words[:1])


def _through_command(reader: Reader, folder: Path) -> tuple[Outcome, str]:
    """Fork, and run the console script's entry point on the words of the reader."""
    words = [word.replace(FOLDER, str(folder)) for word in reader.words]
    stderr_path = folder.with_name(f"{folder.name}.stderr")
    child = os.fork()
    if child == 0:
        _run_command(words, stderr_path)
    status = _wait(child, LIMIT_S)
    if status is None:
        return Outcome.HANG, " ".join(words)
    stderr = stderr_path.read_text(errors="replace")
    if "MemoryError" in stderr:
        return Outcome.OVER_MEMORY, stderr[-1500:]
    if status not in (0, 1, 2) or re.search(r"^Traceback|Warning:", stderr, re.MULTILINE):
        return Outcome.TRACEBACK, f"exit status {status}: {stderr[-1500:]}"
    return (Outcome.ACCEPTED if status == 0 else Outcome.REFUSED), ""


def _run_command(words: list[str], stderr_path: Path) -> None:
    """Never returns: what the interpreter does with the console script, in this process."""
    status = 1
    try:
        with _redirected(Path(os.devnull), stderr_path):
            from autotune.cli import main

            sys.argv = ["autotune", *words]
            try:
                status = main()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            except BaseException:  # noqa: BLE001 - as the interpreter prints it
                traceback.print_exc()
    finally:
        os._exit(status)


@contextmanager
def _redirected(stdout_path: Path, stderr_path: Path) -> Iterator[None]:
    """Send both streams of the process to files; Python's are flushed at the end."""
    for stream, path in ((sys.stdout, stdout_path), (sys.stderr, stderr_path)):
        stream.flush()
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _wait(child: int, limit_s: float) -> int | None:
    """The exit status; None if the child had to be killed."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
