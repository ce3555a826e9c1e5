"""Tables as text of a fixed width, so that output can be compared and piped."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from io import StringIO

from rich.console import Console, RenderableType

WIDTH = 132
LEAST_WIDTH = 60
"""Narrower terminals break lines themselves: cells of a few characters are no better."""
GAP = "  "
LAST_COLUMN = 36
"""Characters that the last column needs at least, before less important columns are left out."""


def terminal_width() -> int | None:
    """Columns of the terminal that standard output is; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def plain_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    width: int | None = None,
    spare: Sequence[str] = (),
) -> str:
    """One line per row, columns aligned: for thousands of rows.

    With a `width`, columns named in `spare` are left out, in this order, as long as the last column
    has no room; then lines are cut.
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    shown = list(range(len(columns)))
    for name in spare if width is not None else ():
        before = sum(widths[column] + len(GAP) for column in shown[:-1])
        if width is None or before + min(widths[shown[-1]], LAST_COLUMN) <= width:
            break
        shown.remove(list(header).index(name))
    cells = [[cell.ljust(widths[column]) for cell in columns[column]] for column in shown]
    lines = (GAP.join(line).rstrip() for line in zip(*cells, strict=True))
    return "".join(f"{_cut(line, width)}\n" for line in lines)


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else f"{line[: width - 1]}…"


def table_text(table: RenderableType, width: int = WIDTH) -> str:
    """The table as text that ends with a line break. Cells are shown as they are, [x] included.

    It has `width` columns, or as many as a terminal has.
    """
    width = max(LEAST_WIDTH, min(width, terminal_width() or width))
    buffer = StringIO()
    plain = Console(file=buffer, width=width, markup=False, emoji=False, color_system=None)
    plain.print(table)
    return buffer.getvalue()
