"""The dataset's folder: written trials are read again, even after a kill; bad files are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic_job import WORKLOAD, strategy

from autotune.canonical import canonical_json
from autotune.cluster import Cluster
from autotune.dataset.columns import SCHEMA, read_table, table_bytes
from autotune.dataset.folder import (
    CARD,
    SUMS,
    TABLE,
    Description,
    read_dataset,
    read_domain,
    sum_of,
)
from autotune.dataset.noise import reference_noise, repeat_noise, stalled_share
from autotune.dataset.trials import DatasetTrial, Domain, Environment
from autotune.dataset.writing import opened
from autotune.errors import InvalidInput
from autotune.records import Accelerators, Conditions, Failed, FailureKind, Measured, Network
from autotune.strategy_space.plan import plan

CONDITIONS = Conditions(Network.EMULATED, Accelerators.EMULATED)
ENVIRONMENT = Environment(CONDITIONS, {"torch": "2.13.0"}, 2, "x86_64", "6.1")
DESCRIPTION = Description(
    "small.local", "small", "local", WORKLOAD, Cluster.local(2), {"issue_s": 1e-4}, 2, ()
)


def trial(
    number: int, step_s: float = 0.1, source: str = "random:lossless", session: str = "0"
) -> DatasetTrial:
    """A reference if the source is one, else strategy `number` modulo 32."""
    steps = tuple(step_s * factor for factor in (1.0, 1.01, 0.99, 1.0))
    chosen = None if source == "reference" else strategy(number % 32)
    enacted = None if chosen is None else plan(chosen, WORKLOAD, 2)
    measured, stolen = Measured((steps, steps), overrun=0.01), None if number % 3 else 0.25
    timing = (measured, 0.5, 1e9 + number, session)
    return DatasetTrial(number, source, chosen, enacted, *timing, stolen=stolen)


def failed(number: int) -> DatasetTrial:
    hang = Failed(FailureKind.HANG, "rank 1 made no step\nfor 60 s", 1)
    return replace(trial(number), outcome=hang)


def write_trials(folder: Path, trials: Iterable[DatasetTrial]) -> None:
    with opened(folder) as writer:
        writer.describe(DESCRIPTION)
        writer.begin_session(ENVIRONMENT)
        for each in trials:
            writer.append(each)


def write(folder: Path, count: int) -> None:
    """Write `count` trials, every fourth a reference, the sixth a failure."""
    sources = ["random:lossless" if number % 4 else "reference" for number in range(count)]
    trials = [trial(number, source=source) for number, source in enumerate(sources)]
    write_trials(folder, [failed(5) if each.number == 5 else each for each in trials])


def test_written_trials_are_read_again(tmp_path: Path) -> None:
    write(tmp_path / "b", 9)
    write(tmp_path / "a", 2)
    first, second = read_dataset(tmp_path)
    assert [len(first.trials), len(second.trials)] == [2, 9]
    assert (second.workload, second.cluster) == (WORKLOAD, Cluster.local(2))
    assert second.costs == {"issue_s": 1e-4}
    assert second.environment == ENVIRONMENT and second.sessions[0].id == "0"
    whole, hang, reference = (second.trials[number] for number in (3, 5, 8))
    assert (whole, hang, reference.strategy) == (trial(3), failed(5), None)
    assert whole.step_s == (0.1, 0.101, 0.099, 0.1) and hang.failure.startswith("hang: rank 1")
    assert whole.plan == plan(strategy(3), WORKLOAD, 2)


def test_another_program_checks_the_sums(tmp_path: Path) -> None:
    write(tmp_path, 3)
    command = ["sha256sum", "--check", "--strict", SUMS]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


def test_the_card_counts_the_trials_and_names_their_conditions(tmp_path: Path) -> None:
    write(tmp_path, 9)
    parts = ["6 of 6 strategies, and 3 references", "1 hang", "CC-BY-4.0", "torch 2.13.0"]
    text = (tmp_path / "card.md").read_text()
    assert all(part in text for part in [*parts, "emulated network, emulated accelerators"])


KILLED = """
import os, pathlib, shutil, signal, sys
sys.path += ["tests", "tests/unit"]
import test_dataset as t
from autotune.dataset import writing

