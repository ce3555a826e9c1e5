"""Self-contained HTML pages with a common look.

Everything in them is escaped, also what UTF-8 has no bytes for: names come from the user's script,
trace or file system.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.files import write_whole
from autotune.printing import printable
from autotune.units import format_bytes, format_rate, format_seconds


def write_page(path: Path, template: str, context: Mapping[str, Any], what: str) -> None:
    """Fill the named template and write it to `path` in one piece; raises `InvalidInput`."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(seconds=format_seconds, bytes=format_bytes, rate=format_rate)
    page = environment.get_template(template).render(**context)
    write_whole(path, printable(page), what)
