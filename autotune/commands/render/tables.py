"""Tables as text of a fixed width, so that output can be compared and piped."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType

WIDTH = 132


def table_text(table: RenderableType, width: int = WIDTH) -> str:
    """Ends with a line break."""
    buffer = StringIO()
    Console(file=buffer, width=width).print(table)
    return buffer.getvalue()
