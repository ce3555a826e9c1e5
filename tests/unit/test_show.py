"""`autotune show`: one line per trial that fits the terminal, the winner marked, one count."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_job import SyntheticWorld, drive, job_spec, strategy

from autotune.canonical import to_data
from autotune.commands import show
from autotune.commands.render.tables import plain_table
from autotune.errors import InvalidInput
from autotune.jobs.exports import chosen_decision
from autotune.jobs.results import job_facts
from autotune.jobs.workspace import Workspace
from autotune.records import CURRENT_SETUP, Measured, Role, TrialRequest
from autotune.storage.store import Store
from autotune.tuning.events import TrialFinished
from autotune.tuning.history import History
from autotune.tuning.instructions import Finish

SPEC = job_spec()
LINE = "predicted 60 ms, measured 61 ms (+1.7%: within ± 2%, the noise of measurements)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jobs")
    world = SyntheticWorld({5: 0.06}, factor=lambda number: 1.5 if 6 <= number <= 10 else 1.0)
    history, end = drive(SPEC, world)
    assert isinstance(end, Finish) and end.decision.strategy_id != CURRENT_SETUP
    assert history.disturbed
    with Store.open(path / "autotune.db") as store:
        store.create_job("job", SPEC)
        for seq, event in enumerate(history.events):
            store.append("job", seq, event)
        store.finish("job", replace(end.decision, explanation=LINE))
    return path


def options(folder: Path, **others: Any) -> Namespace:
    return Namespace(**{"directory": folder, "job": "job", "json": False, "report": False} | others)


def shown(folder: Path, monkeypatch: pytest.MonkeyPatch, width: int | None) -> list[str]:
    monkeypatch.setattr(show, "terminal_width", lambda: width)
    data, text = show.run(options(folder))
    lines: list[str] = text.splitlines()
    assert data == {}
    return lines


@pytest.mark.parametrize("width", [80, 100, 132, None])
def test_every_trial_is_one_line_that_fits(folder, monkeypatch, width) -> None:
    lines = shown(folder, monkeypatch, width)
    with Store.open(folder / "autotune.db") as store:
        history, decision = store.history("job"), store.decision("job")
        counted = store.jobs()[0].trials
    assert decision is not None and counted == len(history.trials)
    rows = lines[1 : 1 + len(history.trials)]
    assert width is None or all(len(line) <= width for line in lines[: len(rows) + 1])
    marked = [line.split()[1] for line in rows if line.startswith("*")]
    winners = [t for t in history.trials if t.request.strategy_id == decision.strategy_id]
    assert marked == [str(trial.request.number) for trial in winners] and winners
    words = history.in_words(decision.strategy_id)
    assert all(words[:20] in row for row in rows if row.startswith("*"))
    assert ("quartiles" in lines[0]) is (width is None or width > 120)
    assert f"why: {LINE}" in lines
    assert f"trials   {history.counts}" in lines and history.counts.startswith(f"{counted} (")


def test_the_data_hold_every_trial_with_its_step_times(folder) -> None:
    data, text = show.run(options(folder, json=True))
    with Store.open(folder / "autotune.db") as store:
        history = store.history("job")
    assert text == "" and data["trial_count"] == len(history.trials)
    expected = [
        to_data(trial)
        | {
            "disturbed": trial.request.number in history.disturbed,
            "interval": to_data(trial.interval),
        }
        for trial in history.trials
    ]
    assert data["trials"] == expected
    assert Path(data["report"]).is_file()


def test_the_report_of_an_undecided_job_is_written_when_asked_for(folder, tmp_path) -> None:
    with Store.open(tmp_path / "autotune.db") as store, Store.open(folder / "autotune.db") as old:
        store.create_job("job", SPEC)
        for seq, event in enumerate(old.history("job").events[:4]):
            store.append("job", seq, event)
    _, text = show.run(options(tmp_path))
    assert text.endswith("report: `autotune show job --report` writes it")
    assert show.run(options(tmp_path, json=True))[0]["report"] is None
    assert not (tmp_path / "job").exists()
    data, _ = show.run(options(tmp_path, json=True, report=True))
    assert Path(data["report"]).is_file()
    with pytest.raises(InvalidInput, match="--report needs a job"):
        show.run(options(tmp_path, job=None, report=True))


def test_an_undecided_job_is_to_be_resumed_and_an_aborted_one_is_not(tmp_path) -> None:
    with Store.open(tmp_path / "autotune.db") as store:
        store.create_job("job", SPEC)
        assert "; `autotune tune --resume job` continues" in show.run(options(tmp_path))[1]
        with pytest.raises(InvalidInput, match="resume it with `autotune tune --resume job`"):
            chosen_decision(store, "job", None)
        store.finish("job", None)
        _, text = show.run(options(tmp_path))
        assert "job (aborted): nothing was decided, since the current setup failed" in text
        assert "--resume" not in text
        with pytest.raises(InvalidInput, match=r"its current setup failed; .* start a new job"):
            chosen_decision(store, "job", None)


def test_a_strategy_that_failed_in_a_later_trial_is_not_exported(tmp_path) -> None:
    def fails(request: TrialRequest) -> bool:
        return request.strategy_id == strategy(5).id and request.role is Role.AB

    history, _ = drive(SPEC, SyntheticWorld({5: 0.06}, fails=fails))
    failed = history.failed[strategy(5).id]
    assert strategy(5).id in history.measured_s
    with Store.open(tmp_path / "autotune.db") as store:
        store.create_job("job", SPEC)
        for seq, event in enumerate(history.events):
            store.append("job", seq, event)
        rule = rf"failed in trial {failed.request.number} \(crash: rank 1 exited with code 1\)"
        with pytest.raises(InvalidInput, match=rule):
            chosen_decision(store, "job", strategy(5).id)
        fastest, _ = history.ranking()[0]
        assert chosen_decision(store, "job", fastest).strategy_id == fastest


def test_show_imports_nothing_that_computes() -> None:
    heavy = "{'torch', 'ray', 'mlflow', 'numba', 'scipy', 'sklearn'}"
    code = f"import sys, autotune.commands.show; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_counts_of_all_roles_add_up() -> None:
    history, _ = drive(SPEC, SyntheticWorld({5: 0.06}))
    numbers = [
        int(word.strip("(),")) for word in history.counts.split() if word.strip("(,").isdigit()
    ]
    assert numbers[0] == len(history.trials) == sum(numbers[1:])


def test_the_overrun_of_emulated_accelerators_is_a_fact() -> None:
    history, _ = drive(SPEC, SyntheticWorld({5: 0.06}))
    assert [fact.split()[0] for fact in job_facts(history)] == ["trials"]
    late = tuple(
        replace(event, outcome=replace(event.outcome, overrun=0.02))
        if isinstance(event, TrialFinished) and isinstance(event.outcome, Measured)
        else event
        for event in history.events
    )
    facts = job_facts(History(late, SPEC.deviation))
    assert facts[1] == (
        "overrun  emulated accelerators were late by 2.0% to 2.0% of the profile's step"
    )


def test_spare_columns_go_before_the_last_one_is_cut() -> None:
    header = ("name", "spare", "more", "text")
    rows = [("a", "#" * 20, "=" * 20, "z" * 40)]
    wide = plain_table(header, rows, 200, ("spare", "more"))
    assert "#" in wide and "=" in wide
    narrower = plain_table(header, rows, 70, ("spare", "more"))
    assert "#" not in narrower and "=" in narrower and "z" * 36 in narrower
    narrow = plain_table(header, rows, 30, ("spare", "more"))
    assert narrow.splitlines()[1].endswith("z…") and max(map(len, narrow.splitlines())) == 30


def test_a_job_has_no_folder_before_its_first_file(tmp_path) -> None:
    workspace = Workspace.create(tmp_path / "jobs")
    assert not workspace.job("job").exists()
