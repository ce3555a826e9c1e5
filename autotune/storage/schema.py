"""The scripts that bring a store to this version."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path


def migrations() -> list[str]:
    """The scripts in order; script number n brings a file from version n-1 to n."""
    scripts = sorted((Path(__file__).parent / "migrations").glob("*.sql"))
    return [script.read_text(encoding="utf-8") for script in scripts]


def statements(script: str) -> Iterator[str]:
    """Complete statements of a script (`executescript` would commit the open transaction)."""
    collected = ""
    for line in script.splitlines(keepends=True):
        collected += line
        if sqlite3.complete_statement(collected):
            yield collected
            collected = ""
