"""Progress and `autotune show` state which strategies a script rules out."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_job import WORKLOAD, job_spec

from autotune.cli import main
from autotune.commands.render.progress import ConsoleProgress
from autotune.jobs.workspace import Workspace
from autotune.storage.store import Store
from autotune.tuning.events import Profiled
from autotune.tuning.history import History

REASON = "gradients are changed [between] backward() and step()"
LIMITS = f"synchronization cannot cross the step: {REASON}"


READ = "the script itself reads 1 of 5 variables between two steps"


def profiled(refused: str) -> Profiled:
    return Profiled(WORKLOAD, job_spec().cluster, 1.0, {"torch": "2.13.0"}, refused)


@pytest.mark.parametrize("refused", ["", REASON])
def test_progress_states_the_limits_of_the_script(refused: str) -> None:
    written = io.StringIO()
    ConsoleProgress(job_spec(), Console(file=written, width=40)).recorded(
        profiled(refused), History((profiled(refused),), 0.15)
    )
    assert written.getvalue().startswith("profiled: 5 variables")
    assert (f"  {LIMITS}\n" in written.getvalue()) is bool(refused)
    assert ("cannot cross" in written.getvalue()) is bool(refused)


@pytest.mark.parametrize("refused", ["", REASON])
def test_show_states_the_limits_of_the_script(capsys, tmp_path: Path, refused: str) -> None:
    workspace = Workspace.create(tmp_path)
    with Store.open(workspace.store_path) as store:
        store.create_job("job", job_spec())
        store.append("job", 0, profiled(refused))
    assert main(["show", "job", "--directory", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert (LIMITS in text) is bool(refused) and ("cannot cross" in text) is bool(refused)
    assert main(["show", "job", "--json", "--directory", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["cross_step_refused"] == refused


@pytest.mark.parametrize("refused", ["", REASON])
def test_reads_of_the_script_are_named_unless_nothing_crosses_the_step(refused: str) -> None:
    first, *others = WORKLOAD.variables
    read = replace(WORKLOAD, variables=(replace(first, script_read_s=0.001), *others))
    limits = replace(profiled(refused), workload=read).limits
    assert limits.startswith(LIMITS if refused else READ)


@pytest.mark.parametrize("refused", ["", REASON])
def test_models_that_are_not_tuned_are_counted(refused: str) -> None:
    limits = replace(profiled(refused), further_models=1).limits
    assert limits.startswith(LIMITS if refused else "only the first")
    assert limits.endswith(
        "only the first of the script's 2 models is tuned; the others keep "
        "their own synchronization"
    )
