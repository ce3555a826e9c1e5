"""The trial store: persistence, refusals and migrations."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path
from subprocess import PIPE

import pytest
from synthetic_job import WORKLOAD, SyntheticWorld, decided, job_spec, strategy

from autotune.canonical import canonical_json
from autotune.errors import InvalidInput, StoreVersionError
from autotune.jobs.settings import Settings
from autotune.jobs.tune import created_job, resumed_job
from autotune.jobs.workspace import Workspace, job_to_resume, latest_job, new_job_id
from autotune.records import (
    CURRENT_SETUP,
    Conditions,
    Measured,
    Network,
    Role,
    Stopped,
    TrialRequest,
)
from autotune.storage.database import Database
from autotune.storage.schema import migrations, statements
from autotune.storage.store import Store
from autotune.tuning.events import (
    Event,
    Proposal,
    Proposed,
    TrialFinished,
    event_from_data,
    event_to_data,
)
from autotune.tuning.figures import TrialSummary
from runtime_rewriter.world.script_command import ScriptCommand

WORLD = SyntheticWorld(
    {5: 0.06},
    fails=lambda request: request.strategy_id == strategy(1).id,
    factor=lambda number: 1.5 if 6 <= number <= 10 else 1.0,
)
HISTORY, DECISION = decided(job_spec(), WORLD)
KINDS = ["start", *["event"] * len(HISTORY.events), "finish"]
IMPORTS = """import os, sys; from pathlib import Path
from autotune.storage.store import Store; from autotune.errors import InvalidInput
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs" / "autotune.db"


def record(store, *job_ids):
    for job_id in job_ids:
        store.create_job(job_id, job_spec())
        for seq, event in enumerate(HISTORY.events):
            store.append(job_id, seq, event)
        store.finish(job_id, DECISION)


def derived_rows(path):
    tables = ("trials", "strategies", "workloads", "clusters", "event_summaries", "proposals")
    with sqlite3.connect(path) as db:
        rows = [db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in tables]
    return dict(zip(tables, rows, strict=True))


def kinds(store, job_id="job"):
    return [item.kind for item in store.outbox.waiting(job_id)]


def assert_same_figures(summary, history):
    """The rows of the store say the same as the events."""
    names = "figures round_count tolerance disturbed repeated overruns reference_s reference_noise"
    for name in (*names.split(), "counts", "quality", "overrun_range", "profiled"):
        assert getattr(summary, name) == getattr(history, name), name
    requested = Conditions(network=Network.LOOPBACK)
    assert summary.conditions(requested) == history.conditions(requested)
    assert [trial.interval for trial in summary.trials] == [t.interval for t in history.trials]
    assert list(summary.trials) == [TrialSummary.of(trial) for trial in history.trials]
    for id_, proposal in history.proposals.items():
        assert summary.in_words(id_) == history.in_words(id_) != ""
        assert summary.origin(id_) == proposal.origin


def version_1_file(path):
    """A file of the first version: jobs and events, no derived tables."""
    path.parent.mkdir()
    with sqlite3.connect(path) as db:
        for statement in statements(migrations()[0]):
            db.execute(statement)
        db.execute("PRAGMA user_version = 1")
        spec, decision = canonical_json(job_spec()), canonical_json(DECISION)
        row = ("old", spec, "2024-05-01T12:00:00+00:00", "finished", decision)
        db.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?)", row)
        bodies = [canonical_json(event_to_data(event)) for event in HISTORY.events]
        rows = [("old", seq, body) for seq, body in enumerate(bodies)]
        db.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)


def test_a_job_comes_back_as_it_was_recorded(path):
    with Store.open(path) as store:
        record(store, "job")
    with Store.open(path) as store:
        assert store.job("job") == job_spec()
        assert store.history("job") == HISTORY
        assert store.decision("job") == DECISION and store.job_status("job") == "finished"
        [row] = store.jobs()
        assert (row.id, row.model, row.status) == ("job", "resnet", "finished")
        assert row.trials == len(HISTORY.trials)


