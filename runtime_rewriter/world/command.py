"""Reading the user's launch command: what the script is, and how many workers it wants.

`torchrun ... train.py args` is read by torch's own argument parser, so every option it knows is understood.
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
    """`target` is a script's path, or a module's name if `is_module`.

    `workers` is None where the command does not say (a bare `train.py`). `torchrun_options` are the words
    between `torchrun` and the script, kept for `autotune run`. `nodes` is torchrun's --nnodes (of a range: the most).
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool
    workers: int | None
    torchrun_options: tuple[str, ...] = ()
    nodes: int = 1

    @property
    def name(self) -> str:
        """A short name for people: `train` of `path/train.py`."""
        return self.target.rsplit(".", 1)[-1] if self.is_module else Path(self.target).stem

    def as_python_words(self) -> tuple[str, ...]:
        """The words after `python` that run it."""
        return (
            ("-m", self.target, *self.arguments)
            if self.is_module
            else (self.target, *self.arguments)
        )


def read_command(words: Sequence[str]) -> ScriptCommand:
    """`torchrun [options] script args`, `python [-m] script args` or `script.py args`; raises `InvalidInput`."""
    if not words:
        raise InvalidInput(
            "a command is needed after --, for example: -- torchrun --nproc-per-node 2 train.py"
        )
    first, rest = Path(words[0]).name, list(words[1:])
    if first == "torchrun":
        command = _read_torchrun(rest)
    elif first.startswith("python"):
        while rest and rest[0] in ("-u", "-O", "-B"):  # make no difference to what is run
            rest = rest[1:]
        command = (
            _read_torchrun(rest[2:])
            if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _TORCHRUN_MODULES
            else _read_python(rest)
        )
    elif first.endswith(".py"):
        command = ScriptCommand(words[0], tuple(rest), False, None)
    else:
        raise InvalidInput(
            f"the command must start with torchrun, python or a script.py, but starts with {words[0]!r}"
        )
    if not command.is_module and not Path(command.target).is_file():
        raise InvalidInput(
            f"the training script must be a file, but {command.target!r} is not found from {Path.cwd()}"
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
    script_words = [options.training_script, *options.training_script_args]
    before = words[: len(words) - len(script_words)]
    kept = tuple(word for word in before if word not in ("-m", "--module"))
    return ScriptCommand(
        options.training_script,
        tuple(options.training_script_args),
        bool(options.module),
        workers,
        kept,
        nodes,
    )


def torchrun_with_launcher(
    command: ScriptCommand, workers: int, launcher_words: Sequence[str]
) -> list[str]:
    """The argv that runs `command` through torchrun (with `workers`, where it names none) with our launcher before the script."""
    options = command.torchrun_options or ("--standalone", "--nproc-per-node", str(workers))
    return [
        *(sys.executable, "-m", "torch.distributed.run", *options),
        *("-m", "runtime_rewriter.rank.launch", *launcher_words, "--", *command.as_python_words()),
    ]
