"""A cache file of JSON lines that survives a run that was stopped while it wrote one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class JsonLines:
    """The values of a file, one on each line.

    `values`: those of the complete lines at the start, in order.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self._cut_off = text != "" and not text.endswith("\n")
        self.values = [value for line in text.splitlines() if (value := _value(line)) is not None]

    def append(self, value: Any) -> None:
        """Write a value on a line of its own, also after one that was cut off."""
        begin = "\n" if self._cut_off else ""
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(begin + json.dumps(value) + "\n")
        self._cut_off = False


def _value(line: str) -> Any:
    """Return the line's value, or None if the line was cut off."""
    try:
        return json.loads(line)
    except ValueError:
        return None
