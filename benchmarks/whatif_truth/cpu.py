"""Part (b): what-ifs on this CPU, for the four example scripts.

- `fused_adam` and `amp` of one process: predicted from its recording as `what-if --measure` does
  it, with the times of optimizers and operators on this machine in both versions. Measured by
  `autotune.jobs.check`, in turns with the unchanged script.
- `distributed`, other bucket sizes and fp16 gradients on an emulated cluster (root): predicted from
  the recording of one process and the probe of the cluster, and measured on its hosts with real
  computation, in turns with the same replicas without messages during the step. `stored`: two of
  them on stored trials of a quieter day (`cpu_stored`).

The error is |predicted / measured step time - 1|. Nothing is left out: a script that cannot be
changed so has its reason in the table, and so has the part on a cluster where none can be emulated.
Each row is kept in the folder when it is measured, so a run that was cut off goes on where it was.
The last line is one JSON object.

    python -m benchmarks.whatif_truth.cpu --folder truth
    python -m benchmarks.whatif_truth.cpu --examples gpt_text --parts local --pairs 10
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from autotune.commands.render.counted import CountedProgress
from autotune.commands.render.terminal import Terminal
from autotune.commands.what_if import register_all
from autotune.errors import AutotuneError, InvalidInput
from autotune.jobs.check import CheckPlan, check
from autotune.jobs.fused_times import SUFFIX as FUSED_SUFFIX
from autotune.jobs.fused_times import fused_times, write_fused_times
from autotune.jobs.half_times import SUFFIX as HALF_SUFFIX
from autotune.jobs.half_times import cast_times, half_times, write_half_times
from autotune.profiling.traces.job import TraceJob, read_job
from autotune.testbed.capabilities import capabilities
from autotune.whatif.answers.answers import Answer, Asked, answer, read_asked
from autotune.whatif.base import Base
from autotune.whatif.question import Question
from autotune.whatif.recording.recorded import recorded_base
from benchmarks.repository import ROOT, machine, option_parser, run_autotune, run_benchmark
from benchmarks.whatif_truth.cpu_cluster import CHANGES, cluster_rows
from benchmarks.whatif_truth.cpu_rows import CpuRow, KeptRows, keys, table
from benchmarks.whatif_truth.cpu_stored import STORED_CHANGES, stored_domain, stored_rows
from runtime_rewriter.world.command import read_command

EXAMPLES = ("resnet_digits", "gpt_text", "lstm_text", "ncf_ratings")
LOCAL = ("fused_adam", "amp")
PARTS = ("local", "distributed", "stored")
RECORDED = ("--shapes", "--warmup", "3", "--steps", "5")
PLAN = CheckPlan(pairs=6, steps=2)
BUDGET_S = 60.0
TURN_S = 1.0
"""A turn has as many steps as take this long: after a few short ones caches are still cold."""
OF_PART = {"distributed": CHANGES, "stored": STORED_CHANGES}
"""The rows of an example in a part that measures several changes at once."""

Progress = Callable[[str], None]


def no_cluster_reason() -> str:
    """Return why this machine cannot emulate a cluster, or nothing."""
    emulation = capabilities()
    return "" if emulation.possible else " ".join(emulation.message.split())


@dataclass(frozen=True)
class Run:
    """The examples and parts to judge, and the folder of their rows.

    `plan`: of the measurements in turns. `no_cluster`: returns why no cluster can be emulated.
    """

    folder: Path
    examples: Sequence[str] = EXAMPLES
    parts: Sequence[str] = PARTS
    plan: CheckPlan = PLAN
    no_cluster: Callable[[], str] = no_cluster_reason

    @property
    def items(self) -> list[tuple[str, str]]:
        """(example, change); "distributed" and "stored" stand for all changes of their part."""
        local = LOCAL if "local" in self.parts else ()
        changes = (*local, *(("distributed",) if "distributed" in self.parts else ()))
        items = [(example, change) for example in self.examples for change in changes]
        if "stored" in self.parts:
            items += [(one, "stored") for one in self.examples if stored_domain(one).exists()]
        return items


def rows(run: Run, progress: Progress = lambda item: None) -> list[CpuRow]:
    """Record and measure what the folder lacks; a row for each example and change.

    Rows that need a cluster where none can be emulated have that reason, and are not kept.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # a rank has a core, alone and on the emulated cluster
    run.folder.mkdir(parents=True, exist_ok=True)
    kept = KeptRows(run.folder / "rows.jsonl")
    measured: list[CpuRow] = []
    for example, change in run.items:
        progress(f"{example} {change}")
        wanted = OF_PART.get(change, (change,))
        lacking = [one for one in wanted if kept.of(example, one) is None]
        reason = run.no_cluster() if lacking and change == "distributed" else ""
        if lacking and not reason:
            for row in _measured(run, example, change):
                kept.add(row)
        for one in wanted:
            if (known := kept.of(example, one)) is not None:
                measured.append(known)
            elif reason:
                measured.append(CpuRow(example, one, reason=reason))
    return measured


