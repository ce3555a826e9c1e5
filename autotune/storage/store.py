"""The trial store: one SQLite file that survives kill -9 with every acknowledged event.

The tables `events` and `jobs` are the source. All others are derived from them in the same
transaction; `Store.rebuild` derives them again. Every commit is on disk when the call returns
(write-ahead log, synchronous=FULL). Jobs in one file learn from each other through `past_trials`.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from autotune.canonical import canonical_json
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.parsing import parse, parse_json
from autotune.records import CURRENT_SETUP, Accelerators, Decision, Role
from autotune.storage import summaries
from autotune.storage.damage import text_in
from autotune.storage.database import Database
from autotune.storage.outbox import Outbox, add_to_outbox, fill_outbox
from autotune.storage.rows import derived_rows, insert_rows
from autotune.storage.summaries import EventRows
from autotune.strategy_space.op_fusion import OpFusionChoice
from autotune.strategy_space.strategy import Strategy
from autotune.tuning.events import (
    Event,
    Profiled,
    Proposed,
    TrialFinished,
    event_from_data,
    event_to_data,
)
from autotune.tuning.figures import JobSummary
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.workload import Workload

T = TypeVar("T")

COVERED = "(SELECT coalesce(max(seq), -1) + 1 FROM event_summaries WHERE job = ?)"
"""The first event of a job without a summary; all before it have one."""
ALL_EVENTS = "SELECT seq, body FROM events WHERE job = ? ORDER BY seq"
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class JobRow:
    """One job in a list. `status` is running (also: interrupted), finished or aborted."""

    id: str
    created_at: str
    status: str
    model: str | None
    trials: int


@dataclass(frozen=True)
class PastTrial:
    """An undisturbed, measured candidate of some job, for training simulators.

    `steady_s`: `median_s` at the machine's usual speed (`History.steady_s`). `given`: the cluster
    of the job's settings; `cluster` has what the probe measured. The others are those of the job
    and its profile, to replay the trial as the job did.
    """

    job_id: str
    strategy: Strategy
    workload: Workload
    cluster: Cluster
    given: Cluster
    median_s: float
    steady_s: float
    accelerators: Accelerators
    software: Mapping[str, str]
    op_fusions: tuple[OpFusionChoice, ...] = ()


class Store:
    """An open store. Use it as a context manager or call `close`; use it from one thread."""

    def __init__(self, database: Database) -> None:
        self.path = database.path
        self.outbox = Outbox(database)
        self.database = database

    @staticmethod
    def open(path: Path) -> Store:
        """Open or create the file and migrate it to this version's schema.

        Raises `InvalidInput` if the file is unusable and `StoreVersionError` if it is newer.
        """
        return Store._prepared(Database.open(path))

    @staticmethod
    def open_to_read(path: Path) -> Store:
        """Open an existing file as `open` does, also one that this user may not write."""
        return Store._prepared(Database.open_to_read(path))

    @staticmethod
    def _prepared(database: Database) -> Store:
        try:
            store = Store(database)
            database.prepare(store._fill_from_version_1)
        except BaseException:
            database.close()
            raise
        return store

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create_job(
        self,
        job_id: str,
        spec: JobSpec,
        numbered: bool = False,
        locks: contextlib.ExitStack | None = None,
    ) -> str:
        """Add a job in state running; return its id.

        If the id is taken, it gets the first free of the endings -2, -3, ... if it may be
        `numbered`. Otherwise, and for an id that is no file name, raises `InvalidInput`.

        `locks` gets the job's lock before others can see the job, so that nobody resumes it.
        """
        if not _JOB_ID.fullmatch(job_id):
            raise InvalidInput(
                "a job id must have up to 100 letters, digits, '.', '_' or '-' and begin with a "
                f"letter or digit, but is {job_id!r}; give another --job"
            )
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with self.database.transaction() as db:
            first_id, number = job_id, 1
            while db.execute("SELECT 1 FROM jobs WHERE id = ?", (job_id,)).fetchone():
                if not numbered:
                    raise InvalidInput(
                        f"job {job_id!r} exists in {self.path}; resume it, or choose another id"
                    )
                number += 1
                job_id = f"{first_id}-{number}"
            db.execute(
                "INSERT INTO jobs (id, spec, created_at) VALUES (?, ?, ?)",
                (job_id, canonical_json(spec), now),
            )
            add_to_outbox(db, job_id, "start", {})
            if locks is not None:
                locks.enter_context(self._file_lock(job_id))
        return job_id

    def job(self, job_id: str) -> JobSpec:
        where = f"job {job_id}"
        return JobSpec.from_data(parse_json(text_in(self._job_row(job_id), "spec"), where), where)

    def created_at(self, job_id: str) -> datetime:
        """When the job was created, UTC."""
        text = text_in(self._job_row(job_id), "created_at")
        try:
            return datetime.fromisoformat(text)
        except ValueError as error:
            raise InvalidInput(
                f"job {job_id} must have an ISO time, but has {text[:40]!r}; restore {self.path}"
            ) from error

    def job_status(self, job_id: str) -> str:
        return str(self._job_row(job_id)["status"])

    def decision(self, job_id: str) -> Decision | None:
        """The decision of a finished job."""
        row, where = self._job_row(job_id), f"decision of job {job_id}"
        if row["decision"] is None:
            return None
        return parse(Decision, parse_json(text_in(row, "decision"), where), where)

    def jobs(self) -> list[JobRow]:
        """All jobs in the order of their creation, whatever the clock was."""
        rows = self.database.rows(
            """SELECT id, created_at, status,
                      (SELECT json_extract(workloads.body, '$.model')
                       FROM trials JOIN workloads ON workloads.id = workload_id
                       WHERE job = jobs.id LIMIT 1) AS model,
                      (SELECT count(*) FROM trials WHERE job = jobs.id) AS trials
               FROM jobs ORDER BY rowid"""
        )
        return [parse(JobRow, dict(row), f"a job of {self.path}") for row in rows]

    def append(self, job_id: str, seq: int, event: Event) -> None:
        """Record event number `seq` (0, 1, ...) and its derived rows in one transaction.

        Raises `InvalidInput` if `seq` is not the next number: another process writes this job.
        The rows are computed before, since a transaction blocks all other writers.
        """
        body = canonical_json(event_to_data(event))
        derived = derived_rows(self.database.rows, job_id, seq, event)
        summarized = self._summary_rows(job_id, seq, event)
        with self.database.transaction() as db:
            expected = db.execute(
                "SELECT coalesce(max(seq), -1) + 1 FROM events WHERE job = ?", (job_id,)
            ).fetchone()[0]
            if seq != expected:
                raise InvalidInput(
                    f"job {job_id!r} expects event {expected}, but got {seq}: another process "
                    "drives it; stop one of the two"
                )
            if db.execute("SELECT 1 FROM jobs WHERE id = ?", (job_id,)).fetchone() is None:
                raise self._no_job(job_id)
            db.execute("INSERT INTO events (job, seq, body) VALUES (?, ?, ?)", (job_id, seq, body))
            insert_rows(db, derived)
            summaries.insert(db, job_id, summarized)
            add_to_outbox(db, job_id, "event", {"seq": seq})

    def _summary_rows(self, job_id: str, seq: int, event: Event) -> list[EventRows]:
        """The event's row for lists; none if an event before it has none."""
        [covered] = self.database.rows(f"SELECT {COVERED}", (job_id,))
        if covered[0] != seq:
            return []
        profiled = self.profiled(job_id) if isinstance(event, Proposed) else None
        return [EventRows.of(seq, event, profiled)]

    def profiled(self, job_id: str) -> Profiled | None:
        """The first profile of a job."""
        query = (
            "SELECT seq, body FROM events WHERE job = ? "
            "AND json_extract(body, '$.kind') = 'profiled' ORDER BY seq LIMIT 1"
        )
        for _, event in self._events(job_id, query):
            assert isinstance(event, Profiled)
            return event
        return None

    def summary(self, job_id: str) -> JobSummary:
        """A job's trials without their step times and strategies."""
        spec, where = self.job(job_id), f"a summary of job {job_id}"
        self.add_missing_summaries(job_id)
        trials = self.database.rows(
            "SELECT body FROM event_summaries WHERE job = ? AND body IS NOT NULL ORDER BY seq",
            (job_id,),
        )
        proposals = self.database.rows("SELECT * FROM proposals WHERE job = ?", (job_id,))
        [(rounds,)] = self.database.rows(
            "SELECT count(*) FROM event_summaries WHERE job = ? AND kind = 'proposed'", (job_id,)
        )
        return JobSummary(
            summaries.parse_trials((text_in(row, "body") for row in trials), where),
            summaries.parse_proposals(proposals, where),
            self.profiled(job_id),
            rounds,
            spec.deviation,
        )

    def missing_summaries(self, job_id: str) -> int:
        """The number of events that were stored without a summary, by an older version."""
        query = f"SELECT count(*) AS missing FROM events WHERE job = ? AND seq >= {COVERED}"
        [row] = self.database.rows(query, (job_id, job_id))
        return int(row["missing"])

    def add_missing_summaries(self, job_id: str) -> None:
        """Derive the summaries of events that have none, in milliseconds per trial."""
        # Not in the transaction: another process may be adding events.
        query = f"SELECT seq, body FROM events WHERE job = ? AND seq >= {COVERED} ORDER BY seq"
        events = self._events(job_id, query, job_id)
        if events:
            rows = summaries.rows_of_job(events, self.profiled(job_id))
            with self.database.transaction() as db:
                summaries.insert(db, job_id, rows)

    def trials(self, job_id: str) -> list[TrialFinished]:
        """All trials of a job with their step times, in order."""
        self.add_missing_summaries(job_id)
        query = (
            "SELECT seq, events.body FROM event_summaries JOIN events USING (job, seq) "
            "WHERE job = ? AND kind = 'trial_finished' ORDER BY seq"
        )
        events = [event for _, event in self._events(job_id, query)]
        return [event for event in events if isinstance(event, TrialFinished)]

    def strategy(self, strategy_id: str) -> Strategy:
        """A strategy that some job proposed."""
        return _Bodies(self.database).get("strategies", Strategy, strategy_id)

    def history(self, job_id: str) -> History:
        """All events of a job with its tolerance."""
        spec = self.job(job_id)
        return History(tuple(event for _, event in self._events(job_id)), spec.deviation)

    def finish(self, job_id: str, decision: Decision | None) -> None:
        """Close a job with its decision (None: aborted). Closing it again changes nothing."""
        status = "aborted" if decision is None else "finished"
        with self.database.transaction() as db:
            if self._job_row(job_id)["status"] != "running":
                return
            text = None if decision is None else canonical_json(decision)
            db.execute(
                "UPDATE jobs SET status = ?, decision = ? WHERE id = ?", (status, text, job_id)
            )
            add_to_outbox(db, job_id, "finish", {})

    def past_trials(self, excluding: str | None = None) -> list[PastTrial]:
        """The past trials of all jobs but `excluding`, oldest job first."""
        bodies = _Bodies(self.database)
        jobs = [job.id for job in self.jobs() if job.id != excluding]
        return [trial for job_id in jobs for trial in self._past_trials(job_id, bodies)]

    def past_trials_of(self, job_id: str) -> list[PastTrial]:
        """Undisturbed, measured candidates of a job.

        First looks are left out, since another trial of the same strategy replaces them.
        """
        return self._past_trials(job_id, _Bodies(self.database))

    def _past_trials(self, job_id: str, bodies: _Bodies) -> list[PastTrial]:
        trials: list[PastTrial] = []
        spec = self.job(job_id)
        rows = self.database.rows(
            "SELECT * FROM trials WHERE job = ? AND role = ? AND status = 'measured' "
            "AND strategy_id != ? ORDER BY number",
            (job_id, Role.CANDIDATE.value, CURRENT_SETUP),
        )
        history = self.history(job_id)  # after the rows, as another process may add a trial
        looks = {trial.request.number for trial in history.candidates if trial.first_look}
        for row in rows:
            number, profiled = row["number"], history.profiled
            if number not in history.disturbed | looks:
                steady_s = history.steady_by_number.get(number)
                if profiled is None or steady_s is None:
                    raise InvalidInput(
                        f"a trial must be among its job's events, behind a profile, but trial "
                        f"{number} of job {job_id} is not; the store is damaged"
                    )
                strategy = bodies.get("strategies", Strategy, row["strategy_id"])
                workload = bodies.get("workloads", Workload, row["workload_id"])
                cluster = bodies.get("clusters", Cluster, row["cluster_id"])
                median_s = parse(float, row["median_s"], f"a trial of job {job_id}")
                trial = PastTrial(
                    job_id=job_id,
                    strategy=strategy,
                    workload=workload,
                    cluster=cluster,
                    given=spec.cluster,
                    median_s=median_s,
                    steady_s=steady_s,
                    accelerators=spec.conditions.accelerators,
                    software=profiled.software,
                    op_fusions=profiled.op_fusions,
                )
                trials.append(trial)
        return trials

    @contextlib.contextmanager
    def lock(self, job_id: str) -> Iterator[None]:
        """Hold the job's lock. The kernel releases it when the process dies for any reason."""
        self._job_row(job_id)
        with self._file_lock(job_id):
            yield

    @contextlib.contextmanager
    def _file_lock(self, job_id: str) -> Iterator[None]:
        path = self.path.with_name(f"{self.path.name}.{job_id}.lock")
        with path.open("a", encoding="utf-8") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InvalidInput(
                    f"job {job_id!r} is being driven by another process; wait for it, or stop it "
                    "and resume"
                ) from error
            yield

    def is_driven(self, job_id: str) -> bool:
        """Whether a process holds the job's lock."""
        try:
            with self.lock(job_id):
                return False
        except InvalidInput:
            return True

    def rebuild(self) -> None:
        """Derive all other tables again from the events."""
        with self.database.transaction() as db:
            self._derive_all(db)

    def _fill_from_version_1(self, db: sqlite3.Connection) -> None:
        self._derive_all(db)
        fill_outbox(db)

    def _derive_all(self, db: sqlite3.Connection) -> None:
        tables = ("trials", "strategies", "workloads", "clusters", "event_summaries", "proposals")
        for table in tables:
            db.execute(f"DELETE FROM {table}")
        for row in db.execute("SELECT id FROM jobs ORDER BY rowid").fetchall():
            events = self._events(row["id"])
            for seq, event in events:
                insert_rows(db, derived_rows(self.database.rows, row["id"], seq, event))
            summaries.insert(db, row["id"], summaries.rows_of_job(events))

    def _events(
        self, job_id: str, query: str = ALL_EVENTS, *parameters: object
    ) -> list[tuple[int, Event]]:
        events = []
        for row in self.database.rows(query, (job_id, *parameters)):
            where = f"event {row['seq']} of job {job_id}"
            data = parse_json(text_in(row, "body"), where)
            events.append((row["seq"], event_from_data(data, where)))
        return events

    def _job_row(self, job_id: str) -> sqlite3.Row:
        rows = self.database.rows("SELECT * FROM jobs WHERE id = ?", (job_id,))
        if not rows:
            raise self._no_job(job_id)
        return rows[0]

    def _no_job(self, job_id: str) -> InvalidInput:
        known = ", ".join(job.id for job in self.jobs()[-5:]) or "none"
        return InvalidInput(
            f"job {job_id!r} is not in {self.path}; the latest jobs there are: {known}"
        )


class _Bodies:
    """Content-addressed rows, each parsed once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._parsed: dict[str, Any] = {}

    def get(self, table: str, kind: type[T], id_: str) -> T:
        if id_ not in self._parsed:
            rows = self._database.rows(f"SELECT body FROM {table} WHERE id = ?", (id_,))
            if not rows:
                path = self._database.path
                raise InvalidInput(f"{path} must hold {id_!r} in {table}, but does not; restore it")
            self._parsed[id_] = parse(kind, parse_json(text_in(rows[0], "body"), id_), str(id_))
        body: T = self._parsed[id_]
        return body
