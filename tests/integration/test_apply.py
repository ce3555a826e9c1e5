"""`autotune.apply`, the one line in a training script: bitwise as DDP, tunable, checked."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from short_jobs import START_S
from torch_scripts import again_if_aborted, run_ranks, run_script

import autotune
from autotune.cli import main
from autotune.cluster import Cluster
from autotune.errors import InvalidInput, LaunchError, SynchronizationError
from autotune.export import Export, read_export
from autotune.strategy_space.builders.collectives import single_bucket, zero2_like
from autotune.strategy_space.builders.servers import ps_round_robin
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload
from runtime_rewriter.active import active_session
from runtime_rewriter.control import ControlLine
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.ddp import replaced_ddp
from runtime_rewriter.pytorch.exchange.ranks import (
    TRAINING_TIMEOUTS,
    TUNING_TIMEOUTS,
    SynchronizerGroups,
)
from runtime_rewriter.rank.exported import ExportSession
from runtime_rewriter.rank.session import TuningSession

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "train_apply.py"
LAUNCHER = SCRIPT.with_name("run_own_export.py")


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(SCRIPT), *words]
    return run_script(command, cwd=ROOT, timeout=START_S)


def two_ranks(*words: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    return run_ranks([str(script), *words], 2)


def digests(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert done.returncode == 0, done.stderr
    by_rank = re.findall(r"digest \d ([0-9a-f]{64})", done.stdout)
    assert len(by_rank) == 2
    return set(by_rank)


@pytest.fixture
def tuned(tmp_path: Path) -> tuple[Path, str]:
    """An export for the script, and the id of its strategy.

    `test_tune_command.py` tunes the script.
    """
    path = tmp_path / "chosen.json"
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    export = exported(model, path, zero2_like, ranks=2)
    assert export.strategy is not None
    return path, export.strategy.id


def test_an_applied_export_trains_to_the_same_bits_as_ddp(tuned) -> None:
    path, tried = tuned
    assert read_export(path).strategy.id == tried
    with_export = digests(torchrun("--steps", "5", "--strategy", str(path)))
    without = digests(two_ranks("--steps", "5"))
    with_ddp = digests(two_ranks("--steps", "5", "--with-ddp"))
    assert with_export == without == with_ddp
    assert len(with_ddp) == 1


def test_an_applied_export_that_crosses_the_step_clips_as_ddp(tmp_path) -> None:
    """The script clips by the global norm, so the results of each exchange cross, not its sums."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    path = tmp_path / "crossing.json"
    export = exported(model, path, across_the_step, ranks=2, reads_norms=True)
    planned = export.plan()
    assert planned is not None and planned.results is not None
    with_export = digests(two_ranks("--steps", "5", "--strategy", str(path)))
    assert with_export == digests(two_ranks("--steps", "5", "--with-ddp"))


def across_the_step(workload: Workload) -> Strategy:
    """Each variable is owned whole, so that the norm has the bits of DDP's."""
    return replace(ps_round_robin(workload, Cluster.local(2)), cross_step=True)


def test_another_model_is_refused_with_the_difference_named(tuned, tmp_path) -> None:
    """In the `apply` line, and under `autotune run` when the script builds its DDP."""
    path, _ = tuned
    for rank in range(2):
        shutil.copy(path, tmp_path / f"rank{rank}.json")
    other = ("--steps", "5", "--width", "48")
    applied = two_ranks(*other, "--strategy", str(path))
    launched = two_ranks(str(tmp_path), str(SCRIPT), *other, "--with-ddp", script=LAUNCHER)
    for refused in (applied, launched):
        assert refused.returncode != 0
        assert "ModelMismatch" in refused.stderr
        assert "0.weight is float32[48, 32] instead of float32[64, 32]" in refused.stderr


def test_ranks_with_different_exports_raise_before_the_first_step(tuned, tmp_path) -> None:
    """One export keeps the current setup, without a plan; with DDP, as under `autotune run`."""
    path, _ = tuned
    replace(read_export(path), strategy=None, plan_id=None).write(tmp_path / "rank0.json")
    replace(read_export(path), reason="copied").write(tmp_path / "rank1.json")
    mixed = two_ranks(str(tmp_path), str(SCRIPT), "--steps", "5", "--with-ddp", script=LAUNCHER)
    assert mixed.returncode != 0
    rule = "PlanMismatch: every rank must hold the same plan"
    assert f"{rule}, but rank 0 holds no plan, rank 1 holds plan-" in mixed.stderr


