"""Reads the user's launch command: the script, and its number of workers.

Torch's own argument parser reads `torchrun ... train.py args`, so that all its options are known.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import InvalidInput

_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True)
class ScriptCommand:
    """A training script and how it is started.

    target: a script's path, or a module's name if `is_module`.
    workers: None if the command does not specify them (a bare `train.py`).
    torchrun_options: the words between `torchrun` and the script, for `autotune run`.
    nodes: torchrun's --nnodes (the largest of a range).
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool
    workers: int | None
    torchrun_options: tuple[str, ...] = ()
    nodes: int = 1

    @property
    def name(self) -> str:
        """A short name for people: `train` for `path/train.py`."""
        return self.target.rsplit(".", 1)[-1] if self.is_module else Path(self.target).stem

    def as_python_words(self) -> tuple[str, ...]:
        """The words after `python` that run the script."""
        module = ("-m",) if self.is_module else ()
        return (*module, self.target, *self.arguments)


def read_command(words: Sequence[str]) -> ScriptCommand:
    """Read `torchrun [options] script args`, `python [-m] script args` or `script.py args`.

    Raises `InvalidInput`.
    """
    if not words:
        raise InvalidInput(
            "a command is needed after --, for example: -- torchrun --nproc-per-node 2 train.py"
        )
    first, rest = Path(words[0]).name, list(words[1:])
    if first == "torchrun":
        command = _read_torchrun(rest)
    elif first.startswith("python"):
        while rest and rest[0] in ("-u", "-O", "-B"):  # do not change what is run
            rest = rest[1:]
        is_torchrun = rest[:1] == ["-m"] and rest[1:2] and rest[1] in _TORCHRUN_MODULES
        command = _read_torchrun(rest[2:]) if is_torchrun else _read_python(rest)
    elif first.endswith(".py"):
        command = ScriptCommand(words[0], tuple(rest), False, None)
    else:
        raise InvalidInput(
            "the command must start with torchrun, python or a script.py, but starts with "
            f"{words[0]!r}"
        )
    if not command.is_module and not Path(command.target).is_file():
        raise InvalidInput(
            f"the training script must be a file, but {command.target!r} is not found from "
            f"{Path.cwd()}"
        )
    return command


def _read_python(words: list[str]) -> ScriptCommand:
    if words[:1] == ["-m"] and len(words) > 1:
        return ScriptCommand(words[1], tuple(words[2:]), True, None)
    if not words or words[0].startswith("-"):
        raise InvalidInput(
            f"python needs a script or -m module after it, but has {' '.join(words) or 'nothing'!r}"
        )
    return ScriptCommand(words[0], tuple(words[1:]), False, None)


def _read_torchrun(words: list[str]) -> ScriptCommand:
    from torch.distributed.run import determine_local_world_size, get_args_parser

    parser = get_args_parser()

    def refuse(message: str) -> None:
        raise InvalidInput(f"torchrun does not understand its options: {message}")

    parser.error = refuse  # type: ignore[assignment, method-assign]
    options = parser.parse_args(words)
    try:
        nodes = int(str(options.nnodes).split(":")[-1])
        workers = nodes * determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        raise InvalidInput(
            f"torchrun needs numbers for --nnodes and --nproc-per-node: {error}"
        ) from error
    before = words[: len(words) - 1 - len(options.training_script_args)]
    return ScriptCommand(
        target=options.training_script,
        arguments=tuple(options.training_script_args),
        is_module=bool(options.module),
        workers=workers,
        torchrun_options=tuple(word for word in before if word not in ("-m", "--module")),
        nodes=nodes,
    )


def torchrun_with_launcher(
    command: ScriptCommand, workers: int, launcher_words: Sequence[str]
) -> list[str]:
    """The argv that runs `command` by torchrun, with our launcher before the script.

    `workers` is used if the command specifies none.
    """
    options = command.torchrun_options or ("--standalone", "--nproc-per-node", str(workers))
    return [
        *(sys.executable, "-m", "torch.distributed.run", *options),
        *("-m", "runtime_rewriter.rank.launch", *launcher_words, "--", *command.as_python_words()),
    ]