counting = changes = 0

def counted(change, last):
    def call(*args, **options):
        global changes
        changes += counting
        if counting and changes == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return change(*args, **options)
    return call

def child(folder, last):
    global counting
    for place, name in ((os, "fsync"), (pathlib.Path, "replace"), (pathlib.Path, "unlink")):
        setattr(place, name, counted(getattr(place, name), last))
    with writing.opened(folder) as writer:
        counting = 1
        for number in range(2):
            writer.append(t.trial(number))
            (folder / "finished").write_text(str(number + 1))
    os._exit(0)

begun = pathlib.Path(sys.argv[1]) / "begun"
t.write(begun, 0)
for last in range(1, 30):
    folder = begun.with_name(str(last))
    shutil.copytree(begun, folder)
    if (pid := os.fork()) == 0:
        child(folder, last)
    if os.waitpid(pid, 0)[1] == 0:
        break
"""


def test_a_writer_killed_at_any_change_of_the_disk_loses_no_finished_trial(tmp_path: Path) -> None:
    """The writer is killed before its first, second, ... change; then another writer goes on."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    folders = {path for path in tmp_path.iterdir() if path.name != "begun"}
    assert 12 < len(folders) < 29  # the last one was not killed
    for folder in folders:
        finished = int((folder / "finished").read_text()) if (folder / "finished").exists() else 0
        assert len(read_domain(folder).trials) in (0, 2)
        with opened(folder) as writer:
            assert finished <= len(writer.trials) <= 2
        assert len(read_domain(folder).trials) == len(writer.trials)
        assert not list(folder.glob("*.new"))


def test_a_reader_between_two_renames_gets_the_new_table(tmp_path: Path) -> None:
    write(tmp_path, 4)
    old = (tmp_path / TABLE).read_bytes()
    with opened(tmp_path) as writer:
        writer.append(trial(4, source="reference"))
    (tmp_path / TABLE).rename(tmp_path / (TABLE + ".new"))
    (tmp_path / TABLE).write_bytes(old)
    assert len(read_domain(tmp_path).trials) == 5
    with opened(tmp_path) as writer:
        assert len(writer.trials) == 5
    assert not (tmp_path / (TABLE + ".new")).exists()


def test_a_trial_that_was_cut_off_as_it_was_written_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, 2)
    (tmp_path / ".work" / "trials.journal").write_bytes(b'{"number":2,"sour')
    with opened(tmp_path) as writer:
        assert len(writer.trials) == 2


def test_a_message_with_other_line_breaks_is_read_from_the_journal(tmp_path: Path) -> None:
    write(tmp_path, 2)
    hang = Failed(FailureKind.HANG, "first\u2028second\x85third\r\nfourth")
    line = canonical_json(replace(trial(2), outcome=hang))
    (tmp_path / ".work" / "trials.journal").write_text(f"{line}\n", encoding="utf-8")
    with opened(tmp_path) as writer:
        assert writer.trials[2].outcome == hang
    assert read_domain(tmp_path).trials[2].outcome == hang


def test_two_writers_at_once_are_refused(tmp_path: Path) -> None:
    refused = pytest.raises(InvalidInput, match="written by another process")
    with opened(tmp_path), refused, opened(tmp_path):
        pass


def test_trials_under_other_conditions_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    real = replace(ENVIRONMENT, conditions=replace(CONDITIONS, accelerators=Accelerators.REAL))
    with opened(tmp_path) as writer:
        with pytest.raises(InvalidInput, match="another folder"):
            writer.begin_session(real)
        assert writer.begin_session(replace(ENVIRONMENT, kernel="6.2")).id == "1"


