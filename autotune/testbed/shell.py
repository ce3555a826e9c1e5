"""Runs `ip` and `tc`, and says which command failed and why."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import EmulationError

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Attempt:
    """What a command printed, and in one line why it failed; `reason` is empty where it did not."""

    output: str
    reason: str


def attempt(command: Sequence[str]) -> Attempt:
    """Carry the command out; a failure of any kind is a reason, not an exception."""
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return Attempt("", f"{command[0]} is not installed")
    except OSError as error:
        return Attempt("", str(error.strerror))
    except subprocess.TimeoutExpired:
        return Attempt("", f"no answer in {PATIENCE_S:g} s")
    if done.returncode == 0:
        return Attempt(done.stdout, "")
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("Error", "RTNETLINK"))] or lines
    return Attempt(done.stdout, told[0] if told else f"exit status {done.returncode}")


def run(command: Sequence[str]) -> str:
    """The command's standard output; raises `EmulationError` with its own words if it fails."""
    tried = attempt(command)
    if tried.reason:
        raise EmulationError(f"`{shlex.join(command)}` failed: {tried.reason}")
    return tried.output
