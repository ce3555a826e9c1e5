"""The trial store: persistence, refusals and migrations."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_job import WORKLOAD, SyntheticWorld, drive, job_spec, strategy

from autotune.canonical import canonical_json
from autotune.errors import InvalidInput, StoreVersionError
from autotune.storage.store import Store, _migrations, _statements
from autotune.tuning.events import event_to_data
from autotune.tuning.tuner import Finish

FAST = {5: 0.06}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs" / "autotune.db"


def whole_job(**settings):
    world = SyntheticWorld(
        FAST,
        fails=lambda request: request.strategy_id == strategy(1).id,
        factor=lambda number: 1.5 if 6 <= number <= 10 else 1.0,
    )
    return drive(job_spec(**settings), world)


def record(store, job_id="job", **settings):
    history, end = whole_job(**settings)
    store.create_job(job_id, job_spec(**settings))
    for seq, event in enumerate(history.events):
        store.append(job_id, seq, event)
    assert isinstance(end, Finish)
    store.finish(job_id, end.decision)
    return history, end.decision


def derived_rows(path):
    with sqlite3.connect(path) as db:
        tables = ("trials", "strategies", "workloads", "clusters")
        return {
            table: db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in tables
        }


def version_1_file(path, job_id="old"):
    """A file of the first version: jobs and events, no derived tables."""
    history, end = whole_job()
    path.parent.mkdir()
    with sqlite3.connect(path) as db:
        for statement in _statements(_migrations()[0]):
            db.execute(statement)
        db.execute("PRAGMA user_version = 1")
        row = (
            job_id,
            canonical_json(job_spec()),
            "2024-05-01T12:00:00+00:00",
            "finished",
            canonical_json(end.decision),
        )
        db.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?)", row)
        rows = [
            (job_id, seq, canonical_json(event_to_data(event)))
            for seq, event in enumerate(history.events)
        ]
        db.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
    return history, end.decision


def test_a_job_comes_back_as_it_was_recorded(path):
    with Store.open(path) as store:
        history, decision = record(store)
    with Store.open(path) as store:
        assert store.job("job") == job_spec()
        assert store.history("job") == history
        assert store.decision("job") == decision and store.job_status("job") == "finished"
        [row] = store.jobs()
        assert (row.id, row.model, row.trials, row.status) == (
            "job",
            "resnet",
            len(history.trials),
            "finished",
        )


def test_an_event_out_of_turn_is_refused_and_changes_nothing(path):
    history, _ = whole_job()
    with Store.open(path) as store, Store.open(path) as other:
        store.create_job("job", job_spec())
        store.append("job", 0, history.events[0])
        other.append("job", 1, history.events[1])
        with pytest.raises(
            InvalidInput, match="expects event 2, but got 1: another process drives it"
        ):
            store.append("job", 1, history.events[1])
        assert store.history("job").events == history.events[:2]


def test_an_event_that_cannot_be_derived_from_is_not_recorded_at_all(path):
    history, _ = whole_job()
    with Store.open(path) as store:
        store.create_job("job", job_spec())
        with pytest.raises(InvalidInput, match="needs the profile before it"):
            store.append("job", 0, history.events[1])
        assert store.history("job").events == () and [
            item.kind for item in store.waiting("job")
        ] == ["start"]


@pytest.mark.parametrize("job_id", ["", "../up", ".hidden", "a b", "x" * 101])
def test_a_job_id_must_be_fit_for_a_file_name(path, job_id):
    with Store.open(path) as store, pytest.raises(InvalidInput, match="a job id must be"):
        store.create_job(job_id, job_spec())


def test_a_job_id_is_taken_once_and_an_unknown_one_is_named(path):
    with Store.open(path) as store:
        store.create_job("job", job_spec())
        with pytest.raises(InvalidInput, match="exists in"):
            store.create_job("job", job_spec())
        with pytest.raises(InvalidInput, match=r"'jab' is not in .* are: job"):
            store.history("jab")


def test_finishing_twice_keeps_the_first_decision(path):
    with Store.open(path) as store:
        _, decision = record(store)
        store.finish("job", None)
        assert store.job_status("job") == "finished" and store.decision("job") == decision


def test_an_aborted_job_has_no_decision(path):
    with Store.open(path) as store:
        store.create_job("job", job_spec())
        store.finish("job", None)
        assert store.job_status("job") == "aborted" and store.decision("job") is None


def test_a_file_of_version_1_is_migrated_with_everything_derived(path, tmp_path):
    history, decision = version_1_file(path)
    with Store.open(path) as store:
        assert store.history("old") == history and store.decision("old") == decision
        assert [item.kind for item in store.waiting("old")] == [
            "start",
            *["event"] * len(history.events),
            "finish",
        ]
    fresh = tmp_path / "fresh.db"
    with Store.open(fresh) as store:
        record(store, "old")
    assert derived_rows(path) == derived_rows(fresh)


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
    with pytest.raises(
        StoreVersionError, match=r"version 99, but this autotune reads up to 2; update autotune"
    ):
        Store.open(path)


def test_rebuilding_from_the_events_gives_the_same_rows(path):
    with Store.open(path) as store:
        record(store)
        before = derived_rows(path)
        store._db.execute("DELETE FROM trials")
        store.rebuild()
    assert derived_rows(path) == before


def test_a_profile_from_before_touched_rows_were_counted_is_rebuilt_with_its_trials(path):
    with Store.open(path) as store:
        record(store)
    with sqlite3.connect(path) as db:
        [seq, body] = db.execute(
            "SELECT seq, body FROM events WHERE json_extract(body, '$.kind') = 'profiled'"
        ).fetchone()
        profile = json.loads(body)
        for variable in profile["workload"]["variables"]:
            del variable["touched_rows"]
        db.execute("UPDATE events SET body = ? WHERE seq = ?", (json.dumps(profile), seq))
    before = derived_rows(path)
    with Store.open(path) as store:
        store.rebuild()
    assert derived_rows(path) == before


def test_contents_are_held_once_however_many_jobs_use_them(path):
    with Store.open(path) as store:
        record(store, "one")
        record(store, "two")
    rows = derived_rows(path)
    assert len(rows["workloads"]) == len(rows["clusters"]) == 1


def test_past_trials_are_the_undisturbed_measured_candidates_of_the_other_jobs(path):
    with Store.open(path) as store:
        history, _ = record(store, "one")
        record(store, "two")
        past = store.past_trials(excluding="two")
    assert history.disturbed and history.failed
    good = [
        trial
        for trial in history.candidates
        if trial.request.number not in history.disturbed
        and trial.request.strategy_id not in history.failed
    ]
    assert [(trial.strategy.id, trial.median_s) for trial in past] == [
        (t.request.strategy_id, t.outcome.median_s) for t in good
    ]
    assert {trial.job_id for trial in past} == {"one"} and all(
        trial.workload == WORKLOAD for trial in past
    )


def test_a_directory_and_a_foreign_file_are_refused_with_the_fix(tmp_path):
    with pytest.raises(InvalidInput, match="is a directory; give a path such as"):
        Store.open(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be looked at " * 100)
    with pytest.raises(InvalidInput, match="not an intact SQLite file"):
        Store.open(text)


def test_a_damaged_file_is_refused_and_not_overwritten(path):
    with Store.open(path) as store:
        record(store)
    data = bytearray(path.read_bytes())
    data[:100] = b"\x7f" * 100
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match="not an intact SQLite file"):
        Store.open(path)
    assert path.read_bytes() == data


def test_a_place_where_nothing_can_be_written_is_refused():
    with pytest.raises(InvalidInput, match="must be readable and writable"):
        Store.open(Path("/proc/autotune.db"))


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_file_or_directory_without_write_permission_is_refused(tmp_path, what):
    path = tmp_path / "autotune.db"
    Store.open(path).close()
    mode = {"file": (0o755, 0o444), "directory": (0o555, 0o644)}[what]
    tmp_path.chmod(mode[0])
    path.chmod(mode[1])
    code = (
        "import os, sys; from pathlib import Path\n"
        "from autotune.storage.store import Store; from autotune.errors import InvalidInput\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"  # root ignores permissions
        "try: Store.open(Path(sys.argv[1]))\n"
        "except InvalidInput as error: print(error)\n"
    )
    ancestors = [folder for folder in tmp_path.parents if not folder.stat().st_mode & 0o001]
    for folder in ancestors:
        folder.chmod(0o711)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
        )
    finally:
        tmp_path.chmod(0o755)
        for folder in ancestors:
            folder.chmod(0o700)
    assert "must be readable and writable" in done.stdout, done.stderr


def test_a_job_is_driven_by_one_process_at_a_time(path):
    code = (
        "import sys; from pathlib import Path; from autotune.storage.store import Store\n"
        "with Store.open(Path(sys.argv[1])) as store, store.lock('job'):\n"
        "    print('locked', flush=True); sys.stdin.read()\n"
    )
    with Store.open(path) as store:
        store.create_job("job", job_spec())
        store.create_job("other", job_spec())
        holder = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(InvalidInput, match="is being driven by another process"),
            store.lock("job"),
        ):
            pass
        with store.lock("other"):
            pass
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
        with store.lock("job"):
            pass


def test_the_outbox_keeps_its_order_and_forgets_what_was_sent(path):
    with Store.open(path) as store:
        history, _ = record(store)
        store.enqueue("job", "artifact", {"path": "report.html"})
        kinds = [item.kind for item in store.waiting("job")]
        assert kinds == ["start", *["event"] * len(history.events), "finish", "artifact"]
        store.mark_sent("job", 0)
        store.mark_rejected("job", 1, "too long")
        assert [item.position for item in store.waiting("job")] == list(range(2, len(kinds)))
        assert store.rejected("job") == ["too long"]
