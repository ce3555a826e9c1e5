"""Reads the CSV files in which `--measure` keeps times for other what-ifs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.files import read_text

MOST_S = 1e5


def read_times(
    path: Path, words: Sequence[str], times: Sequence[str]
) -> Iterator[tuple[list[str], list[float]]]:
    """The rows of a file with the columns `words` and `times`: their texts, and their seconds.

    Raises `InvalidInput` for other columns, and for seconds that are not above 0.
    """
    reader = csv.DictReader(io.StringIO(read_text(path)))
    columns = [*words, *times]
    if reader.fieldnames != columns:
        raise InvalidInput(
            f"{path} needs the columns {', '.join(columns)}, but has "
            f"{', '.join(reader.fieldnames or []) or 'none'}; write it with --measure"
        )
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        yield [row[word] or "" for word in words], [_seconds(row[time], where) for time in times]


def _seconds(text: str | None, where: str) -> float:
    try:
        seconds = float(text or "")
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_S:
        raise InvalidInput(
            f"{where}: seconds must be above 0 and at most {MOST_S:.0f}, but are {text!r:.40}"
        )
    return seconds