def test_an_event_out_of_turn_is_refused_and_changes_nothing(path):
    first, second = HISTORY.events[:2]
    with Store.open(path) as store, Store.open(path) as other:
        store.create_job("job", job_spec())
        with pytest.raises(InvalidInput, match="needs the profile before it"):
            store.append("job", 0, second)
        assert store.history("job").events == () and kinds(store) == ["start"]
        store.append("job", 0, first)
        other.append("job", 1, second)
        rule = "expects event 2, but got 1: another process drives it"
        with pytest.raises(InvalidInput, match=rule):
            store.append("job", 1, second)
        assert store.history("job").events == (first, second)


def test_an_event_is_derived_before_its_transaction_blocks_other_writers(path):
    executed: list[str] = []
    with Store.open(path) as store:
        store.create_job("job", job_spec())
        store.database.connection.set_trace_callback(executed.append)
        for seq, event in enumerate(HISTORY.events):
            store.append("job", seq, event)
    begins = [place for place, statement in enumerate(executed) if statement.startswith("BEGIN")]
    assert len(begins) == len(HISTORY.events)
    for begin in begins:
        inside = executed[begin : executed.index("COMMIT", begin)]
        read = [statement for statement in inside if statement.startswith("SELECT")]
        assert read and not any("body" in statement for statement in read)


@pytest.mark.parametrize("job_id", ["", "../up", ".hidden", "a b", "x" * 101])
def test_a_job_id_must_be_fit_for_a_file_name(path, job_id):
    rule = "begin with a letter or digit.*give another --job"
    with Store.open(path) as store, pytest.raises(InvalidInput, match=rule):
        store.create_job(job_id, job_spec())


@pytest.mark.parametrize(
    ("script", "beginning"),
    [
        ("train", "train-"),
        ("__main__", "main__-"),
        ("_train", "train-"),
        ("train model", "train-model-"),
        ("entraîner", "entra-ner-"),
        ("訓練", "job-"),
        ("x" * 300, "x" * 80 + "-"),
    ],
)
def test_every_script_gives_a_job_id(path, script, beginning):
    job_id = new_job_id(script, datetime(2026, 11, 26, 12, 30))
    assert job_id == f"{beginning}20261126-123000"
    with Store.open(path) as store:
        store.create_job(job_id, job_spec())


def test_the_latest_job_is_the_last_one_also_after_the_clock_was_set_back(path):
    with Store.open(path) as store:
        for job_id in ("first", "last"):
            store.create_job(job_id, job_spec())
        with store.database.transaction() as db:
            db.execute("UPDATE jobs SET created_at = '2001-01-01T00:00:00' WHERE id = 'last'")
        assert [row.id for row in store.jobs()] == ["first", "last"]
        assert latest_job(store) == "last"


def test_jobs_that_begin_in_one_second_are_numbered(path):
    with Store.open(path) as store:
        ids = [store.create_job("job", job_spec(), numbered=True) for _ in range(3)]
        assert ids == ["job", "job-2", "job-3"] == [row.id for row in store.jobs()]


def test_the_job_to_resume_is_the_newest_that_no_process_drives(path):
    with Store.open(path) as store:
        for job_id in ("older", "newer", "ended"):
            store.create_job(job_id, job_spec())
        store.finish("ended", None)
        assert job_to_resume(store) == "newer"
        with store.lock("newer"):
            assert job_to_resume(store) == "older"
            rule = r"every unfinished job in .* is being driven .*\(older, newer\)"
            with store.lock("older"), pytest.raises(InvalidInput, match=rule):
                job_to_resume(store)
        assert job_to_resume(store) == "newer"


