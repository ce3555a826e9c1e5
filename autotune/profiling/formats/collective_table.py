"""Reads tables of collectives' times: the output of nccl-tests, and CSV files.

- nccl-tests (`all_reduce_perf -b 8 -e 1G -f 2 -g 8`): its comment lines state the columns and list
  the ranks. Times are microseconds; those in place count, as data-parallel training sums in place.
- CSV with a header. Columns are found by name: a size in bytes, a time with its unit, and where the
  file has them the ranks and the collective. Of several times the last counts (in place).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from autotune.cluster import FITTED
from autotune.errors import InvalidInput
from autotune.files import read_text
from autotune.limits import MAX_BYTES, MAX_RANKS, MAX_SECONDS
from autotune.profiling.fits.table_fits import TableRow

MAX_ROWS = 200_000
_SIZE = re.compile(r"(?:message_?)?(?:size|bytes)(?:_bytes|\(b\)|\(bytes\))?$")
_TIME = re.compile(r"(?:time|duration|latency)(?:_|\()(s|ms|us|ns)\)?$|(seconds)$")
_RANKS = re.compile(r"ranks|n_?ranks|world_size|num_workers|workers|gpus|n_?gpus$")
_PRIMITIVE = re.compile(r"primitive|collective|operation$")
_UNIT_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_TEST = re.compile(r"\b(\w+)_perf\b")
_NAMES = {"alltoall": "all_to_all"}


def read_collective_table(
    path: Path, ranks: int | None = None, primitive: str = ""
) -> tuple[TableRow, ...]:
    """The rows of a table; `ranks` and `primitive` where the file does not state them.

    Raises `InvalidInput` that names the line.
    """
    lines = read_text(path).splitlines()
    if len(lines) > MAX_ROWS:
        raise InvalidInput(f"{path} may hold at most {MAX_ROWS} lines, but has {len(lines)}")
    comments = [line for line in lines if line.lstrip().startswith("#")]
    is_test = any("busbw" in line and "size" in line for line in comments)
    read = _nccl_tests if is_test else _csv
    rows = tuple(read(path, lines, ranks, primitive))
    if not rows:
        raise InvalidInput(f"{path} must hold measured collectives, but has no row of numbers")
    return rows


def _nccl_tests(
    path: Path, lines: Sequence[str], ranks: int | None, primitive: str
) -> Iterable[TableRow]:
    comments = [line for line in lines if line.lstrip().startswith("#")]
    header = next(line for line in comments if "busbw" in line and "size" in line)
    times = [at for at, name in enumerate(header.lstrip("# ").split()) if name == "time"]
    if not times:
        raise InvalidInput(f"{path}: the columns of nccl-tests need a time, but are {header[:120]}")
    listed = sum(bool(re.match(r"#\s+Rank\s+\d+", line)) for line in comments)
    named = next((found[1] for line in comments if (found := _TEST.search(line))), "")
    count = _ranks(path, ranks or listed or None)
    name = _primitive(path, primitive or named or "all_reduce")
    for number, line in enumerate(lines, start=1):
        cells = line.split()
        if not cells or cells[0].startswith("#"):
            continue
        if len(cells) <= times[0]:
            raise InvalidInput(f"{path}, line {number}: a row needs a time, but is {line[:80]!r}")
        cell = cells[times[-1]] if len(cells) > times[-1] else cells[times[0]]
        yield _row(path, number, name, count, cells[0], cell, 1e-6)


def _csv(path: Path, lines: Sequence[str], ranks: int | None, primitive: str) -> Iterable[TableRow]:
    table = csv.reader(line for line in lines if not line.lstrip().startswith("#"))
    header = [name.strip().lower() for name in next(table, [])]
    sizes, rank_columns, primitives = (
        [at for at, name in enumerate(header) if expression.match(name)]
        for expression in (_SIZE, _RANKS, _PRIMITIVE)
    )
    times = [
        (at, _UNIT_S[found[1] or "s"])
        for at, name in enumerate(header)
        if (found := _TIME.match(name))
    ]
    if not sizes or not times:
        raise InvalidInput(
            f"{path} needs columns for the size and the time, such as `bytes` and `seconds` or "
            f"`size(B)` and `time(us)`, but has {', '.join(header)[:120] or 'no header'}"
        )
    at, unit_s = times[-1]
    for number, cells in enumerate(table, start=2):
        if not cells:
            continue
        if len(cells) < len(header):
            raise InvalidInput(
                f"{path}, line {number}: a row needs {len(header)} cells, but has {len(cells)}"
            )
        count = ranks
        if rank_columns:
            count = _whole(path, number, "ranks", cells[rank_columns[0]], MAX_RANKS)
        name = cells[primitives[0]].strip() if primitives else primitive or "all_reduce"
        cell = cells[sizes[0]]
        yield _row(
            path, number, _primitive(path, name), _ranks(path, count), cell, cells[at], unit_s
        )


def _row(
    path: Path, line: int, primitive: str, ranks: int, size: str, time: str, unit_s: float
) -> TableRow:
    size_bytes = _whole(path, line, "size", size, MAX_BYTES)
    try:
        seconds = float(time) * unit_s
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidInput(
            f"{path}, line {line}: a time must be a number above 0, but is {time[:40]!r}"
        )
    return TableRow(primitive, ranks, size_bytes, seconds)


def _whole(path: Path, line: int, what: str, cell: str, most: int) -> int:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not (0 <= value <= most and value == int(value)):
        raise InvalidInput(
            f"{path}, line {line}: {what} must be a whole number up to {most}, but is {cell[:40]!r}"
        )
    return int(value)


def _ranks(path: Path, ranks: int | None) -> int:
    if ranks is None:
        raise InvalidInput(
            f"{path} does not state its number of ranks; name it with --ranks, such as --ranks 8"
        )
    if not 2 <= ranks <= MAX_RANKS:
        raise InvalidInput(f"{path}: collectives need 2 to {MAX_RANKS} ranks, but have {ranks}")
    return ranks


def _primitive(path: Path, name: str) -> str:
    known = _NAMES.get(name, name)
    if known not in FITTED:
        raise InvalidInput(
            f"{path}: a collective must be one of {', '.join(FITTED)}, but is {name[:40]!r}"
        )
    return known
