"""`autotune what-if --check` measures a change in turns with the unchanged script."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from periodic_training import training_text
from short_jobs import take_interrupts

from autotune.errors import InvalidInput, LaunchError
from autotune.jobs.check import (
    CheckPlan,
    OutOfTime,
    check,
    check_all,
    fits_another,
    pairs_of_turns,
    to_check,
)
from autotune.whatif.answers.answers import Answer, Asked
from autotune.whatif.question import Question
from runtime_rewriter.ports import unclaimed_port
from runtime_rewriter.world.command import read_command

SCRIPT = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist

steps, kind = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
print("process", os.getpid(), flush=True)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
Path(__file__).with_name("written").write_text("by the script")
if kind == "rprop":
    optimizer = torch.optim.Rprop(model.parameters())
else:
    optimizer = torch.optim.Adam(model.parameters())
for step in range(steps):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    if step == 4:
        print("in a turn", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def asked(text: str) -> Answer:
    return Answer(Asked(text, text), (), Question())


@pytest.mark.job
def test_a_change_is_measured_in_turns_on_two_ranks_and_files_stay(script: Path) -> None:
    # of the user, for one of both sides
    port = ("--master-port", str(unclaimed_port("127.0.0.1")))
    words = ["torchrun", "--nproc-per-node", "2", *port, str(script), "100000", "adam"]
    seen: list[str] = []
    plan = CheckPlan(pairs=6, steps=3, timeout_s=500)
    found = check(read_command(words), asked("fused_adam"), plan, seen.append)
    assert found.pairs == 6 and found.baseline_s > 0 and found.changed_s > 0
    assert found.measured_low is not None and found.measured_high is not None
    assert found.measured_low <= found.measured <= found.measured_high
    assert found.predicted is None and found.error is None
    assert len(seen) == 2 + 6
    assert not script.with_name("written").exists()  # a copy-on-write view


@pytest.mark.slow
def test_a_script_that_cannot_be_changed_so_is_refused(script: Path) -> None:
    command = read_command(["python", str(script), "100000", "rprop"])
    plan = CheckPlan(pairs=1, steps=1, timeout_s=200)
    measured, refusals = check_all(command, [asked("fused_adam")], plan, lambda item: None)
    assert measured == ()
    ((name, reason),) = refusals
    assert name == "fused_adam" and "builds no optimizer" in reason


@pytest.mark.slow
def test_a_script_that_ends_too_early_is_an_error(script: Path) -> None:
    command = read_command(["python", str(script), "6", "adam"])
    with pytest.raises(LaunchError, match="baseline ended after 6 steps; let it train longer"):
        check(command, asked("fused_adam"), CheckPlan(pairs=9, steps=3, timeout_s=200))


@pytest.mark.slow
def test_a_script_that_crashes_discards_no_other_check(script: Path) -> None:
    script.write_text("print('no data', flush=True); raise SystemExit(1)")
    command = read_command(["python", str(script)])
    plan = CheckPlan(pairs=1, steps=1, timeout_s=200)
    changes = [asked("fused_adam"), asked("amp")]
    measured, refusals = check_all(command, changes, plan, lambda item: None)
    assert measured == () and [name for name, _ in refusals] == ["fused_adam", "amp"]
    assert all("no data" in reason for _, reason in refusals)


@pytest.mark.slow
def test_ctrl_c_ends_both_scripts_and_every_further_check(script: Path) -> None:
    trace = script.with_name("rank0.json")
    trace.write_bytes(training_text(5, 100))
    ours = [sys.executable, "-m", "autotune", "what-if", str(trace), "--check", "fused_adam,amp"]
    process = subprocess.Popen(
        [*ours, "--", "python", str(script), "1000000000", "adam"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_interrupts,
    )
    assert process.stdout is not None and process.stderr is not None
    lines: list[str] = []
    with process:
        for line in process.stderr:
            lines.append(line)
            if line == "in a turn\n":
                break
        process.send_signal(signal.SIGINT)
        lines += process.stderr
        output = process.stdout.read()
    scripts = [line.split()[1] for line in lines if line.startswith("process ")]
    assert process.returncode == 130 and output == "", lines
    assert lines[-1] == "autotune: interrupted\n"
    assert len(scripts) == 2 and not any(Path("/proc", number).exists() for number in scripts)


class Planned:
    """Takes its turns at once, until the time is over."""

    def __init__(self, name: str, turns: int) -> None:
        self.name = name
        self.notes: list[str] = []
        self.turns = turns

    def turn(self, steps: int, deadline_s: float) -> list[float]:
        if self.turns == 0:
            raise OutOfTime(f"{self.name} was not measured within the time limit (--timeout)")
        self.turns -= 1
        return [9.0, *[float(self.turns)] * (steps - 1)]


@pytest.mark.parametrize("turns", [(7, 8), (8, 7), (7, 7)])
def test_a_pair_that_outlasts_the_time_discards_no_pair_before(turns: tuple[int, int]) -> None:
    sides = [Planned("baseline", turns[0]), Planned("amp", turns[1])]
    pairs_s = pairs_of_turns(sides, CheckPlan(pairs=10), time.monotonic() + 1e6, lambda item: None)
    assert pairs_s == [(turns[0] - 1.0 - k, turns[1] - 1.0 - k) for k in range(7)]
    assert sides[1].notes == ["7 of 10 pairs fitted into --timeout"]


def test_fewer_pairs_than_an_interval_needs_are_an_error() -> None:
    sides = [Planned("baseline", 5), Planned("amp", 5)]
    with pytest.raises(OutOfTime, match="amp was not measured within the time limit"):
        pairs_of_turns(sides, CheckPlan(pairs=10), time.monotonic() + 1e6, lambda item: None)


def test_only_enactable_what_ifs_are_checked() -> None:
    with pytest.raises(InvalidInput, match="can be enacted on a script from outside"):
        to_check([asked("vdnn")], (), None)
    (found,) = to_check([asked("vdnn"), asked("amp")], ["amp"], None)
    assert found.asked.text == "amp"
    both = [asked("amp"), asked("fused_adam")]
    assert list(to_check([*both, asked("vdnn")], ["amp", "fused_adam"], None)) == both
    with pytest.raises(InvalidInput, match="at least 1 pair of turns"):
        CheckPlan(pairs=0)


def test_a_check_ends_with_the_pairs_that_fit_into_its_time() -> None:
    assert fits_another(0, 0.0, 1.0) and fits_another(5, 50.0, 1.0)  # without an interval
    assert fits_another(6, 60.0, 11.0) and not fits_another(6, 60.0, 9.0)