def test_a_new_job_has_its_lock_before_others_see_it(path):
    visible_jobs = []

    class Locks(ExitStack):
        def enter_context(self, cm):
            held = super().enter_context(cm)
            visible_jobs.append([row.id for row in other.jobs()])
            return held

    with Store.open(path) as store, Store.open(path) as other:
        with Locks() as locks:
            for numbered in ("job", "job-2"):
                assert store.create_job("job", job_spec(), numbered=True, locks=locks) == numbered
                assert other.is_driven(numbered)
            assert visible_jobs == [[], ["job"]]
        assert not other.is_driven("job") and not other.is_driven("job-2")


def test_a_job_that_another_process_creates_is_not_resumed(path):
    workspace, script = Workspace(path.parent), ScriptCommand("t.py", (), False, None)
    with Store.open(path) as store:
        with created_job(workspace, store, Settings(job_spec(), script), "job"):
            rule = "every unfinished job in .* is being driven by another process"
            with pytest.raises(InvalidInput, match=rule):
                job_to_resume(store)
            resumed = resumed_job(workspace, store, "job", None)
            rule = "job 'job' is being driven by another process"
            with pytest.raises(InvalidInput, match=rule), resumed:
                pass
        assert job_to_resume(store) == "job"


def test_an_ended_job_is_not_resumed(path):
    with Store.open(path) as store:
        record(store, "job")
        rule = r"job 'job' has ended \(finished\); see `autotune show job`"
        resumed = resumed_job(Workspace(path.parent), store, "job", None)
        with pytest.raises(InvalidInput, match=rule), resumed:
            pass


def test_a_new_file_is_opened_as_soon_as_another_process_has_written_it(path):
    path.parent.mkdir()
    attempts = []
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        def traced(statement):
            if "journal_mode" in statement:
                attempts.append(statement)
            if len(attempts) == 2 and other.in_transaction:
                other.execute("COMMIT")

        with closing(Database.open(path)) as database:
            database.connection.set_trace_callback(traced)
            database.prepare(lambda db: None)
            assert len(attempts) == 2
            assert [tuple(row) for row in database.rows("PRAGMA journal_mode")] == [("wal",)]


def test_a_job_id_is_taken_once_and_an_unknown_one_is_named(path):
    with Store.open(path) as store:
        store.create_job("job", job_spec())
        with pytest.raises(InvalidInput, match="exists in"):
            store.create_job("job", job_spec())
        with pytest.raises(InvalidInput, match=r"'jab' is not in .* are: job"):
            store.history("jab")


def test_the_first_decision_stays_and_an_aborted_job_has_none(path):
    with Store.open(path) as store:
        record(store, "job")
        store.finish("job", None)
        assert store.job_status("job") == "finished" and store.decision("job") == DECISION
        store.create_job("aborted", job_spec())
        store.finish("aborted", None)
        assert store.job_status("aborted") == "aborted" and store.decision("aborted") is None


def test_a_file_of_version_1_is_migrated_with_everything_derived(path, tmp_path):
    version_1_file(path)
    with Store.open(path) as store:
        assert store.history("old") == HISTORY and store.decision("old") == DECISION
        assert kinds(store, "old") == KINDS
    fresh = tmp_path / "fresh.db"
    with Store.open(fresh) as store:
        record(store, "old")
    assert derived_rows(path) == derived_rows(fresh)


def test_a_job_of_a_store_without_summaries_is_summarized_when_it_is_read(path):
    with Store.open(path) as store:
        record(store, "job", "other")
    before = derived_rows(path)
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE event_summaries")
        db.execute("DROP TABLE proposals")
        db.execute("PRAGMA user_version = 2")
    with Store.open(path) as store:
        store.create_job("continued", job_spec())
        first, second, *_ = HISTORY.events
        store.append("continued", 0, first)
        store.database.connection.execute("DELETE FROM event_summaries")
        store.append("continued", 1, second)
        assert store.missing_summaries("continued") == 2
        assert store.missing_summaries("job") == len(HISTORY.events)
        for job_id in ("job", "other"):
            assert_same_figures(store.summary(job_id), HISTORY)
            assert store.missing_summaries(job_id) == 0
    after = derived_rows(path)
    assert after["event_summaries"] == before["event_summaries"]
    assert after["proposals"] == before["proposals"]


