"""The commit of this checkout, which every session of a dataset records."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from autotune.dataset.folder import SUMS, read_domain
from autotune.errors import InvalidInput

CHECKOUT = Path(__file__).parents[3]
DIRTY = "-dirty"


def checkout_commit() -> str:
    """Return the commit of this checkout, or "" if the package is not in one.

    It ends in `DIRTY` if files differ from the commit.
    """
    if not (CHECKOUT / ".git").exists():
        return ""
    words = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty"]
    words += ["--abbrev=12", "--exclude=*"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def commits_in(dataset: Path) -> set[str]:
    """Return the commits of all sessions in all domains of a dataset's folder."""
    return {
        session.environment.source
        for sums in dataset.glob(f"*/{SUMS}")
        for session in read_domain(sums.parent).sessions
    }


def demand_one_commit(recorded: Iterable[str], now: str) -> None:
    """Raise `InvalidInput` unless `now` is a commit without changes, and all others are equal.

    `recorded`: those of earlier sessions.
    """
    if not now or now.endswith(DIRTY):
        raise InvalidInput(
            "everything is measured at one commit, but this checkout has changes or is none: "
            f"{now or 'unknown'}; commit them first"
        )
    others = sorted(set(recorded) - {now})
    if others:
        raise InvalidInput(
            f"everything is measured at one commit, and this is {now}, but earlier sessions were "
            f"at {', '.join(others)}; check that out, or use another folder"
        )
