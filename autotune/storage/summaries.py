"""Rows for lists of a job's trials, each derived from one event.

A job's rows cover its first events without a gap. An event is stored with its rows if all before it
have theirs; else the next reader derives what is missing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.canonical import canonical_json
from autotune.parsing import parse, parse_json
from autotune.strategy_space.plan import PlannedStrategy
from autotune.tuning.events import Event, Profiled, Proposed, TrialFinished, kind_of
from autotune.tuning.figures import ProposalSummary, TrialSummary


@dataclass(frozen=True)
class EventRows:
    """`proposals`: (strategy id, origin, words) of each. `body`: the summary of a trial."""

    seq: int
    kind: str
    body: str | None = None
    proposals: tuple[tuple[str, str, str], ...] = ()

    @staticmethod
    def of(seq: int, event: Event, profiled: Profiled | None) -> EventRows:
        """`profiled`: the first profile of the job; without one, proposals have no rows.

        Raises `InvalidInput` for a proposed strategy that cannot be planned.
        """
        kind = kind_of(event)
        if isinstance(event, TrialFinished):
            return EventRows(seq, kind, canonical_json(TrialSummary.of(event)))
        if isinstance(event, Proposed) and profiled is not None:
            return EventRows(seq, kind, proposals=_proposal_rows(event, profiled))
        return EventRows(seq, kind)


def _proposal_rows(proposed: Proposed, profiled: Profiled) -> tuple[tuple[str, str, str], ...]:
    workload, ranks = profiled.workload, profiled.cluster.world_size
    rows = []
    for proposal in proposed.proposals:
        planned = PlannedStrategy.of(proposal.strategy, workload, ranks)
        words = profiled.in_words(planned.plan)
        rows.append((proposal.strategy.id, proposal.origin, words))
    return tuple(rows)


def rows_of_job(
    events: Iterable[tuple[int, Event]], profiled: Profiled | None = None
) -> list[EventRows]:
    """The rows of consecutive events. `profiled`: the job's profile, if it came before them."""
    rows = []
    for seq, event in events:
        if profiled is None and isinstance(event, Profiled):
            profiled = event
        rows.append(EventRows.of(seq, event, profiled))
    return rows


def insert(db: sqlite3.Connection, job_id: str, rows: Sequence[EventRows]) -> None:
    """Add rows; those that another process has added meanwhile stay."""
    db.executemany(
        "INSERT OR IGNORE INTO event_summaries (job, seq, kind, body) VALUES (?, ?, ?, ?)",
        [(job_id, row.seq, row.kind, row.body) for row in rows],
    )
    db.executemany(
        "INSERT OR IGNORE INTO proposals (job, strategy_id, origin, words) VALUES (?, ?, ?, ?)",
        [(job_id, *proposal) for row in rows for proposal in row.proposals],
    )


def parse_trials(bodies: Iterable[str], where: str) -> tuple[TrialSummary, ...]:
    return tuple(parse(TrialSummary, parse_json(body, where), where) for body in bodies)


def parse_proposals(rows: Iterable[sqlite3.Row], where: str) -> dict[str, ProposalSummary]:
    """By strategy id."""
    return {
        row["strategy_id"]: parse(
            ProposalSummary, {"origin": row["origin"], "words": row["words"]}, where
        )
        for row in rows
    }
