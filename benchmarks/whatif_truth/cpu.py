"""Part (b): what-ifs on this CPU, for the four example scripts.

- `fused_adam` and `amp` of one process: predicted from its recording, with factors of operators
  learned from the other three examples (`cpu_factors`), and measured by `autotune.jobs.check`,
  in turns with the unchanged script.
- `distributed`, other bucket sizes and fp16 gradients on an emulated cluster (root): predicted from
  the recording of one process and the probe of the cluster, and measured on its hosts with real
  computation. The baseline is one replica alone in the same world.

The error is |predicted / measured step time - 1|. Nothing is left out: a script that cannot be
changed so has its reason in the table. The last line is one JSON object.

    python -m benchmarks.whatif_truth.cpu --folder recordings
    python -m benchmarks.whatif_truth.cpu --examples gpt_text --parts local --pairs 6
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from autotune.errors import AutotuneError
from autotune.jobs.check import CheckPlan, check
from autotune.profiling.traces.job import TraceJob, read_job
from autotune.whatif.answers.answers import Answer, Asked
from autotune.whatif.question import Question
from autotune.whatif.recording.recorded import recorded_base
from benchmarks.repository import ROOT, can_emulate, machine, option_parser, run_autotune
from benchmarks.whatif_truth.cpu_cluster import cluster_rows
from benchmarks.whatif_truth.cpu_factors import RecordedPair, predicted_speedup
from benchmarks.whatif_truth.cpu_rows import CpuRow, keys, table
from runtime_rewriter.world.command import read_command

EXAMPLES = ("resnet_digits", "gpt_text", "lstm_text", "ncf_ratings")
LOCAL = ("fused_adam", "amp")
PARTS = ("local", "distributed")
ENACTED = Path(__file__).with_name("enacted_script.py")

Log = Callable[[str], None]


def rows(
    folder: Path,
    examples: Sequence[str] = EXAMPLES,
    plan: CheckPlan | None = None,
    log: Log = lambda text: print(text, file=sys.stderr),
    parts: Sequence[str] = PARTS,
) -> Iterator[CpuRow]:
    """Record into `folder` what it lacks, then measure; a row for each example and change."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a rank has a core, alone and on the emulated cluster
    plain = {example: _recorded(folder, example, "", log) for example in EXAMPLES}
    if "local" in parts:
        for change in LOCAL:
            yield from _local_rows(folder, change, examples, plain, plan or CheckPlan(), log)
    if "distributed" in parts and can_emulate():
        for example in examples:
            yield from cluster_rows(folder, example, plain[example], log)


# -- one process ---------------------------------------------------------------------------------


def _script(example: str) -> list[str]:
    return [str(ROOT / "examples" / f"{example}.py"), "--epochs", "100000"]


def _recorded(folder: Path, example: str, change: str, log: Log) -> TraceJob:
    """Read the recording of an example, with a change enacted; made if it is missing."""
    path = folder / f"{example}.{change or 'plain'}"
    if not (path / "job.json").exists():
        log(f"recording {example} {change}")
        script = _script(example)
        words = [str(ENACTED), change, *script] if change else script
        options = ("--output", str(path), "--shapes", "--warmup", "5")
        run_autotune("profile", *options, "--", "python", *words)
    return read_job([path])


def _local_rows(
    folder: Path,
    change: str,
    examples: Sequence[str],
    plain: dict[str, TraceJob],
    plan: CheckPlan,
    log: Log,
) -> Iterator[CpuRow]:
    pairs: dict[str, RecordedPair] = {}
    refused: dict[str, str] = {}
    for example in EXAMPLES:
        try:
            changed = recorded_base(_recorded(folder, example, change, log), 0)
            pairs[example] = RecordedPair(recorded_base(plain[example], 0), changed)
        except AutotuneError as error:
            refused[example] = str(error)
        except CalledProcessError as error:  # it printed the reason
            refused[example] = f"not recorded with {change}: exit status {error.returncode}"
    for example in examples:
        if example in refused:
            yield CpuRow(example, change, reason=refused[example])
            continue
        others = [pair for name, pair in pairs.items() if name != example]
        speedup = predicted_speedup(pairs[example].plain, others, change == "fused_adam")
        log(f"measuring {example} {change}")
        command = read_command(["python", *_script(example)])
        found = check(command, Answer(Asked(change, change), (), Question()), plan)
        yield CpuRow(example, change, found.baseline_s, found.baseline_s / speedup, found.changed_s)


def main() -> dict[str, Any]:
    """Judge everything in a folder of its own; print the table, return the keys."""
    with tempfile.TemporaryDirectory() as scratch:
        return _judged(list(rows(Path(scratch))))


def _judged(found: Sequence[CpuRow]) -> dict[str, Any]:
    print(table(found))
    return keys(found)


def _command() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="recordings and trials; made if missing")
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pairs", type=int, default=CheckPlan.pairs)
    parser.add_argument("--turn-steps", type=int, default=CheckPlan.steps)
    options = parser.parse_args()
    plan = CheckPlan(options.pairs, options.turn_steps)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        line = _judged(list(rows(folder, options.examples, plan, parts=options.parts)))
    print(json.dumps({**line, **machine()}))


if __name__ == "__main__":
    _command()