def test_a_summary_with_an_impossible_number_is_no_overflow(path):
    with Store.open(path) as store:
        record(store, "job")
        store.database.connection.execute(
            f"UPDATE event_summaries SET seq = {2**63 - 1} WHERE seq = 1"
        )
        assert store.missing_summaries("job") == 0
        assert len(store.summary("job").trials) == len(HISTORY.trials)


def test_a_strategy_that_was_never_proposed_is_refused_by_a_summary(path):
    with Store.open(path) as store:
        record(store, "job")
        store.database.connection.execute("DELETE FROM proposals")
        summary = store.summary("job")
    assert summary.in_words(CURRENT_SETUP) == summary.origin(CURRENT_SETUP) == ""
    with pytest.raises(InvalidInput, match="must be proposed after a profile"):
        summary.in_words(strategy(0).id)


def test_a_failing_migration_leaves_the_file_as_it_was(path):
    version_1_file(path)
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE outbox (x)")
    with pytest.raises(InvalidInput):
        Store.open(path)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        assert not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'trials'").fetchone()


def test_a_newer_store_is_refused_with_both_versions_and_the_fix(path):
    Store.open(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    rule = r"version 99, but this autotune reads up to 3; update autotune"
    with pytest.raises(StoreVersionError, match=rule):
        Store.open(path)


def test_rebuilding_from_the_events_gives_the_same_rows(path):
    with Store.open(path) as store:
        record(store, "job")
        before = derived_rows(path)
        store.database.connection.execute("DELETE FROM trials")
        store.rebuild()
    assert derived_rows(path) == before


def test_a_profile_from_before_touched_rows_were_counted_is_rebuilt_with_its_trials(path):
    with Store.open(path) as store:
        record(store, "job")
    profiled = "SELECT seq, body FROM events WHERE json_extract(body, '$.kind') = 'profiled'"
    with sqlite3.connect(path) as db:
        [seq, body] = db.execute(profiled).fetchone()
        profile = json.loads(body)
        for variable in profile["workload"]["variables"]:
            del variable["touched_rows"]
        db.execute("UPDATE events SET body = ? WHERE seq = ?", (json.dumps(profile), seq))
    before = derived_rows(path)
    with Store.open(path) as store:
        store.rebuild()
    assert derived_rows(path) == before


def test_contents_are_held_once_and_past_trials_are_the_good_ones_of_other_jobs(path):
    with Store.open(path) as store:
        record(store, "one", "two")
        past = store.past_trials(excluding="two")
    rows = derived_rows(path)
    assert len(rows["workloads"]) == len(rows["clusters"]) == 1
    assert HISTORY.disturbed and HISTORY.failed

    def in_past(trial):
        failed = trial.request.strategy_id in HISTORY.failed
        return trial.request.number not in HISTORY.disturbed and not failed

    good = [
        (trial.request.strategy_id, trial.outcome.median_s)
        for trial in HISTORY.candidates
        if in_past(trial)
    ]
    assert [(trial.strategy.id, trial.median_s) for trial in past] == good
    assert all(trial.job_id == "one" and trial.workload == WORKLOAD for trial in past)
    steady_s = [HISTORY.steady_s(trial) for trial in HISTORY.candidates if in_past(trial)]
    assert [trial.steady_s for trial in past] == steady_s
    assert steady_s != [trial.median_s for trial in past]
    assert HISTORY.profiled is not None
    for trial in past:
        assert trial.accelerators is job_spec().conditions.accelerators
        assert trial.software == HISTORY.profiled.software


def test_a_first_look_is_no_past_trial(path):
    """Its half of the steps is too noisy, and the strategy is measured again."""
    wobble = tuple(0.1 * (1 + 0.03 * (place % 3)) for place in range(12))
    strategies = [strategy(number) for number in (3, 7)]
    proposals = tuple(Proposal(each, "sampled") for each in strategies)
    events: list[Event] = list(HISTORY.events[:1])
    events.append(Proposed(0, proposals, "replay", "test", 2, (), 2.0))
    for number, first_look in enumerate((0.0, 0.05)):
        request = TrialRequest(
            number,
            strategies[number].id,
            Role.CANDIDATE,
            warmup_steps=1,
            timed_steps=12,
            most_steps=24,
            precision=0.001,
            first_look=first_look,
        )
        stopped = Stopped.PRECISE if first_look else Stopped.CAP
        outcome = Measured((wobble, wobble), 0.0, stopped=stopped)
        trial = TrialFinished(request, outcome, f"plan {number}", 3.0 + number)
        assert trial.first_look is bool(first_look)
        events.append(trial)
    with Store.open(path) as store:
        store.create_job("job", job_spec())
        for seq, event in enumerate(events):
            store.append("job", seq, event)
        past = store.past_trials()
    assert [trial.strategy.id for trial in past] == [strategies[0].id]


def test_a_path_that_is_no_store_is_refused_with_the_fix(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be looked at " * 100)
    for path, rule in (
        (tmp_path, "is a directory; give a path such as"),
        (text, "not an intact SQLite file"),
        (Path("/proc/autotune.db"), "must be readable and writable"),
    ):
        with pytest.raises(InvalidInput, match=rule):
            Store.open(path)


def test_a_damaged_file_is_refused_and_not_overwritten(path):
    with Store.open(path) as store:
        record(store, "job")
    data = bytearray(path.read_bytes())
    data[:100] = b"\x7f" * 100
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match="not an intact SQLite file"):
        Store.open(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("modes", [(0o755, 0o444), (0o555, 0o644)])
def test_a_folder_or_file_without_write_permission_is_refused(tmp_path, modes):
    path = tmp_path / "autotune.db"
    Store.open(path).close()
    tmp_path.chmod(modes[0])
    path.chmod(modes[1])
    code = IMPORTS + (
        "if os.geteuid() == 0: os.setuid(65534)\n"  # root ignores permissions
        "try: Store.open(Path(sys.argv[1]))\n"
        "except InvalidInput as error: print(error)\n"
    )
    ancestors = [folder for folder in tmp_path.parents if not folder.stat().st_mode & 0o001]
    for folder in ancestors:
        folder.chmod(0o711)
    try:
        words = [sys.executable, "-c", code, str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    finally:
        tmp_path.chmod(0o755)
        for folder in ancestors:
            folder.chmod(0o700)
    assert "must be readable and writable" in done.stdout, done.stderr


def test_a_job_is_driven_by_one_process_at_a_time(path):
    code = IMPORTS + (
        "with Store.open(Path(sys.argv[1])) as store, store.lock('job'):\n"
        "    print('locked', flush=True); sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", code, str(path)]
    with Store.open(path) as store:
        store.create_job("job", job_spec())
        store.create_job("other", job_spec())
        with subprocess.Popen(words, stdin=PIPE, stdout=PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            rule = "is being driven by another process"
            with pytest.raises(InvalidInput, match=rule), store.lock("job"):
                pass
            with store.lock("other"):
                pass
            holder.kill()
        with store.lock("job"):
            pass


def test_a_trial_that_counted_restarts_of_horovod_is_still_read():
    trials = [event for event in HISTORY.events if isinstance(event, TrialFinished)]
    trial = next(trial for trial in trials if isinstance(trial.outcome, Measured))
    data = event_to_data(trial)
    data["outcome"]["restarts"] = 1
    assert event_from_data(data) == trial


def test_the_outbox_keeps_its_order_and_forgets_what_was_sent(path):
    with Store.open(path) as store:
        record(store, "job")
        store.outbox.enqueue("job", "artifact", {"path": "report.html"})
        assert kinds(store) == [*KINDS, "artifact"]
        store.outbox.mark_sent("job", 0)
        store.outbox.mark_rejected("job", 1, "too long")
        left = [item.position for item in store.outbox.waiting("job")]
        assert left == list(range(2, len(KINDS) + 1))
        assert store.outbox.rejected("job") == ["too long"]


DAMAGES = {
    "UPDATE jobs SET spec = NULL": "must hold text in column spec",
    "UPDATE jobs SET created_at = 'yesterday'": "must have an ISO time",
    "UPDATE events SET body = x'ff00'": "must hold text in column body",
    "UPDATE events SET body = '3'": "must be an object",
    "UPDATE events SET body = CAST(x'7bff7d' AS TEXT)": "not an intact SQLite file",
    "DELETE FROM strategies": "must hold 'strategy-.*' in strategies",
    "UPDATE trials SET median_s = 'x'": "a trial of job job",
    "UPDATE outbox SET body = '{'": "for the tracking server must be JSON",
    "DROP TABLE outbox": "not an intact SQLite file",
}


@pytest.mark.parametrize("statement", DAMAGES)
def test_a_damaged_row_is_refused_with_its_place(path, statement):
    with Store.open(path) as store:
        record(store, "job")
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute("PRAGMA writable_schema = ON")
        if "NULL" in statement:
            db.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')")
            db.commit()
    with sqlite3.connect(path) as db:
        db.execute(statement)
    with Store.open(path) as store, pytest.raises(InvalidInput, match=DAMAGES[statement]):
        store.created_at("job"), store.history("job"), store.past_trials()
        store.outbox.waiting("job")


def test_pages_that_are_overwritten_are_refused_after_opening(path):
    with Store.open(path) as store:
        record(store, "job")
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    content = path.read_bytes()
    path.write_bytes(content[:8192] + b"\xff" * (len(content) - 8192))
    with pytest.raises(InvalidInput, match="not an intact SQLite file"), Store.open(path) as store:
        for row in store.jobs():
            store.history(row.id)
        store.past_trials()


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/null"])
def test_a_store_must_be_a_regular_file(path, target):
    path.parent.mkdir()
    path.symlink_to(target)
    with pytest.raises(InvalidInput, match="must be a regular file"):
        Store.open(path)


@pytest.mark.parametrize(
    ("pragma", "message"),
    [
        ("max_page_count = 1", r"cannot write to .* is full\); free some space, then resume"),
        ("query_only = ON", r"must be readable and writable .*readonly"),
    ],
)
def test_a_disk_that_fills_up_after_opening_is_named_and_loses_no_event(path, pragma, message):
    with Store.open(path) as store:
        store.create_job("job", job_spec())
        store.database.connection.execute(f"PRAGMA {pragma}")
        with pytest.raises(InvalidInput, match=message):
            for number in range(1000):
                store.create_job(f"job{number}", job_spec())
    with Store.open(path) as store:
        assert store.job("job") == job_spec()


def test_a_store_that_another_process_holds_is_named_after_the_wait(path):
    with Store.open(path) as store, sqlite3.connect(path) as other:
        other.execute("BEGIN EXCLUSIVE")
        store.database.connection.execute("PRAGMA busy_timeout = 0")
        with pytest.raises(InvalidInput, match="has been locked for 30 s; stop the process"):
            store.create_job("job", job_spec())


def test_a_store_that_may_not_be_written_is_read_from_a_copy(path):
    with Store.open(path) as store:
        record(store, "job")
        log = path.with_name(f"{path.name}-wal")
        assert log.stat().st_size > 0
        with pytest.raises(InvalidInput, match=r"its last results are still in .*-wal; let"):
            Database.copied(path)
    files = {file: file.read_bytes() for file in path.parent.iterdir()}
    database = Database.copied(path)
    store = Store(database)
    assert store.decision("job") == DECISION
    assert store.history("job") == HISTORY
    database.prepare(lambda connection: pytest.fail("the copy has this version's schema"))
    store.close()
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == files