def _measured(run: Run, example: str, change: str) -> list[CpuRow]:
    try:
        if change in OF_PART:
            job = _recorded(run.folder, example)
            if change == "stored":
                return stored_rows(example, job)
            return cluster_rows(run.folder, example, job, lambda text: None)
        return [_local_row(run, example, change)]
    except AutotuneError as error:
        return [CpuRow(example, change, reason=str(error))]
    except CalledProcessError as error:  # it printed the reason
        reason = f"not recorded: exit status {error.returncode}"
        return [CpuRow(example, change, reason=reason)]


# -- one process ---------------------------------------------------------------------------------


def _local_row(run: Run, example: str, change: str) -> CpuRow:
    speedup = _predicted_speedup(run, example, change)
    load = os.getloadavg()[0]
    command = read_command(["python", *_script(example)])
    step_s = recorded_base(_recorded(run.folder, example), 0).measured_s
    plan = replace(run.plan, steps=max(run.plan.steps, math.ceil(TURN_S / step_s)))
    checked = check(command, Answer(Asked(change, change), (), Question()), plan)
    predicted_s = checked.baseline_s / speedup
    # the pairs' ratio, since the two medians met different machines
    measured_s = checked.baseline_s / checked.measured
    return CpuRow(example, change, checked.baseline_s, predicted_s, measured_s, load=load)


def _predicted_speedup(run: Run, example: str, change: str) -> float:
    """The speed-up that `autotune what-if --measure` predicts; its times are kept in the folder."""
    import torch

    torch.set_num_threads(1)
    register_all([])
    base = recorded_base(_recorded(run.folder, example), 0)
    suffix, measure = MEASURES[change]
    path = run.folder / f"{example}{suffix}"
    if not path.exists():
        measure(path, base)
    (asked,) = read_asked(f"{change}_cpu")
    predicted = answer(base, replace(asked, files={f"{change}_cpu": str(path)}), Question())
    if predicted.prediction is None:
        raise InvalidInput(predicted.reason)
    return predicted.prediction.speedup


def _write_fused_times(path: Path, base: Base) -> None:
    write_fused_times(path, fused_times(base, BUDGET_S))


def _write_half_times(path: Path, base: Base) -> None:
    operators, casts = half_times(base, BUDGET_S), cast_times(base, BUDGET_S)
    write_half_times(path, list(operators), list(casts))


MEASURES: Mapping[str, tuple[str, Callable[[Path, Base], None]]] = {
    "fused_adam": (FUSED_SUFFIX, _write_fused_times),
    "amp": (HALF_SUFFIX, _write_half_times),
}
"""Change -> the ending of its file of times, and what writes the file."""


def _script(example: str) -> list[str]:
    return [str(ROOT / "examples" / f"{example}.py"), "--epochs", "100000"]


@cache
def _recorded(folder: Path, example: str) -> TraceJob:
    """Read the recording of an example; made if it is missing."""
    path = folder / f"{example}.plain"
    if not (path / "job.json").exists():
        words = ("python", *_script(example))
        run_autotune("profile", "--output", str(path), *RECORDED, "--", *words)
    return read_job([path])


def cpu_result(run: Run) -> tuple[str, dict[str, Any]]:
    """(table, keys for the benchmark's last line)."""
    with CountedProgress(Terminal(), "row", len(run.items)) as progress:
        measured = rows(run, progress.begin)
    return table(measured), keys(measured)


def _command() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="recordings and rows; a run there goes on")
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pairs", type=int, default=PLAN.pairs)
    parser.add_argument("--turn-steps", type=int, default=PLAN.steps)
    options = parser.parse_args()
    plan = CheckPlan(options.pairs, options.turn_steps)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        text, line = cpu_result(Run(folder, options.examples, options.parts, plan))
    print(text)
    print(json.dumps({**line, **machine()}))


if __name__ == "__main__":
    run_benchmark(_command)
