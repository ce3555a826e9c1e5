"""Progress on a terminal, shown with rich."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from autotune.printing import discard, printable


class Terminal(Console):
    """Standard error for progress. If its reader is gone, work goes on without a display."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(sys.stderr)