def test_a_changed_or_cut_off_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 3)
    for name in (TABLE, "domain.json"):
        folder = tmp_path.parent / f"{tmp_path.name}-{name}"
        shutil.copytree(tmp_path, folder)
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-7])
        with pytest.raises(InvalidInput, match=f"{name} must have the sum"):
            read_domain(folder)
        (folder / name).unlink()
        with pytest.raises(InvalidInput, match="no such file"):
            read_domain(folder)


def _with_card(folder: Path, **change: Any) -> None:
    """Change fields of the card, and its sum with them."""
    path = folder / CARD
    before = path.read_bytes()
    path.write_bytes(json.dumps({**json.loads(before), **change}).encode())
    sums = (folder / SUMS).read_text().replace(sum_of(before), sum_of(path.read_bytes()))
    (folder / SUMS).write_text(sums)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": 8}, "card.json: candidates must be 6, .* but is 8; fetch the whole"),
        (
            {"model": "other"},
            "model must be 'small', as the domain's files have it, but is 'other'",
        ),
        ({"references": -1}, "references of the card of 'small.local' must be from 0 to 1000000"),
        ({"fastest_s": -0.5}, r"fastest_s of the card .* \(seconds\) must be from 0 to"),
        ({"repeat_noise": -1}, "noise on the card of 'small.local' must be from 0 to"),
        ({"timed_steps": [4]}, "timed_steps"),
        ({"failed": {"hang": -2}}, "counts on the card of 'small.local' must be from 0 to"),
        ({"stars": 5}, "unknown field 'stars'"),
        ({"schema": 2}, "reads card schema 1, but the file has 2; update autotune"),
    ],
)
def test_a_card_that_is_not_true_is_refused(tmp_path: Path, change, message) -> None:
    write(tmp_path / "domain", 9)
    read_domain(tmp_path / "domain")
    _with_card(tmp_path / "domain", **change)
    with pytest.raises(InvalidInput, match=message):
        read_domain(tmp_path / "domain")


