"""The user's launch command: the script, its number of workers, and how it is started.

`launchers.py` reads the launchers before the script.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.errors import InvalidInput
from runtime_rewriter.world import launchers
from runtime_rewriter.world.starting import launcher_words


@dataclass(frozen=True)
class ScriptCommand:
    """A training script and how it is started.

    target: a script's path, or a module's name if `is_module`.
    workers: None if the command does not specify them (a bare `train.py`).
    torchrun_options: the words between `torchrun` and the script, for `autotune run`.
    nodes: torchrun's --nnodes (the largest of a range).
    environment: variables that the command sets for its ranks.
    mpirun_words: `mpirun` and its options, for `autotune run`; the ranks expect Open MPI's
    variables then.
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool
    workers: int | None
    torchrun_options: tuple[str, ...] = ()
    nodes: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    mpirun_words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A short name for people: `train` for `path/train.py`."""
        return self.target.rsplit(".", 1)[-1] if self.is_module else Path(self.target).stem

    def as_python_words(self) -> tuple[str, ...]:
        """The words after `python` that run the script."""
        module = ("-m",) if self.is_module else ()
        return (*module, self.target, *self.arguments)


def read_command(words: Sequence[str]) -> ScriptCommand:
    """Read `[env A=1] [uv run] LAUNCHER [options] script args` or `script.py args`.

    LAUNCHER: torchrun, accelerate launch, mpirun, python, or their modules after `python -m`.
    Raises `InvalidInput`.
    """
    if not words:
        raise InvalidInput(
            "a command is needed after --, for example: -- torchrun --nproc-per-node 2 train.py"
        )
    command = _read(list(words))
    if not command.is_module and not Path(command.target).is_file():
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
    if first == "torchrun":
        return _of_torchrun(rest)
    if first == "accelerate" and rest[:1] == ["launch"]:
        return _of_accelerate(rest[1:])
    if first == "accelerate-launch":
        return _of_accelerate(rest)
    if first in ("mpirun", "mpiexec"):
        return _of_mpirun(words)
    if first.startswith("python"):
        while rest and rest[0] in ("-u", "-O", "-B"):  # do not change what is run
            rest = rest[1:]
        module = rest[1] if rest[:1] == ["-m"] and len(rest) > 1 else None
        if module in launchers.TORCHRUN_MODULES:
            return _of_torchrun(rest[2:])
        if module == launchers.ACCELERATE_MODULE:
            return _of_accelerate(rest[2:])
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
        )
    return ScriptCommand(words[0], tuple(words[1:]), False, None)


def _of_torchrun(words: list[str]) -> ScriptCommand:
    read = launchers.read_torchrun(words)
    return ScriptCommand(
        read.script, read.arguments, read.is_module, read.workers, read.options, read.nodes
    )


def _of_accelerate(words: list[str]) -> ScriptCommand:
    read = launchers.read_accelerate(words)
    return ScriptCommand(
        read.script,
        read.arguments,
        read.is_module,
        read.workers,
        nodes=read.nodes,
        environment=read.environment,
    )


def _of_mpirun(words: list[str]) -> ScriptCommand:
    options, variables, workers, rest = launchers.read_mpirun(words[1:])
    command = _read(rest)
    if command.workers is not None:
        raise InvalidInput(
            "mpirun must start the script itself, but starts another launcher: "
            f"{' '.join(rest)!r}; leave out one of them"
        )
    return replace(
        command,
        workers=workers,
        environment={**variables, **command.environment},
        mpirun_words=(words[0], *options),
    )


def with_launcher(command: ScriptCommand, workers: int, mode: Sequence[str]) -> list[str]:
    """The argv that runs `command` on all its ranks, with our launcher in `mode` before the script.

    `workers` is used if the command specifies none. `command.environment` must be in the
    environment.
    """
    launcher = (*launcher_words(), *mode, "--", *command.as_python_words())
    if command.mpirun_words:
        return [*command.mpirun_words, sys.executable, "-u", *launcher]
    options = command.torchrun_options or (
        "--standalone",
        *("--nproc-per-node", str(command.workers or workers)),
    )
    return [sys.executable, "-m", "torch.distributed.run", *options, *launcher]
