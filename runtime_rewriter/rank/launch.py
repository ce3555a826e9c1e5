"""`python -m runtime_rewriter.rank.launch (--control FD | --strategy best.json | --record settings.json) -- script.py args`

Runs the user's unmodified script as `__main__` with our synchronizer where it builds `DistributedDataParallel`.
With `--control` the tuner steers it (one process per rank, started by a supervisor); with `--strategy` the
exported strategy is applied and training simply goes on; with `--record` some steps are recorded.

A tuned rank reads two variables of its environment: AUTOTUNE_ROUND_ROBIN=1 asks for round-robin scheduling,
AUTOTUNE_BYTE_SCALE=K for messages that carry 1/K of their bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.records import FailureKind
from runtime_rewriter.control import ControlClosed, ControlLine
from runtime_rewriter.failures import kind_of_exception
from runtime_rewriter.rank.active import active_session
from runtime_rewriter.scheduling import BYTE_SCALE, ROUND_ROBIN, take_round_robin

MESSAGE_CHARACTERS = 6000


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="runtime_rewriter.rank.launch")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--control", type=int)
    what.add_argument("--strategy", type=Path)
    what.add_argument("--record", type=Path)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if options.control is not None:
        _die_with_parent()
        return _run_tuned(_own_line(options.control), words)
    return (
        _run_exported(options.strategy, words)
        if options.record is None
        else _run_recorded(options.record, words)
    )


def _own_line(descriptor: int) -> ControlLine:
    """The line to the supervisor. The script's children must not hold it: they may outlive this process."""
    end = socket.socket(fileno=descriptor)
    end.set_inheritable(False)
    line = ControlLine(end)
    os.register_at_fork(after_in_child=line.close)
    return line


def _run_tuned(line: ControlLine, words: list[str]) -> int:
    round_robin = _under_round_robin()  # before torch starts its threads: they inherit it
    from runtime_rewriter.pytorch.ddp import replaced_ddp
    from runtime_rewriter.rank.session import NumericsFailure, TuningSession

    session = TuningSession(line, round_robin, float(os.environ.get(BYTE_SCALE, "1")))
    failed: dict[str, str] | None = None
    try:
        waits = session.timeouts
        with (
            replaced_ddp(session, timeout_s=waits.message_s, agreement_timeout_s=waits.agreement_s),
            active_session(session),
        ):
            _run_script(words)
    except SystemExit as end:
        if end.code not in (None, 0):
            failed = {
                "kind": FailureKind.CRASH.value,
                "message": f"the script ended with {end.code!r}",
            }
    except BaseException as error:  # noqa: BLE001 - whatever ends the user's script is reported, not swallowed
        kind = (
            FailureKind.NUMERICS if isinstance(error, NumericsFailure) else kind_of_exception(error)
        )
        failed = {"kind": kind.value, "message": _describe(error)}
        traceback.print_exc()
    with contextlib.suppress(
        ControlClosed
    ):  # the supervisor may be gone: then nobody waits for the word
        line.send(
            {"event": "failed", **failed} if failed else {"event": "ended", "steps": session.steps}
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # Communicator threads may be waiting for ranks that are gone; an orderly interpreter shutdown would join them.
    os._exit(1 if failed else 0)


def _under_round_robin() -> bool:
    """As the environment asks; where it is not permitted the rank goes on without and says so."""
    if os.environ.get(ROUND_ROBIN) != "1":
        return False
    taken = take_round_robin()
    if not taken and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            "autotune: round-robin scheduling is not permitted here (it needs root or CAP_SYS_NICE); going on without\n"
        )
    return taken


def _run_exported(strategy: Path, words: list[str]) -> int:
    from runtime_rewriter.pytorch.ddp import replaced_ddp
    from runtime_rewriter.rank.exported import ExportSession

    session = ExportSession(strategy)
    waits = session.timeouts
    with (
        replaced_ddp(session, timeout_s=waits.message_s, agreement_timeout_s=waits.agreement_s),
        active_session(session),
    ):
        _run_script(words)
    return 0


def _run_recorded(settings: Path, words: list[str]) -> int:
    """The script's own end, whatever it is, unless the recording ends it."""
    _die_with_parent()
    from runtime_rewriter.pytorch.ddp import replaced_ddp
    from runtime_rewriter.recording.session import RecordingSession
    from runtime_rewriter.recording.settings import RecordSettings

    session = RecordingSession(RecordSettings.read(settings))
    waits = session.timeouts
    places = replaced_ddp(session, timeout_s=waits.message_s, agreement_timeout_s=waits.agreement_s)
    try:
        with places, session.watching_end(), active_session(session):
            try:
                _run_script(words)
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
            session.script_ended()
    except BaseException as error:  # noqa: BLE001 - whatever ends the user's script is reported, not swallowed
        session.report(
            error,
            _describe(error)
            if not isinstance(error, SystemExit)
            else f"the script ended with {error.code!r}",
        )
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # threads of a process group may wait for ranks that are gone
    if session.settings.stop:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _run_script(words: list[str]) -> None:
    """As `python words` would: `sys.argv`, `sys.path[0]` and `__main__` are what the script expects."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _describe(error: BaseException) -> str:
    """The error and where in the user's own files it came from; our frames and the frameworks' are left out."""
    if isinstance(error, AutotuneError):
        return str(error)
    ours = Path(__file__).parents[1]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not Path(frame.filename).is_relative_to(ours)
        and not frame.filename.startswith("<frozen")
    ]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"[:MESSAGE_CHARACTERS]


def _die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this process when its supervisor dies, even by kill -9."""
    with contextlib.suppress(
        OSError, AttributeError
    ):  # elsewhere the closed control line ends it at the next boundary
        pr_set_pdeathsig = 1  # <sys/prctl.h>
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
