"""`autotune docs`: print a page that messages name, which an installed package has, too."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput

PAGES = {path.stem: path for path in sorted(Path(__file__).parents[1].glob("pages/*.md"))}
_ANCHOR = re.compile(r'^<a id="([\w-]+)"></a>\n', re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "page",
        metavar="PAGE",
        help=f"{', '.join(PAGES)}, or a section of one, such as troubleshooting#no-ddp",
    )


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the Markdown of the page or section; raises `InvalidInput` if there is none."""
    name, _, anchor = options.page.partition("#")
    if name not in PAGES:
        raise InvalidInput(f"the page must be one of {', '.join(PAGES)}, but is {name!r}")
    text = PAGES[name].read_text(encoding="utf-8")
    if anchor:
        sections = _ANCHOR.findall(text)
        if anchor not in sections:
            raise InvalidInput(
                f"the section of {name} must be one of {', '.join(sections)}, but is {anchor!r}"
            )
        text = _section(text, anchor)
    text = _ANCHOR.sub("", text).strip()
    return {"page": options.page, "text": text}, text


def _section(text: str, anchor: str) -> str:
    """The section with its own subsections. A page has one heading of the first level."""
    section = text.partition(f'<a id="{anchor}"></a>\n')[2].lstrip("\n")
    level = len(section) - len(section.lstrip("#"))
    following = re.compile(f"^#{{2,{level}}} ", re.MULTILINE).search(section, level)
    return section[: following.start()] if following else section
