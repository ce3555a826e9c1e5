"""The dataset's folder: written trials are read again, even after a kill; bad files are refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic_job import WORKLOAD, strategy

from autotune.cluster import Cluster
from autotune.dataset.columns import SCHEMA, read_table, table_bytes
from autotune.dataset.folder import SUMS, TABLE, Description, read_dataset, read_domain, sum_of
from autotune.dataset.noise import reference_noise, repeat_noise, stalled_share
from autotune.dataset.trials import DatasetTrial, Environment
from autotune.dataset.writing import DomainWriter, opened
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
    """A reference where the source says so, else strategy `number` modulo 32."""
    steps = tuple(step_s * factor for factor in (1.0, 1.01, 0.99, 1.0))
    chosen = None if source == "reference" else strategy(number % 32)
    made = None if chosen is None else plan(chosen, WORKLOAD, 2)
    measured, stolen = Measured((steps, steps), overrun=0.01), None if number % 3 else 0.25
    return DatasetTrial(
        number, source, chosen, made, measured, 0.5, 1e9 + number, session, stolen=stolen
    )


def failed(number: int) -> DatasetTrial:
    return replace(
        trial(number), outcome=Failed(FailureKind.HANG, "rank 1 made no step\nfor 60 s", 1)
    )


def sources(number: int) -> str:
    return "reference" if number % 4 == 0 else "random:lossless"


def write(folder: Path, count: int) -> None:
    """A domain of `count` trials, every fourth a reference, the sixth a failure."""
    with opened(folder) as writer:
        writer.describe(DESCRIPTION)
        writer.begin_session(ENVIRONMENT)
        for number in range(count):
            writer.append(failed(number) if number == 5 else trial(number, source=sources(number)))


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    write(tmp_path / "b", 9)
    write(tmp_path / "a", 2)
    first, second = read_dataset(tmp_path)
    assert [len(first.trials), len(second.trials)] == [2, 9]
    assert (
        second.workload == WORKLOAD
        and second.cluster == Cluster.local(2)
        and second.costs == {"issue_s": 1e-4}
    )
    assert second.environment == ENVIRONMENT and second.sessions[0].id == "0"
    assert (
        second.trials[3] == trial(3)
        and second.trials[5] == failed(5)
        and second.trials[8].strategy is None
    )
    assert second.trials[3].step_s == (0.1, 0.101, 0.099, 0.1) and second.trials[
        5
    ].failure.startswith("hang: rank 1")
    assert second.trials[3].plan == plan(strategy(3), WORKLOAD, 2)


def test_another_program_checks_the_sums(tmp_path: Path) -> None:
    write(tmp_path, 3)
    subprocess.run(
        ["sha256sum", "--check", "--strict", SUMS],
        cwd=tmp_path,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def test_the_card_counts_what_there_is(tmp_path: Path) -> None:
    write(tmp_path, 9)
    text = (tmp_path / "card.md").read_text()
    for part in (
        "6 of 6 strategies, and 3 references",
        "1 hang",
        "emulated network, emulated accelerators",
        "CC-BY-4.0",
        "torch 2.13.0",
    ):
        assert part in text


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
    subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[2], check=True
    )
    folders = sorted(
        (path for path in tmp_path.iterdir() if path.name != "begun"),
        key=lambda path: int(path.name),
    )
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


def test_a_trial_that_was_cut_off_while_it_was_written_is_none(tmp_path: Path) -> None:
    write(tmp_path, 2)
    line = b'{"number":2,"sour'
    (tmp_path / ".work" / "trials.journal").write_bytes(line)
    with opened(tmp_path) as writer:
        assert len(writer.trials) == 2


def test_two_writers_at_once_are_refused(tmp_path: Path) -> None:
    with (
        opened(tmp_path),
        pytest.raises(InvalidInput, match="written by another process"),
        opened(tmp_path),
    ):
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


def _with_table(folder: Path, data: bytes) -> None:
    """With the sum that belongs to it."""
    sums = [line for line in (folder / SUMS).read_text().splitlines() if not line.endswith(TABLE)]
    (folder / TABLE).write_bytes(data)
    (folder / SUMS).write_text("\n".join([*sums, f"{sum_of(data)}  {TABLE}"]) + "\n")


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def _table(folder: Path) -> pa.Table:
    return pq.read_table(folder / TABLE)


def test_foreign_tables_are_refused_though_their_sums_are_right(tmp_path: Path) -> None:
    write(tmp_path, 3)
    whole, table = (
        (tmp_path / TABLE).read_bytes(),
        pa.Table.from_batches(_table(tmp_path).to_batches(), SCHEMA),
    )
    newer, older = (
        table.replace_schema_metadata({b"autotune.dataset": version}) for version in (b"4", b"2")
    )
    numbers = pa.array([0, 1, 7], pa.int32())
    renumbered = table.set_column(0, SCHEMA.field("number"), numbers)
    neither = table.set_column(6, SCHEMA.field("step_s"), pa.nulls(3, SCHEMA.field("step_s").type))
    other_session = table.set_column(
        16, SCHEMA.field("session"), pa.array(["9"] * 3).dictionary_encode()
    )
    wrong = table.set_column(
        3, SCHEMA.field("strategy"), pa.array([None, '{"variables":[]}', None]).dictionary_encode()
    )
    cases = {
        "intact Parquet file": whole[: len(whole) // 2],
        "does not say that it is": _parquet(pa.table({"a": [1]})),
        "reads tables of schema 3, but it has b'4'": _parquet(newer),
        "reads tables of schema 3, but it has b'2'": _parquet(older),
        "columns of schema 3": _parquet(table.drop_columns(["load"])),
        "number its 3 trials": _parquet(renumbered.cast(SCHEMA)),
        "either step times or a failure": _parquet(neither.cast(SCHEMA)),
        "those of '9'": _parquet(other_session.cast(SCHEMA)),
        "at least one variable": _parquet(wrong.cast(SCHEMA)),
    }
    for message, data in cases.items():
        _with_table(tmp_path, data)
        with pytest.raises(InvalidInput, match=message):
            read_domain(tmp_path)


def test_a_plan_of_another_world_is_refused_with_the_fix(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.describe(DESCRIPTION)
        writer.begin_session(ENVIRONMENT)
        writer.append(replace(trial(0), plan=plan(strategy(0), WORKLOAD, 3)))
    with pytest.raises(
        InvalidInput,
        match=r"and 2 ranks, but that of trial 0 is of .* and 3; fetch the whole folder",
    ):
        read_domain(tmp_path)


def test_bytes_that_were_changed_inside_a_table_are_an_error_of_ours() -> None:
    data = bytearray(table_bytes([trial(number) for number in range(20)], {}))
    for at in range(4, len(data), 53):
        broken = bytes([*data[:at], data[at] ^ 0xFF, *data[at + 1 :]])
        try:
            read_table(broken, "table")
        except InvalidInput:
            continue


def test_the_plan_that_was_enacted_is_kept_though_todays_planner_makes_another(
    tmp_path: Path,
) -> None:
    enacted = plan(strategy(3), WORKLOAD, 2)
    with opened(tmp_path) as writer:
        writer.describe(DESCRIPTION)
        writer.begin_session(ENVIRONMENT)
        writer.append(trial(0, source="reference"))
        writer.append(trial(1))
        writer.append(replace(trial(2), plan=enacted))
    assert enacted != plan(strategy(2), WORKLOAD, 2)
    assert read_domain(tmp_path).trials[2].plan == enacted


def _domain_of(writer: DomainWriter, times: list[tuple[str, float]]) -> None:
    writer.describe(DESCRIPTION)
    writer.begin_session(ENVIRONMENT)
    for number, (source, step_s) in enumerate(times):
        writer.append(
            replace(
                trial(number, step_s, source),
                strategy=None if source == "reference" else strategy(1),
                plan=None if source == "reference" else plan(strategy(1), WORKLOAD, 2),
            )
        )


def test_trials_between_references_that_differ_are_marked_and_drifts_are_corrected(
    tmp_path: Path,
) -> None:
    """The machine is steady, then a fifth slower at once, then stays so."""
    times = [
        ("reference", 0.1),
        ("random:lossless", 0.2),
        ("reference", 0.1),
        ("random:lossless", 0.24),
        ("reference", 0.12),
    ]
    times += [("random:lossless", 0.24), ("reference", 0.12)]
    with opened(tmp_path) as writer:
        _domain_of(writer, times)
    domain = read_domain(tmp_path)
    assert [own.number for own in domain.trials if own.disturbed] == [3]
    assert domain.steady_s[1] == pytest.approx(domain.steady_s[5])


def test_noise_is_what_repeats_and_references_differ_by(tmp_path: Path) -> None:
    noise = [1.0, 1.02, 0.99, 1.01, 0.98, 1.0, 1.02]
    times = [
        part for factor in noise for part in (("reference", 0.1), ("random:lossless", 0.2 * factor))
    ]
    with opened(tmp_path) as writer:
        _domain_of(writer, times)
    domain = read_domain(tmp_path)
    assert reference_noise(domain) == pytest.approx(0.0, abs=1e-12)
    assert repeat_noise(domain) == pytest.approx(0.024, abs=0.01)


def test_steps_that_take_much_longer_than_their_trials_others_have_stalled() -> None:
    usual, stalled = (
        trial(1),
        replace(trial(2), outcome=Measured(((0.1, 0.1, 0.2, 0.1), (0.1, 0.1, 0.1, 0.13)))),
    )
    assert stalled_share([usual, stalled]) == 1 / 8 and stalled_share([usual]) == 0.0
    assert stalled_share([failed(5)]) is None


def test_importing_the_package_needs_no_pyarrow() -> None:
    code = "import sys, autotune; assert 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
