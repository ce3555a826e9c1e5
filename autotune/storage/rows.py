"""Rows that an event adds to the derived tables of the trial store."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from autotune.canonical import canonical_json, content_id
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.parsing import parse
from autotune.records import Measured
from autotune.tuning.events import Event, Profiled, Proposed, TrialFinished
from autotune.workload import Workload


def derive(db: sqlite3.Connection, job_id: str, seq: int, event: Event) -> None:
    """Insert derived rows. Raises `InvalidInput` for a trial without a profile before it."""
    if isinstance(event, Profiled):
        workload, cluster = event.workload, event.cluster
        row = (content_id("workload", workload), workload.id, canonical_json(workload))
        db.execute("INSERT OR IGNORE INTO workloads (id, model_id, body) VALUES (?, ?, ?)", row)
        db.execute(
            "INSERT OR IGNORE INTO clusters (id, body) VALUES (?, ?)",
            (content_id("cluster", cluster), canonical_json(cluster)),
        )
    elif isinstance(event, Proposed):
        bodies = [
            (proposal.strategy.id, proposal.strategy.to_json()) for proposal in event.proposals
        ]
        db.executemany("INSERT OR IGNORE INTO strategies (id, body) VALUES (?, ?)", bodies)
    else:
        _derive_trial(db, job_id, seq, event)


def _derive_trial(db: sqlite3.Connection, job_id: str, seq: int, event: TrialFinished) -> None:
    profiled = db.execute(
        "SELECT body FROM events WHERE job = ? AND json_extract(body, '$.kind') = 'profiled' "
        "ORDER BY seq LIMIT 1",
        (job_id,),
    ).fetchone()
    if profiled is None:
        raise InvalidInput(
            f"a trial of job {job_id!r} needs the profile before it, but event {seq} has none"
        )
    profile = json.loads(profiled["body"])
    values: dict[str, Any] = {
        "job": job_id,
        "number": event.request.number,
        "seq": seq,
        "strategy_id": event.request.strategy_id,
        "plan_id": event.plan_id,
        "role": event.request.role.value,
        "workload_id": _known_id(db, "workload", profile["workload"], Workload),
        "cluster_id": _known_id(db, "cluster", profile["cluster"], Cluster),
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
    db.execute(
        f"INSERT INTO trials ({names}) VALUES ({', '.join(':' + name for name in values)})", values
    )


def _known_id(db: sqlite3.Connection, kind: str, body: Any, parsed: type) -> str:
    """Return the id of the profile's row as stored, or as rebuilt with this version's fields."""
    stored = content_id(kind, body)
    if db.execute(f"SELECT 1 FROM {kind}s WHERE id = ?", (stored,)).fetchone() is not None:
        return stored
    return content_id(kind, parse(parsed, body, kind))
