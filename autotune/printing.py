"""Printing: names come from scripts, traces and stores and must not steer the terminal.

Importing it does not load rich, so that `autotune --help` stays instant.
"""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import suppress
from typing import Any

_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line break
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # order of writing, and further line breaks
    "\ud800-\udfff]"  # bytes of a name that are no UTF-8
)


def printable(text: str) -> str:
    """The text with characters that a terminal would obey as escapes, such as `\\x1b`."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def accept_any_character() -> None:
    """Escape characters that the encoding of an output lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard(stream: Any) -> None:
    """Send everything that is still to be written to nowhere, so that closing cannot fail."""
    with suppress(OSError, ValueError, AttributeError):  # no stream, or none of a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