def test_an_edited_export_is_refused(tuned, tmp_path) -> None:
    path, _ = tuned
    data = json.loads(path.read_text())
    data["world_size"] = 3
    (tmp_path / "edited.json").write_text(json.dumps(data))
    with pytest.raises(InvalidInput, match="was changed after autotune wrote it"):
        read_export(tmp_path / "edited.json")
    replace(read_export(path), reason="written again").write(tmp_path / "again.json")
    assert read_export(tmp_path / "again.json").reason == "written again"


def test_apply_without_a_process_group_names_the_fix() -> None:
    fix = r"call torch\.distributed\.init_process_group before it"
    with pytest.raises(InvalidInput, match=fix):
        autotune.apply(torch.nn.Linear(2, 2))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def exported(
    model: torch.nn.Module,
    path: Path,
    build: Callable[[Workload], Strategy] = single_bucket,
    ranks: int = 1,
    reads_norms: bool = False,
) -> Export:
    workload = replace(assumed_workload(model), reads_norms=reads_norms)
    strategy = build(workload)
    export = Export(
        "job",
        "2026-01-01T00:00:00+00:00",
        workload.model,
        workload.variables,
        ranks,
        strategy,
        plan(strategy, workload, ranks).id,
        False,
        "chosen",
        None,
        None,
        None,
        None,
        Cluster.local(ranks),
        {},
        reads_norms=reads_norms,
    )
    export.write(path)
    return export


def linear(width: int = 3) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 1))


class Branches(torch.nn.Module):
    """A forward pass uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        output: torch.Tensor = self.layers[branch](inputs)
        return output


@pytest.mark.parametrize("finds", [False, True])
def test_an_applied_model_may_leave_parameters_unused_if_the_script_says_so(
    finds: bool, alone: None, tmp_path: Path
) -> None:
    model = Branches()
    exported(model, tmp_path / "own.json", zero2_like)
    autotune.apply(model, None, tmp_path / "own.json", find_unused_parameters=finds)
    model(torch.ones(1, 2), 0).sum().backward()
    unused = [layer.weight.grad is None for layer in model.layers]
    assert unused == [False, True]
    if finds:
        model(torch.ones(1, 2), 1).sum().backward()
    else:
        with pytest.raises(SynchronizationError, match="or pass find_unused_parameters=True"):
            model(torch.ones(1, 2), 1)


def test_a_tuner_compares_with_the_strategy_that_the_script_applies(alone, tmp_path) -> None:
    export = exported(linear(), tmp_path / "own.json")
    ours, theirs = socket.socketpair()
    with ours, theirs, active_session(TuningSession(ControlLine(ours))):
        applied = autotune.apply(linear(), None, tmp_path / "own.json")
        misfit = autotune.apply(linear(5), None, tmp_path / "own.json")
        absent = autotune.apply(linear(), None, tmp_path / "absent.json")
    assert applied.synchronizer.plan == export.plan()
    (note,) = applied.notes
    assert note == f"{export.plan_id} is carried out by torch's own DDP reducer, 1 bucket"
    assert applied.synchronizer.ranks.control_timeout_s == TUNING_TIMEOUTS.agreement_s
    for unusable, reason in ((misfit, "needs model"), (absent, "absent.json")):
        assert unusable.synchronizer.plan is not None
        assert len(unusable.notes) == 2
        not_used, _, problem = unusable.notes[0].partition(
            " is not used, so the gradients are sent as torch's DDP would: "
        )
        assert not_used.endswith(".json") and reason in problem
    with pytest.raises(InvalidInput, match=r"absent\.json"):
        autotune.apply(linear(), None, tmp_path / "absent.json")


def test_ordinary_training_waits_long_for_messages_and_a_minute_for_agreement(
    alone, tmp_path
) -> None:
    exported(linear(), tmp_path / "own.json")
    with active_session(ExportSession(tmp_path / "own.json")):
        under_run = autotune.apply(linear()).synchronizer
    by_itself = autotune.apply(linear(), None, tmp_path / "own.json").synchronizer
    assert under_run.plan == by_itself.plan
    for synchronizer in (under_run, by_itself):
        assert synchronizer.ranks.control_timeout_s == TRAINING_TIMEOUTS.agreement_s == 60.0
        assert _timeout_s(synchronizer.ranks.first) == TRAINING_TIMEOUTS.message_s == 1800.0


def test_a_message_waits_as_long_as_the_scripts_own_group_in_ordinary_training(alone) -> None:
    group = dist.new_group([0], timeout=timedelta(hours=3))
    for waits, allowed_s in ((TRAINING_TIMEOUTS, 10800.0), (TUNING_TIMEOUTS, 60.0)):
        ranks = SynchronizerGroups.of(group, waits.message_s, waits.agreement_s)
        assert ranks.timeout_s == _timeout_s(ranks.first) == _timeout_s(ranks.second) == allowed_s
        assert _timeout_s(ranks.control) == waits.agreement_s
        ranks.destroy()


def _timeout_s(group: dist.ProcessGroup) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def test_what_is_not_applied_is_logged(alone, tmp_path, caplog) -> None:
    """Scripts drop the result of the line."""
    export = exported(linear(), tmp_path / "own.json")
    replace(export, strategy=None, plan_id=None).write(tmp_path / "current.json")
    weights = torch.nn.Parameter(torch.ones(2))
    model = linear()
    with caplog.at_level(logging.WARNING):
        autotune.apply(
            model, torch.optim.SGD([*model.parameters(), weights]), tmp_path / "own.json"
        )
        autotune.apply(linear(), None, tmp_path / "current.json")
    assert caplog.messages == [
        "1 parameters of the optimizer do not belong to the model and are not synchronized",
        "the export keeps the current setup as the fastest: nothing was changed",
    ]


def test_a_run_reports_the_backend_of_the_model_that_it_trains(alone, tmp_path) -> None:
    """The export alone does not tell it."""
    exported(linear(), tmp_path / "own.json")
    report = tmp_path / "report"
    report.touch()
    with replaced_ddp(ExportSession(tmp_path / "own.json", report)):
        torch.nn.parallel.DistributedDataParallel(linear())
    with active_session(ExportSession(tmp_path / "own.json", report)):
        autotune.apply(linear(), find_unused_parameters=True)
    assert report.read_text().splitlines() == [
        "carried out by torch's own DDP reducer, 1 bucket",
        "carried out by autotune's hooks, 1 message",
    ]
    with active_session(ExportSession(tmp_path / "own.json", tmp_path / "of another machine")):
        autotune.apply(linear())
    assert not (tmp_path / "of another machine").exists()


def test_a_run_ends_a_script_that_trains_without_its_strategy(tmp_path) -> None:
    exported(linear(), tmp_path / "own.json")
    ExportSession(tmp_path / "own.json").require_model()
    optimizer = torch.optim.SGD(linear().parameters())
    with pytest.raises(LaunchError, match=r"the script has made 8 steps, but "):
        for _ in range(8):
            optimizer.step()


UNWRAPPED = """
import torch

optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
for _ in range(100):
    optimizer.step()
"""


NONE = "no rank on this machine reported a model that trains by {path}"


@pytest.mark.parametrize(
    ("script", "words", "status", "expected"),
    [
        (SCRIPT, ("--steps", "1"), 0, "ran with {id} ({backend}), exit status 0"),
        pytest.param("empty.py", (), 0, f"exit status 0; {NONE}", marks=pytest.mark.slow),
        (SCRIPT, ("--width", "48"), 1, f"exit status 1; {NONE}"),
        pytest.param("unwrapped.py", (), 1, f"exit status 1; {NONE}", marks=pytest.mark.slow),
    ],
    ids=["applied", "a script without a model", "refused by every rank", "not wrapped"],
)
def test_a_run_claims_no_strategy_that_no_model_got(
    script, words, status, expected, tmp_path, monkeypatch, capfd
) -> None:
    """The command runs in this process; `test_interrupts.py` starts a process of it."""
    layers = torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    export = exported(torch.nn.Sequential(*layers), tmp_path / "own.json")
    (tmp_path / "empty.py").touch()
    (tmp_path / "unwrapped.py").write_text(UNWRAPPED)
    path = tmp_path / "own.json"
    monkeypatch.chdir(ROOT)
    run = ["run", "--strategy", str(path), "--", str(tmp_path / script), *words]
    done = again_if_aborted(
        lambda: subprocess.CompletedProcess(run, main(run), *capfd.readouterr())
    )
    assert done.returncode == status, done.stderr
    backend = "carried out by torch's own DDP reducer, 1 bucket"
    last = done.stdout.splitlines()[-1]
    wanted = expected.format(id=export.strategy.id, backend=backend, path=path)
    assert last.startswith(wanted)
