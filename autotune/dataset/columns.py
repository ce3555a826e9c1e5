"""The table of trials: columns of a Parquet file, one row per trial.

Strategies and plans stand in it as canonical JSON, dictionary-encoded. `step_s[rank][step]` are seconds. A row has either `step_s` or
`failure_kind`.
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
_WRITTEN = SCHEMA_VERSION.decode()
_FIX = "take the dataset and the package of one version"
MAX_ROWS = 1_000_000
MAX_TABLE_BYTES = 4 * 2**30
"""Of the decoded columns, as the file declares them."""
LEVEL = 12
"""Of zstd."""
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
_COPIED = ("number", "source", "load", "time_s", "session", "disturbed", "stolen")


def table_bytes(trials: Sequence[DatasetTrial], texts: dict[str, str]) -> bytes:
    """A whole Parquet file. `texts`: what it keeps for the next call, id of a strategy or plan -> canonical JSON."""
    rows = [_row(trial, texts) for trial in trials]
    table = pa.Table.from_pylist(rows, SCHEMA)
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
    for name, chosen in (("strategy", trial.strategy), ("plan", trial.plan)):
        if chosen is not None:
            if chosen.id not in texts:
                texts[chosen.id] = chosen.to_json()
            row |= {f"{name}_id": chosen.id, name: texts[chosen.id]}
    if isinstance(trial.outcome, Measured):
        measured = trial.outcome
        row |= {
            name: getattr(measured, name)
            for name in ("step_s", "gradient_error", "left_out", "stopped", "overrun")
        }
    else:
        row |= {
            "failure_kind": trial.outcome.kind,
            "failure_message": trial.outcome.message,
            "failure_rank": trial.outcome.rank,
        }
    return row


def read_table(data: bytes, where: str) -> tuple[DatasetTrial, ...]:
    """The inverse of `table_bytes`; raises `InvalidInput` for what is no such file, too large, or has a row that is no trial."""
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        _check(file, where)
        table = file.read()
        table.validate(full=True)  # indices, offsets and texts lie where they must
        rows = table.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"{where} must be an intact Parquet file, but is not: {str(error)[:200]}"
        ) from error
    strategies, plans = _Parsed(Strategy.from_json), _Parsed(Plan.from_json)
    trials = tuple(
        _trial(row, strategies, plans, f"{where}, row {index}") for index, row in enumerate(rows)
    )
    if [trial.number for trial in trials] != list(range(len(trials))):
        raise InvalidInput(f"{where} must number its {len(trials)} trials from 0 on, but does not")
    return trials


def _check(file: pq.ParquetFile, where: str) -> None:
    """Before anything is decoded."""
    metadata = file.metadata
    version = (metadata.metadata or {}).get(_KEY)
    if version is None:
        raise InvalidInput(
            f"{where} must be a table of trials that this package wrote, but does not say that it is"
        )
    if version != SCHEMA_VERSION:
        raise InvalidInput(
            f"{where}: this version reads tables of schema {_WRITTEN}, but it has {version[:20]!r}; {_FIX}"
        )
    if not file.schema_arrow.equals(SCHEMA):
        names = sorted(set(SCHEMA.names) ^ set(file.schema_arrow.names))
        differing = ", ".join(names) or "types"
        raise InvalidInput(
            f"{where} must have the columns of schema {_WRITTEN}, but differs in {differing}; {_FIX}"
        )
    size = sum(
        metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)
    )
    if metadata.num_rows > MAX_ROWS or size > MAX_TABLE_BYTES:
        raise InvalidInput(
            f"{where} may hold {MAX_ROWS} rows and {MAX_TABLE_BYTES} bytes, but has {metadata.num_rows} and {size}"
        )


class _Parsed(Generic[T]):
    """Each text is parsed once, however many rows hold it."""

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
        return DatasetTrial(
            row["number"],
            row["source"],
            strategy,
            plan,
            _outcome(row),
            row["load"],
            row["time_s"],
            row["session"],
            row["disturbed"],
            row["stolen"],
        )
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{where} is no trial: {error}") from error


def _outcome(row: dict[str, Any]) -> Measured | Failed:
    if (row["step_s"] is None) == (row["failure_kind"] is None):
        raise InvalidInput("it must have either step times or a failure")
    if row["step_s"] is None:
        return Failed(
            FailureKind(row["failure_kind"]), row["failure_message"] or "", row["failure_rank"]
        )
    stopped = None if row["stopped"] is None else Stopped(row["stopped"])
    step_s = tuple(tuple(steps) for steps in row["step_s"])
    return Measured(step_s, row["gradient_error"], row["left_out"] or 0, stopped, row["overrun"])