def _with_table(folder: Path, data: bytes) -> None:
    """Replace the table and its sum."""
    sums = [line for line in (folder / SUMS).read_text().splitlines() if not line.endswith(TABLE)]
    (folder / TABLE).write_bytes(data)
    (folder / SUMS).write_text("\n".join([*sums, f"{sum_of(data)}  {TABLE}"]) + "\n")


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def test_foreign_tables_are_refused_although_their_sums_are_right(tmp_path: Path) -> None:
    write(tmp_path, 3)
    whole = (tmp_path / TABLE).read_bytes()
    table = pa.Table.from_batches(pq.read_table(tmp_path / TABLE).to_batches(), SCHEMA)

    def version(number: bytes) -> bytes:
        return _parquet(table.replace_schema_metadata({b"autotune.dataset": number}))

    def column(name: str, values: pa.Array) -> bytes:
        at = SCHEMA.get_field_index(name)
        return _parquet(table.set_column(at, SCHEMA.field(name), values).cast(SCHEMA))

    no_times = pa.nulls(3, SCHEMA.field("step_s").type)
    sessions = pa.array(["9"] * 3).dictionary_encode()
    strategies = pa.array([None, '{"variables":[]}', None]).dictionary_encode()
    cases = {
        "intact Parquet file": whole[: len(whole) // 2],
        "does not say that it is": _parquet(pa.table({"a": [1]})),
        "reads tables of schema 3, but it has b'4'": version(b"4"),
        "reads tables of schema 3, but it has b'2'": version(b"2"),
        "columns of schema 3": _parquet(table.drop_columns(["load"])),
        "number its 3 trials": column("number", pa.array([0, 1, 7], pa.int32())),
        "either step times or a failure": column("step_s", no_times),
        "those of '9'": column("session", sessions),
        "at least one variable": column("strategy", strategies),
    }
    for message, data in cases.items():
        _with_table(tmp_path, data)
        with pytest.raises(InvalidInput, match=message):
            read_domain(tmp_path)


def test_a_plan_of_another_world_is_refused_with_the_fix(tmp_path: Path) -> None:
    write_trials(tmp_path, [replace(trial(0), plan=plan(strategy(0), WORKLOAD, 3))])
    reason = r"and 2 ranks, but that of trial 0 is of .* and 3; fetch the whole folder"
    with pytest.raises(InvalidInput, match=reason):
        read_domain(tmp_path)


def test_changed_bytes_inside_a_table_raise_no_foreign_error() -> None:
    data = bytearray(table_bytes([trial(number) for number in range(20)], {}))
    for at in range(4, len(data), 53):
        broken = bytes([*data[:at], data[at] ^ 0xFF, *data[at + 1 :]])
        with suppress(InvalidInput):
            read_table(broken, "table")


def test_the_enacted_plan_is_kept_although_todays_planner_differs(tmp_path: Path) -> None:
    enacted = plan(strategy(3), WORKLOAD, 2)
    reference = trial(0, source="reference")
    write_trials(tmp_path, [reference, trial(1), replace(trial(2), plan=enacted)])
    assert enacted != plan(strategy(2), WORKLOAD, 2)
    assert read_domain(tmp_path).trials[2].plan == enacted


def _domain_of(folder: Path, steps_s: Iterable[float]) -> Domain:
    """Write and read a domain whose trials are a reference and a strategy in turn."""
    chosen: dict[str, Any] = {"strategy": strategy(1), "plan": plan(strategy(1), WORKLOAD, 2)}
    trials = [
        replace(trial(number, step_s), **chosen)
        if number % 2
        else trial(number, step_s, "reference")
        for number, step_s in enumerate(steps_s)
    ]
    write_trials(folder, trials)
    return read_domain(folder)


def test_a_trial_between_unequal_references_is_marked_and_drift_corrected(tmp_path: Path) -> None:
    """The machine is steady, then a fifth slower at once, then stays so."""
    domain = _domain_of(tmp_path, [0.1, 0.2, 0.1, 0.24, 0.12, 0.24, 0.12])
    assert [trial.number for trial in domain.trials if trial.disturbed] == [3]
    assert domain.steady_s[1] == pytest.approx(domain.steady_s[5])


def test_noise_is_the_difference_of_repeats_and_of_references(tmp_path: Path) -> None:
    noise = [1.0, 1.02, 0.99, 1.01, 0.98, 1.0, 1.02]
    domain = _domain_of(tmp_path, [step_s for factor in noise for step_s in (0.1, 0.2 * factor)])
    assert reference_noise(domain) == pytest.approx(0.0, abs=1e-12)
    assert repeat_noise(domain) == pytest.approx(0.024, abs=0.01)


def test_steps_much_longer_than_their_trials_others_have_stalled() -> None:
    usual = trial(1)
    times = Measured(((0.1, 0.1, 0.2, 0.1), (0.1, 0.1, 0.1, 0.13)))
    stalled = replace(trial(2), outcome=times)
    assert stalled_share([usual, stalled]) == 1 / 8 and stalled_share([usual]) == 0.0
    assert stalled_share([failed(5)]) is None


def test_importing_the_package_needs_no_pyarrow() -> None:
    code = "import sys, autotune; assert 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


@pytest.mark.parametrize("wrong", [{"time_s": 1e308}, {"time_s": -1.0}, {"load": float("nan")}])
def test_a_trial_has_a_time_that_a_card_can_show(wrong):
    values = {"load": 0.0, "time_s": 0.0, **wrong}
    outcome = Measured(((0.1,),))
    with pytest.raises(InvalidInput, match=f"{'time' if 'time_s' in wrong else 'load'}.* must be"):
        DatasetTrial(0, "reference", None, None, outcome, session="s", **values)
