"""Items that a tracking server will never take, in words."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.commands.render.names import first_line

PROBLEM_CHARACTERS = 400


def rejected_text(reasons: Sequence[str]) -> str:
    """The number of rejected items, and the first reason; `reasons` is not empty."""
    first = first_line(reasons[0], PROBLEM_CHARACTERS)
    if len(reasons) == 1:
        return f"1 item was rejected: {first}"
    return f"{len(reasons)} items were rejected, the first because {first}"
