"""A training script and how the user starts it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ScriptCommand:
    """A training script and how it is started.

    target: a script's path, or a module's name if `is_module`.
    workers: None if the command does not specify them (a bare `train.py`).
    torchrun_options: the words between `torchrun` and the script, for `autotune run`.
    nodes: torchrun's --nnodes (the largest of a range).
    rendezvous: the address at which the launchers of several nodes meet; "" if none is given.
    environment: variables that the command sets for its ranks.
    mpirun_words: `mpirun`, its options, and `env` with the variables that follow them, for
    `autotune run`; the ranks expect Open MPI's variables then.
    horovodrun_words: `horovodrun` and its options, likewise. It passes its environment on.
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool
    workers: int | None
    torchrun_options: tuple[str, ...] = ()
    nodes: int = 1
    rendezvous: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    mpirun_words: tuple[str, ...] = ()
    horovodrun_words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A short name for people: `train` for `path/train.py`."""
        return self.target.rsplit(".", 1)[-1] if self.is_module else Path(self.target).stem

    def as_python_words(self) -> tuple[str, ...]:
        """The words after `python` that run the script."""
        module = ("-m",) if self.is_module else ()
        return (*module, self.target, *self.arguments)
