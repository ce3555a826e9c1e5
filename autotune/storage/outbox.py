"""The outbox of a store: what waits to be sent to the tracking server, job by job."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

from autotune.canonical import canonical_json
from autotune.parsing import parse, parse_json
from autotune.storage.damage import text_in
from autotune.storage.database import Database


@dataclass(frozen=True)
class OutboxItem:
    """An item for the tracking server. The `body` of an "event" names its `seq`."""

    position: int
    kind: str
    body: dict[str, Any]


class Outbox:
    """The items of all jobs in a store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def enqueue(self, job_id: str, kind: str, body: dict[str, Any]) -> None:
        """Append a model or an artifact, unless it is already there."""
        with self._database.transaction() as db:
            known = db.execute(
                "SELECT 1 FROM outbox WHERE job = ? AND kind = ? AND body = ?",
                (job_id, kind, canonical_json(body)),
            )
            if known.fetchone() is None:
                add_to_outbox(db, job_id, kind, body)

    def waiting(self, job_id: str) -> list[OutboxItem]:
        """Items that have not been sent yet, in order."""
        rows = self._database.rows(
            "SELECT * FROM outbox WHERE job = ? AND state = 'waiting' ORDER BY position", (job_id,)
        )
        where = f"an item of job {job_id} for the tracking server"
        items = [
            {
                "position": row["position"],
                "kind": row["kind"],
                "body": parse_json(text_in(row, "body"), where),
            }
            for row in rows
        ]
        return [parse(OutboxItem, item, where) for item in items]

    def mark_sent(self, job_id: str, position: int) -> None:
        with self._database.transaction() as db:
            db.execute(
                "UPDATE outbox SET state = 'sent' WHERE job = ? AND position = ?",
                (job_id, position),
            )

    def mark_rejected(self, job_id: str, position: int, message: str) -> None:
        """Keep an item that the server will never accept, with the server's reason."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE outbox SET state = 'rejected', message = ? WHERE job = ? AND position = ?",
                (message, job_id, position),
            )

    def rejected(self, job_id: str) -> list[str]:
        """The server's reasons for the items that it rejected."""
        rows = self._database.rows(
            "SELECT message FROM outbox WHERE job = ? AND state = 'rejected' ORDER BY position",
            (job_id,),
        )
        return [str(row["message"]) for row in rows]


def add_to_outbox(db: sqlite3.Connection, job_id: str, kind: str, body: dict[str, Any]) -> None:
    """Append an item for the tracking server."""
    position = db.execute(
        "SELECT coalesce(max(position), -1) + 1 FROM outbox WHERE job = ?", (job_id,)
    ).fetchone()[0]
    db.execute(
        "INSERT INTO outbox (job, position, kind, body) VALUES (?, ?, ?, ?)",
        (job_id, position, kind, canonical_json(body)),
    )


def fill_outbox(db: sqlite3.Connection) -> None:
    """Queue all jobs of a store version without an outbox: none of them has been sent."""
    for row in db.execute("SELECT id, status FROM jobs ORDER BY rowid").fetchall():
        add_to_outbox(db, row["id"], "start", {})
        for event in db.execute(
            "SELECT seq FROM events WHERE job = ? ORDER BY seq", (row["id"],)
        ).fetchall():
            add_to_outbox(db, row["id"], "event", {"seq": event["seq"]})
        if row["status"] != "running":
            add_to_outbox(db, row["id"], "finish", {})
