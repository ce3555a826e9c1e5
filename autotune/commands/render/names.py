"""Short forms of ids and messages."""

from __future__ import annotations

from autotune.records import CURRENT_SETUP


def short_name(strategy_id: str) -> str:
    """The current setup, or the beginning of a strategy's id."""
    if strategy_id == CURRENT_SETUP:
        return "current setup"
    return strategy_id.removeprefix("strategy-")[:8]


def first_line(text: str, characters: int = 160) -> str:
    """The first characters of a message, which may be empty."""
    return text.partition("\n")[0][:characters]
