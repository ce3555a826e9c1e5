"""The table of trials: columns of a Parquet file, one row per trial.

Strategies and plans are canonical JSON, dictionary-encoded. `step_s[rank][step]` are seconds. A row
has either `step_s` or `failure_kind`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from autotune.dataset.trials import DatasetTrial
from autotune.errors import InvalidInput
from autotune.records import Failed, FailureKind, Measured, Stopped
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Strategy

SCHEMA_VERSION = b"3"
_VERSION = SCHEMA_VERSION.decode()
_FIX = "take the dataset and the package of one version"
MAX_ROWS = 1_000_000
MAX_TABLE_BYTES = 4 * 2**30
"""Limit on the decoded columns, as the file declares them."""
LEVEL = 12
"""Compression level of zstd."""
_TEXT = pa.dictionary(pa.int32(), pa.string())
_KEY = b"autotune.dataset"
T = TypeVar("T")
SCHEMA = pa.schema(
    [
        pa.field("number", pa.int32(), nullable=False),
        pa.field("source", _TEXT, nullable=False),
        pa.field("strategy_id", _TEXT),
        pa.field("strategy", _TEXT),
        pa.field("plan_id", _TEXT),
        pa.field("plan", _TEXT),
        pa.field("step_s", pa.list_(pa.list_(pa.float64()))),
        pa.field("failure_kind", _TEXT),
        pa.field("failure_message", pa.string()),
        pa.field("failure_rank", pa.int32()),
        pa.field("gradient_error", pa.float64()),
        pa.field("left_out", pa.int32()),
        pa.field("stopped", _TEXT),
        pa.field("overrun", pa.float64()),
        pa.field("load", pa.float64(), nullable=False),
        pa.field("time_s", pa.float64(), nullable=False),
        pa.field("session", _TEXT, nullable=False),
        pa.field("disturbed", pa.bool_(), nullable=False),
        pa.field("stolen", pa.float64()),
    ],
    metadata={_KEY: SCHEMA_VERSION},
)
_MEASURED = ("step_s", "gradient_error", "left_out", "stopped", "overrun")
_COPIED = ("number", "source", "load", "time_s", "session", "disturbed", "stolen")


def table_bytes(trials: Sequence[DatasetTrial], texts: dict[str, str]) -> bytes:
    """A whole Parquet file.

    `texts` caches the canonical JSON of strategies and plans by id, for the next call.
    """
    table = pa.Table.from_pylist([_row(trial, texts) for trial in trials], SCHEMA)
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        compression_level=LEVEL,
        dictionary_pagesize_limit=64 * 2**20,
    )
    return sink.getvalue()


def _row(trial: DatasetTrial, texts: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(trial, name) for name in _COPIED}
    for name, value in (("strategy", trial.strategy), ("plan", trial.plan)):
        if value is not None:
            if value.id not in texts:
                texts[value.id] = value.to_json()
            row |= {f"{name}_id": value.id, name: texts[value.id]}
    outcome = trial.outcome
    if isinstance(outcome, Measured):
        return row | {name: getattr(outcome, name) for name in _MEASURED}
    failure = {"kind": outcome.kind, "message": outcome.message, "rank": outcome.rank}
    return row | {f"failure_{name}": value for name, value in failure.items()}


def read_table(data: bytes, where: str) -> tuple[DatasetTrial, ...]:
    """The inverse of `table_bytes`.

    Raises `InvalidInput` for any other file, one that is too large, and one with an invalid row.
    """
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        _check(file, where)
        table = file.read()
        table.validate(full=True)  # indices, offsets and texts lie inside their buffers
        rows = table.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        rule, reason = "must be an intact Parquet file", str(error)[:200]
        raise InvalidInput(f"{where} {rule}, but is not: {reason}") from error
    strategies, plans = _Parsed(Strategy.from_json), _Parsed(Plan.from_json)
    trials = tuple(
        _trial(row, strategies, plans, f"{where}, row {index}") for index, row in enumerate(rows)
    )
    if [trial.number for trial in trials] != list(range(len(trials))):
        raise InvalidInput(f"{where} must number its {len(trials)} trials from 0 on, but does not")
    return trials


def _check(file: pq.ParquetFile, where: str) -> None:
    """Check the metadata before anything is decoded."""
    metadata = file.metadata
    version = (metadata.metadata or {}).get(_KEY)
    if version is None:
        rule = "must be a table of trials that this package wrote"
        raise InvalidInput(f"{where} {rule}, but does not say that it is")
    if version != SCHEMA_VERSION:
        rule = f"this version reads tables of schema {_VERSION}"
        raise InvalidInput(f"{where}: {rule}, but it has {version[:20]!r}; {_FIX}")
    if not file.schema_arrow.equals(SCHEMA):
        names = sorted(set(SCHEMA.names) ^ set(file.schema_arrow.names))
        differing = ", ".join(names) or "types"
        rule = f"must have the columns of schema {_VERSION}"
        raise InvalidInput(f"{where} {rule}, but differs in {differing}; {_FIX}")
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    size = sum(group.total_byte_size for group in groups)
    if metadata.num_rows > MAX_ROWS or size > MAX_TABLE_BYTES:
        limit = f"{MAX_ROWS} rows and {MAX_TABLE_BYTES} bytes"
        raise InvalidInput(f"{where} may hold {limit}, but has {metadata.num_rows} and {size}")


class _Parsed(Generic[T]):
    """Parses each text once, however many rows contain it."""

    def __init__(self, parse: Callable[[str, str], T]) -> None:
        self._parse = parse
        self._known: dict[str, T] = {}

    def of(self, text: str | None, where: str) -> T | None:
        if text is None:
            return None
        if text not in self._known:
            self._known[text] = self._parse(text, where)
        return self._known[text]


def _trial(
    row: dict[str, Any], strategies: _Parsed[Strategy], plans: _Parsed[Plan], where: str
) -> DatasetTrial:
    strategy, plan = strategies.of(row["strategy"], where), plans.of(row["plan"], where)
    try:
        fields = {name: row[name] for name in _COPIED}
        return DatasetTrial(strategy=strategy, plan=plan, outcome=_outcome(row), **fields)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{where} is no trial: {error}") from error


def _outcome(row: dict[str, Any]) -> Measured | Failed:
    if (row["step_s"] is None) == (row["failure_kind"] is None):
        raise InvalidInput("it must have either step times or a failure")
    if row["step_s"] is None:
        kind = FailureKind(row["failure_kind"])
        return Failed(kind, row["failure_message"] or "", row["failure_rank"])
    stopped = None if row["stopped"] is None else Stopped(row["stopped"])
    step_s = tuple(tuple(steps) for steps in row["step_s"])
    return Measured(step_s, row["gradient_error"], row["left_out"] or 0, stopped, row["overrun"])
