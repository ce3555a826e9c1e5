"""Messages about stores that cannot be used, are damaged or are locked."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from autotune.errors import InvalidInput

SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""A damaged file may also give text that is not UTF-8."""
BUSY_S = 30.0
"""Maximum wait of a writer for another one; a transaction takes milliseconds."""


def text_in(row: sqlite3.Row, column: str) -> str:
    """The text in a column, where SQLite may hold a value of any type."""
    value = row[column]
    if not isinstance(value, str):
        raise InvalidInput(
            f"the trial store must hold text in column {column}, but has {str(value)[:40]!r}; "
            "restore it, or give another path"
        )
    return value


def unusable(path: Path, error: Exception) -> InvalidInput:
    text = str(error)
    if any(sign in text for sign in ("not a database", "malformed", "decode", "no such")):
        return InvalidInput(
            f"{path} must be a trial store, but is not an intact SQLite file ({text}); "
            "restore it or give another path"
        )
    if "full" in text:
        return InvalidInput(
            f"cannot write to {path} ({text}); free some space, then resume the job"
        )
    if "locked" in text or "busy" in text:
        return InvalidInput(
            f"{path} has been locked for {BUSY_S:.0f} s; stop the process that holds it, then try "
            "again"
        )
    return InvalidInput(
        f"the trial store {path} must be readable and writable ({text}); check its permissions or "
        "give another path"
    )
