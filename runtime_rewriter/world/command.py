"""Reads the user's launch command; `launchers.py` reads the launchers before the script."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.files import is_file
from runtime_rewriter.world import launchers
from runtime_rewriter.world.horovodrun import read_horovodrun
from runtime_rewriter.world.interpreters import refuse_other_interpreter
from runtime_rewriter.world.script_command import ScriptCommand
from runtime_rewriter.world.starting import launcher_words


def read_command(words: Sequence[str]) -> ScriptCommand:
    """Read `[env A=1] [uv run] LAUNCHER [options] script args` or `script.py args`.

    LAUNCHER: torchrun, accelerate launch, horovodrun, mpirun, python, or the modules of torchrun
    and accelerate after `python -m`.
    Raises `InvalidInput`, also for a path or version of another Python than ours.
    """
    if not words:
        raise InvalidInput(
            "a command is needed after --, for example: -- torchrun --nproc-per-node 2 train.py"
        )
    command = _read(list(words))
    if not command.is_module and not is_file(Path(command.target)):
        raise InvalidInput(
            f"the training script must be a file, but {command.target!r} is not found from "
            f"{Path.cwd()}"
        )
    return command


def _read(words: list[str]) -> ScriptCommand:
    first, rest = Path(words[0]).name if words else "", words[1:]
    if first == "env":
        variables, rest = launchers.read_env(rest)
        command = _read(rest)
        return replace(command, environment={**variables, **command.environment})
    if first == "uv":
        return _read(launchers.without_uv(rest))
    if first.startswith(("python", "torchrun", "accelerate")):
        refuse_other_interpreter(words[0])
    if first == "torchrun":
        return launchers.read_torchrun(rest)
    if first == "accelerate" and rest[:1] == ["launch"]:
        return launchers.read_accelerate(rest[1:])
    if first == "accelerate-launch":
        return launchers.read_accelerate(rest)
    if first in _STARTS_RANKS:
        return _STARTS_RANKS[first](words)
    if first.startswith("python"):
        while rest and rest[0] in ("-u", "-B"):  # do not change what is run
            rest = rest[1:]
        module = rest[1] if rest[:1] == ["-m"] and len(rest) > 1 else ""
        if module in launchers.MODULES:
            return launchers.MODULES[module](rest[2:])
        return _of_python(rest)
    if first.endswith(".py"):
        return ScriptCommand(words[0], tuple(rest), False, None)
    raise InvalidInput(launchers.refusal(first, words))


def _of_python(words: list[str]) -> ScriptCommand:
    if words[:1] == ["-m"] and len(words) > 1:
        return ScriptCommand(words[1], tuple(words[2:]), True, None)
    if not words or words[0].startswith("-"):
        raise InvalidInput(
            f"python needs a script or -m module after it, but has {' '.join(words) or 'nothing'!r}"
            "; set its options by variables of the ranks, such as env PYTHONOPTIMIZE=1 python ... "
            "for -O"
        )
    return ScriptCommand(words[0], tuple(words[1:]), False, None)


def _of_mpirun(words: list[str]) -> ScriptCommand:
    options, variables, workers, rest = launchers.read_mpirun(words[1:])
    if ":" in rest:
        raise InvalidInput(
            "mpirun must start one script on all ranks, but after ':' it starts another one: "
            f"{' '.join(words)!r}"
        )
    command = _started_by("mpirun", workers, rest)
    # Open MPI gives its own environment to the ranks of its host only.
    assigned = [f"{name}={value}" for name, value in command.environment.items()]
    return replace(
        command,
        environment={**variables, **command.environment},
        mpirun_words=(words[0], *options, *(("env", *assigned) if assigned else ())),
    )


def _of_horovodrun(words: list[str]) -> ScriptCommand:
    options, variables, workers, rest = read_horovodrun(words[1:])
    command = _started_by("horovodrun", workers, rest)
    return replace(
        command,
        environment={**variables, **command.environment},
        horovodrun_words=(words[0], *options),
    )


_STARTS_RANKS = {"mpirun": _of_mpirun, "mpiexec": _of_mpirun, "horovodrun": _of_horovodrun}


def _started_by(launcher: str, workers: int, words: list[str]) -> ScriptCommand:
    command = _read(words)
    if command.workers is not None:
        raise InvalidInput(
            f"{launcher} must start the script itself, but starts another launcher: "
            f"{' '.join(words)!r}; leave out one of them"
        )
    return replace(command, workers=workers)


def at_any_port(command: ScriptCommand) -> ScriptCommand:
    """The command of one node, whose ranks meet at a free port, so that it can run twice at once.

    torchrun then ignores its --master-addr, --master-port and --rdzv-* options, but --rdzv-conf.
    """
    options = command.torchrun_options
    if not options or "--standalone" in options:
        return command
    return replace(command, torchrun_options=("--standalone", *options))


def with_launcher(command: ScriptCommand, workers: int, mode: Sequence[str]) -> list[str]:
    """The argv that runs `command` on all its ranks, with our launcher in `mode` before the script.

    `workers` is used if the command specifies none. `command.environment` must be in the
    environment.
    """
    launcher = (*launcher_words(), *mode, "--", *command.as_python_words())
    own_launcher = command.mpirun_words or command.horovodrun_words
    if own_launcher:
        return [*own_launcher, sys.executable, "-u", *launcher]
    options = command.torchrun_options or (
        "--standalone",
        *("--nproc-per-node", str(command.workers or workers)),
    )
    return [sys.executable, "-m", "torch.distributed.run", *options, *launcher]


def launcher_threads(command: ScriptCommand, on_host: int) -> dict[str, str]:
    """The number of threads that the launcher of `with_launcher` gives each of the `on_host` ranks
    of a host by default.

    torchrun starts several ranks per host with one thread each. Other launchers set none.
    """
    own_launcher = command.mpirun_words or command.horovodrun_words
    return {} if own_launcher or on_host < 2 else {"OMP_NUM_THREADS": "1"}
