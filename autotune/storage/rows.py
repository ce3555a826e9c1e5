"""Rows that an event adds to the derived tables of the trial store."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.canonical import canonical_json, content_id
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.parsing import parse
from autotune.records import Measured
from autotune.tuning.events import Event, Profiled, Proposed, TrialFinished
from autotune.workload import Workload

Query = Callable[[str, tuple[object, ...]], Sequence[sqlite3.Row]]
"""Returns all rows of a query, as `Database.rows` does."""


@dataclass(frozen=True)
class Insertion:
    """A statement with the parameters of each row."""

    statement: str
    rows: Sequence[tuple[object, ...] | dict[str, Any]]


def derived_rows(query: Query, job_id: str, seq: int, event: Event) -> tuple[Insertion, ...]:
    """Compute the rows of an event, to be inserted behind it.

    Raises `InvalidInput` for a trial without a profile before it.
    """
    if isinstance(event, Profiled):
        workload, cluster = event.workload, event.cluster
        row = (content_id("workload", workload), workload.id, canonical_json(workload))
        return (
            Insertion(
                "INSERT OR IGNORE INTO workloads (id, model_id, body) VALUES (?, ?, ?)", [row]
            ),
            Insertion(
                "INSERT OR IGNORE INTO clusters (id, body) VALUES (?, ?)",
                [(content_id("cluster", cluster), canonical_json(cluster))],
            ),
        )
    if isinstance(event, Proposed):
        bodies = [
            (proposal.strategy.id, proposal.strategy.to_json()) for proposal in event.proposals
        ]
        return (Insertion("INSERT OR IGNORE INTO strategies (id, body) VALUES (?, ?)", bodies),)
    return (_trial_row(query, job_id, seq, event),)


def insert_rows(db: sqlite3.Connection, insertions: Sequence[Insertion]) -> None:
    for insertion in insertions:
        db.executemany(insertion.statement, insertion.rows)


def _trial_row(query: Query, job_id: str, seq: int, event: TrialFinished) -> Insertion:
    profiles = query(
        "SELECT body FROM events WHERE job = ? AND json_extract(body, '$.kind') = 'profiled' "
        "ORDER BY seq LIMIT 1",
        (job_id,),
    )
    if not profiles:
        raise InvalidInput(
            f"a trial of job {job_id!r} needs the profile before it, but event {seq} has none"
        )
    profile = json.loads(profiles[0]["body"])
    values: dict[str, Any] = {
        "job": job_id,
        "number": event.request.number,
        "seq": seq,
        "strategy_id": event.request.strategy_id,
        "plan_id": event.plan_id,
        "role": event.request.role.value,
        "workload_id": _known_id(query, "workload", profile["workload"], Workload),
        "cluster_id": _known_id(query, "cluster", profile["cluster"], Cluster),
        "elapsed_s": event.elapsed_s,
        "environment": canonical_json(profile["software"]),
    }
    if isinstance(event.outcome, Measured):
        values |= {
            "status": "measured",
            "median_s": event.outcome.median_s,
            "step_s": canonical_json(event.outcome.step_s),
        }
    else:
        values |= {"status": event.outcome.kind.value, "message": event.outcome.message}
    names = ", ".join(values)
    marks = ", ".join(f":{name}" for name in values)
    return Insertion(f"INSERT INTO trials ({names}) VALUES ({marks})", [values])


def _known_id(query: Query, kind: str, body: Any, parsed: type) -> str:
    """Return the id of the profile's row as stored, or as rebuilt with this version's fields."""
    stored = content_id(kind, body)
    if query(f"SELECT 1 FROM {kind}s WHERE id = ?", (stored,)):
        return stored
    return content_id(kind, parse(parsed, body, kind))
