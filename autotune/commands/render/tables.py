"""Tables as text of a fixed width, so that output can be compared and piped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.console import Console, RenderableType

WIDTH = 132


def plain_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """One line per row, columns aligned, cut at no width: for thousands of rows."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )


def table_text(table: RenderableType, width: int = WIDTH) -> str:
    """The table as text that ends with a line break. Cells are shown as they are, [x] included."""
    buffer = StringIO()
    Console(file=buffer, width=width, markup=False, emoji=False).print(table)
    return buffer.getvalue()
