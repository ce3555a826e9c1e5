"""Runs the user's unmodified script with our synchronizer in its `DistributedDataParallel`.

`start.py` runs it with the words `MODE -- script.py args`, where MODE is one of

- `--control FD`: the tuner steers the script (one process per rank, started by a supervisor);
- `--strategy best.json`: the exported strategy is applied, and training goes on. A `--report FILE`
  gets a line from each rank that has applied it;
- `--record settings.json`: some steps are recorded;
- `--check settings.json`: what-ifs are enacted, and the script runs in turns with another one.

A tuned rank reads these environment variables: AUTOTUNE_ROUND_ROBIN=1 requests round-robin
scheduling, AUTOTUNE_BYTE_SCALE=K messages with 1/K of their bytes, AUTOTUNE_FILE_VIEW a view of
files, AUTOTUNE_KEEPS_TRAINING=1 a training that goes on after the trials, AUTOTUNE_STEP_TIMEOUT=S
a driver that waits S seconds for a step.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import ctypes
import os
import runpy
import signal
import socket
import sys
import traceback
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from autotune.records import FailureKind
from runtime_rewriter.active import Session, active_session
from runtime_rewriter.control import ControlClosed, ControlLine
from runtime_rewriter.failures import kind_of_exception
from runtime_rewriter.rank.ending import describe, exit_now
from runtime_rewriter.rendezvous import Peers
from runtime_rewriter.scheduling import BYTE_SCALE, ROUND_ROBIN, take_round_robin


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="runtime_rewriter.rank.launch")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--control", type=int)
    mode.add_argument("--strategy", type=Path)
    mode.add_argument("--record", type=Path)
    mode.add_argument("--check", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if options.control is not None:
        _die_with_parent()
        return _run_tuned(_own_line(options.control), words)
    if options.record is not None:
        return _run_recorded(options.record, words)
    if options.check is not None:
        _die_with_parent()
        return _run_checked(options.check, words)
    return _run_exported(options.strategy, options.report, words)


def _own_line(descriptor: int) -> ControlLine:
    """The line to the supervisor.

    The script's children must not hold it: they may outlive this process.
    """
    end = socket.socket(fileno=descriptor)
    end.set_inheritable(False)
    line = ControlLine(end)
    os.register_at_fork(after_in_child=line.close)
    return line


def _run_tuned(line: ControlLine, words: list[str]) -> int:
    round_robin = _under_round_robin()  # before torch starts its threads: they inherit it
    from runtime_rewriter.protocol import KEEPS_TRAINING, STEP_TIMEOUT, RankFailed
    from runtime_rewriter.rank.activities import NumericsFailure
    from runtime_rewriter.rank.session import TuningSession

    kept = os.environ.pop(KEEPS_TRAINING, "") == "1"
    session = TuningSession(
        line,
        round_robin,
        float(os.environ.get(BYTE_SCALE, "1")),
        kept,
        float(os.environ.pop(STEP_TIMEOUT, "0")),
    )
    failure: RankFailed | None = None
    status = 1
    try:
        with _steered_by(session, tuned=not kept):
            _run_script(words)
    except SystemExit as end:
        if end.code not in (None, 0):
            failure = RankFailed(FailureKind.CRASH, f"the script ended with {end.code!r}")
            status = end.code if isinstance(end.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - every end of the user's script is reported, not swallowed
        numerics = isinstance(error, NumericsFailure)
        kind = FailureKind.NUMERICS if numerics else kind_of_exception(error)
        failure = RankFailed(kind, describe(error))
        traceback.print_exc()
    with contextlib.suppress(ControlClosed):  # the supervisor may be gone: nobody waits then
        session.finish(failure)
    if kept:  # the script's exit handlers run
        return status if failure else 0
    exit_now(1 if failure else 0)


def _under_round_robin() -> bool:
    """Run round-robin if the environment requests it; without permission, only warn."""
    if os.environ.get(ROUND_ROBIN) != "1":
        return False
    taken = take_round_robin()
    if not taken and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            "autotune: round-robin scheduling is not permitted here (it needs root or "
            "CAP_SYS_NICE); "
            "going on without\n"
        )
    return taken


def _run_exported(strategy: Path, report: Path | None, words: list[str]) -> int:
    from runtime_rewriter.rank.exported import ExportSession

    session = ExportSession(strategy, report)
    session.require_model()
    with _steered_by(session):
        _run_script(words)
    return 0


def _run_checked(settings: Path, words: list[str]) -> int:
    """Run the script with changes, in turns. Another process measures, and ends it."""
    from runtime_rewriter.changes.settings import CheckSettings
    from runtime_rewriter.changes.turns import taking_turns

    with taking_turns(CheckSettings.read(settings)):
        _run_script(words)
    return 0


def _run_recorded(settings: Path, words: list[str]) -> int:
    """Record the script until its own end, unless the recording ends it."""
    _die_with_parent()
    from runtime_rewriter.recording.session import RecordingSession
    from runtime_rewriter.recording.settings import RecordSettings

    session = RecordingSession(RecordSettings.read(settings))
    try:
        with _steered_by(session), session.watching_end():
            try:
                _run_script(words)
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
            session.script_ended()
    except BaseException as error:
        if session.written and not session.settings.stop:
            raise  # how a recorded script ends is its own affair
        session.report(
            error,
            f"the script ended with {error.code!r}"
            if isinstance(error, SystemExit)
            else describe(error),
        )
        traceback.print_exc()
        exit_now(1)
    if session.settings.stop:
        exit_now(0)
    return 0


@contextlib.contextmanager
def _steered_by(session: Session, tuned: bool = False) -> Iterator[None]:
    """Let `session` steer the models that the script builds.

    `tuned`: the driver starts the script again if a rank waits too long for another one.
    """
    from runtime_rewriter.horovod.tensorflow_scripts import tensorflow_horovod_steered
    from runtime_rewriter.horovod.torch_scripts import horovod_steered
    from runtime_rewriter.mirrored.scripts import mirrored_steered
    from runtime_rewriter.pytorch.ddp import replaced_ddp
    from runtime_rewriter.rank.keras_scripts import keras_steered
    from runtime_rewriter.rank.own_ranks import spawned_ranks_controlled

    waits = session.timeouts
    ddp = replaced_ddp(session, timeout_s=waits.message_s, agreement_timeout_s=waits.agreement_s)
    horovod = horovod_steered(session, waits, tuned)
    tensorflow = tensorflow_horovod_steered(session, waits)
    mirrored = mirrored_steered(partial(_steer_mirrored, session))
    keras, spawned = keras_steered(), spawned_ranks_controlled()
    with ddp, horovod, tensorflow, mirrored, keras, spawned, active_session(session):
        yield


def _steer_mirrored(session: Session, until_end: contextlib.ExitStack, peers: Peers) -> None:
    """TensorFlow is imported: the script has built a strategy of it."""
    from runtime_rewriter.rank.mirrored_model import steer_mirrored

    steer_mirrored(session, until_end, peers)


def _run_script(words: list[str]) -> None:
    """Run the script as `python words` would: with its `sys.argv`, `sys.path[0]` and `__main__`."""
    is_module = words[0] == "-m"
    if not sys.flags.safe_path:
        folder = Path.cwd() if is_module else Path(words[0]).resolve().parent
        sys.path.insert(0, str(folder))
    if is_module:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        if Path(words[0]).is_file() and not zipfile.is_zipfile(words[0]):
            _run_file(str(Path(words[0]).absolute()))
        else:
            runpy.run_path(words[0], run_name="__main__")


def _run_file(path: str) -> None:
    """Run a file as `__main__`, by its absolute path as Python does, and to the process's end.

    `runpy.run_path` names the module's file as it is given, and puts our own `__main__` back, while
    threads and exit handlers of the script may still need theirs. Python caches no main script, as
    a cached one may be that of before an edit.
    """
    loader = SourceFileLoader("__main__", path)
    module = ModuleType("__main__")
    vars(module).update(__file__=path, __loader__=loader, __builtins__=builtins)
    code = loader.source_to_code(loader.get_data(path), path)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this process when its supervisor dies, even by kill -9.

    On other systems the closed control line ends it at the next boundary.
    """
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1  # <sys/prctl.h>
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
