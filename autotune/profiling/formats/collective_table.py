"""Reads tables of collectives' times: the output of nccl-tests, and CSV files.

- nccl-tests (`all_reduce_perf -b 8 -e 1G -f 2 -g 8`): its comment lines state the columns and list
  the ranks. Times are microseconds; those in place count, as data-parallel training sums in place.
  Sizes of gathers and scatters are those of all ranks' tensors together.
- CSV with a header. Columns are found by name: a size in bytes, a time with its unit, and where the
  file has them the ranks and the collective. Of several times the last counts (in place).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
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
_RANK = re.compile(r"#\s+Rank\s+(\d{1,9})\b(.*)")
_PROCESS = re.compile(r"\bPid\s+\d+")
BANDWIDTH_ERROR = 0.02
"""Relative error of the ratio of two bandwidths. From three ranks on, it is a quarter lower or more
for other collectives."""
BANDWIDTH_DIGIT = 0.01
"""GB/s, the last digit of a bandwidth."""
_NAMES = {"alltoall": "all_to_all"}
_SIZED_BY_RANK = ("gather", "scatter")


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
    columns = header.lstrip("# ").split()
    times = [at for at, name in enumerate(columns) if name == "time"]
    if not times:
        raise InvalidInput(f"{path}: the columns of nccl-tests need a time, but are {header[:120]}")
    listed = _listed_ranks(path, comments)
    named = next((found[1] for line in comments if (found := _TEST.search(line))), "")
    count = _ranks(path, ranks or listed or None)
    rows = [(at, cells) for at, line in enumerate(lines, start=1) if (cells := _cells(line))]
    for number, cells in rows:
        if len(cells) <= times[0]:
            shown = " ".join(cells)[:80]
            raise InvalidInput(f"{path}, line {number}: a row needs a time, but is {shown!r}")
    if rows and not (primitive or named):
        _require_all_reduce(path, columns, rows, count)
    name = _primitive(path, primitive or named or "all_reduce")
    for number, cells in rows:
        cell = cells[times[-1]] if len(cells) > times[-1] else cells[times[0]]
        row = _row(path, number, name, count, cells[0], cell, 1e-6)
        yield replace(row, size_bytes=row.size_bytes // count) if name in _SIZED_BY_RANK else row


def _cells(line: str) -> list[str]:
    """The cells of a row; none for a comment."""
    cells = line.split()
    return [] if cells and cells[0].startswith("#") else cells


def _listed_ranks(path: Path, comments: Sequence[str]) -> int:
    """Count the different ranks that the comments list.

    Without MPI, each process is a test of its own whose only rank is 0, on another device.
    """
    device_of: dict[int, str] = {}
    for line in comments:
        if match := _RANK.match(line):
            rank, device = int(match[1]), _PROCESS.sub("", match[2])
            if device_of.setdefault(rank, device) != device:
                raise InvalidInput(
                    f"{path}: a table must be of one test, but lists rank {rank} on several "
                    "devices; build nccl-tests with MPI=1, or name the output of one test"
                )
    return len(device_of)


def _require_all_reduce(
    path: Path, columns: Sequence[str], rows: Sequence[tuple[int, list[str]]], ranks: int
) -> None:
    """Refuse a table without a name that is not of an all-reduce.

    nccl-tests states the bandwidth of the busiest link as 2 (n - 1) / n of the algorithm's for an
    all-reduce of n ranks, and as at most the algorithm's for other collectives
    (doc/PERFORMANCE.md). With two ranks, the reduction and the root tell them apart.
    """
    places = {name: at for at, name in enumerate(columns)}  # of several ones the last, in place
    line, cells = max(rows, key=lambda row: _figure(row[1], 0))
    algorithm, link = (_figure(cells, places.get(name, len(cells))) for name in ("algbw", "busbw"))
    expected = 2 * (ranks - 1) / ranks * algorithm
    words = {name: cells[places[name]] for name in ("redop", "root") if name in places}
    others = words.get("redop") == "none" or words.get("root", "-1") != "-1"
    if others or not abs(link - expected) <= BANDWIDTH_ERROR * expected + BANDWIDTH_DIGIT:
        shown = ", ".join(f"{name} {word}" for name, word in words.items())
        raise InvalidInput(
            f"{path} does not name its collective, and line {line} is not of an all-reduce of "
            f"{ranks} ranks: {shown or 'without a reduction'}, algbw {algorithm}, busbw {link}, "
            f"where {expected:.2f} is expected; name it with --primitive, such as --primitive "
            "all_gather"
        )


def _figure(cells: Sequence[str], at: int) -> float:
    """The number in a cell, nan where there is none."""
    try:
        return float(cells[at])
    except (IndexError, ValueError):
        return math.nan


def _csv(path: Path, lines: Sequence[str], ranks: int | None, primitive: str) -> Iterable[TableRow]:
    table = _csv_rows(path, lines)
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


def _csv_rows(path: Path, lines: Sequence[str]) -> Iterator[list[str]]:
    table = csv.reader(line for line in lines if not line.lstrip().startswith("#"))
    try:
        yield from table
    except csv.Error as error:
        where = f"{path}, line {table.line_num}"
        raise InvalidInput(f"{where} must be CSV, but is not: {error}") from error


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
