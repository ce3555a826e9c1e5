"""Refuses a command that asks for another Python than the one that starts the script."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from autotune.errors import InvalidInput

_VERSION = re.compile(r"python(\d+)(?:\.(\d+))?$", flags=re.ASCII)
_LONGEST_FIRST_LINE = 4096
"""Bytes; longer than any path that Linux starts (PATH_MAX)."""


def refuse_other_interpreter(word: str) -> None:
    """Raise `InvalidInput` if `word`, python or a Python launcher, is of another environment.

    The script runs under the Python of this process. A plain name means just that; a version must
    be its version, and a path must lead to it.
    """
    name = Path(word).name
    if version := _VERSION.match(name):
        ours = (sys.version_info.major, sys.version_info.minor)
        asked = tuple(int(number) for number in version.groups() if number is not None)
        if asked != ours[: len(asked)]:
            raise InvalidInput(
                f"the script runs under autotune's own Python, {sys.executable} "
                f"({ours[0]}.{ours[1]}), but the command names {name}; "
                "install autotune for that version and start it from there"
            )
    if "/" not in word:
        return
    asked_for = _interpreter_of(Path(word))
    if _environment(asked_for) != _environment(Path(sys.executable)):
        raise InvalidInput(
            f"the script runs under autotune's own Python, {sys.executable}, but the command names "
            f"{word}; install autotune in that environment and start it from there, or, if "
            f"the script needs no other, write {name} without its folder"
        )


def _environment(interpreter: Path) -> Path:
    """The folder of an interpreter: that of a virtual environment differs from its base's."""
    return interpreter.absolute().parent.resolve()


def _interpreter_of(program: Path) -> Path:
    """The Python in the first line of a launcher, or the program itself."""
    try:
        with program.open("rb") as file:
            first_line = file.readline(_LONGEST_FIRST_LINE)
    except OSError:
        return program
    if not first_line.startswith(b"#!"):
        return program
    words = first_line[2:].decode(errors="replace").split()
    named = Path(words[0]) if words else program
    return named if named.name.startswith("python") else program
