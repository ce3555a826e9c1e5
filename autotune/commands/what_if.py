"""`autotune what-if`: predict a training's step time under changes, from traces (Daydream)."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from autotune.commands.arguments import add_ranks
from autotune.commands.render.counted import CountedProgress
from autotune.commands.render.terminal import Terminal
from autotune.commands.render.what_if import answered_data, answered_text
from autotune.dfg.chrome_trace import write_chrome_trace
from autotune.dfg.perfetto_trace import write_perfetto_trace
from autotune.errors import InvalidInput
from autotune.files import refuse_unwritable
from autotune.jobs.check import CheckPlan, check_all, progress_items, to_check
from autotune.jobs.signals import terminable
from autotune.jobs.sources import named_cluster
from autotune.jobs.what_if import (
    Wanted,
    answered,
    checked_workers,
    items,
    measure_operators,
    ranks_read,
)
from autotune.profiling.traces.job import read_job
from autotune.recordings.memory_file import RecordedMemory
from autotune.reports.whatif_page import write_whatif_report
from autotune.units import parse_seconds
from autotune.whatif.answers.answered import Answered
from autotune.whatif.answers.answers import Asked, all_asked, read_asked
from autotune.whatif.answers.limits import surrounded_step
from autotune.whatif.answers.user_file import load_what_ifs
from autotune.whatif.base import Base
from runtime_rewriter.world.command import read_command
from runtime_rewriter.world.script_command import ScriptCommand

JSON_OPS = 300_000
"""Above this number of ops in a step, a timeline is one for Perfetto: Chrome's would be large."""
FORMATS = ("auto", "json", "perfetto")
KINETO_LOG_LEVEL, QUIET = "KINETO_LOG_LEVEL", "99"
"""Torch's profiler, which `--measure` uses for each operator, prints two lines at each start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_inputs(parser)
    _add_outputs(parser)
    _add_check(parser)


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the what-ifs to predict, and the files and measurements that they are predicted from."""
    parser.add_argument(
        "traces",
        nargs="+",
        help="traces of torch.profiler (Kineto) of one job's ranks: files, folders, archives, or "
        "patterns",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAMES",
        help="what-ifs to predict (default: each by itself): amp,amp+fused_adam combines, "
        "faster_network=2 gives an amount, metaflow=policy.yaml a file",
    )
    parser.add_argument(
        "--cluster",
        help="where training would be distributed: a cluster file, or a name such as B7",
    )
    parser.add_argument(
        "--workers", metavar="N,N,...", help="numbers of workers (default: that of the cluster)"
    )
    parser.add_argument(
        "--parameters",
        type=Path,
        metavar="FILE",
        help="sizes of the parameters, if the trace does not state them (JSON, name to shape)",
    )
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="FILE.csv",
        help="time each distinct operator and shape of the trace on this machine, write the times, "
        "and predict with them (kernel_times=FILE.csv); for a trace of a CPU also autocast and a "
        "fused optimizer, from times of their own",
    )
    parser.add_argument(
        "--measure-time",
        default="2min",
        help="time for --measure, longest ops first (default 2min)",
    )
    parser.add_argument(
        "--load",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file that registers what-ifs of yours; it is run",
    )
    parser.add_argument(
        "--rank", type=int, help="the rank to predict for (default: the slowest one)"
    )
    add_ranks(parser)
    parser.add_argument(
        "--unrecorded-step",
        metavar="TIME",
        help="how long a step takes without a profiler, such as 50ms; the cost of recording is "
        "removed accordingly (default: removed where it is known)",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write a timeline for each what-if"
    )
    parser.add_argument(
        "--timeline-format",
        choices=FORMATS,
        default="auto",
        help=f"default auto: perfetto above {JSON_OPS} ops (extra perfetto), else json",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write an HTML report")


def _add_check(parser: argparse.ArgumentParser) -> None:
    """How a prediction is compared with the script."""
    measured = parser.add_argument_group(
        "measure it", "autotune what-if TRACE --check amp -- torchrun ... train.py"
    )
    measured.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="NAMES",
        help="enact these what-ifs, as in --only (default: every predicted one that can be) on the "
        "script behind --, and measure each in turns with the unchanged script",
    )
    measured.add_argument("--pairs", type=int, default=10, help="pairs of turns (default 10)")
    measured.add_argument(
        "--turn-steps", type=int, default=5, help="measured steps of a turn (default 5)"
    )
    measured.add_argument(
        "--timeout", default="10min", help="time for one what-if to be measured (default 10min)"
    )
    measured.add_argument(
        "--writes-are-fine",
        action="store_true",
        help="the script may write its real files (default: a copy-on-write view)",
    )


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Read the traces and answer the what-ifs."""
    register_all(options.load)
    wanted = _wanted(options)
    command, plan = _command(options), _check_plan(options)
    budget_s = parse_seconds(options.measure_time, "--measure-time")
    timelines = options.out / "timeline.json" if options.out is not None else None
    for path in (options.measure, options.report, timelines):
        refuse_unwritable(path)
    job = read_job(options.traces, ranks=options.ranks)
    notes: tuple[str, ...] = ()
    if options.measure is not None:
        os.environ.setdefault(KINETO_LOG_LEVEL, QUIET)
        parts = ranks_read(job, wanted.rank) + 1
        with CountedProgress(Terminal(), "part", parts) as progress:
            asked, note = measure_operators(
                job, wanted.rank, options.measure, budget_s, progress.begin
            )
        notes, wanted = (note,), replace(wanted, asked=(*wanted.asked, *read_asked(asked)))
    with CountedProgress(Terminal(), "part", items(job, wanted)) as progress:
        answers = answered(job, wanted, progress.begin)
    answers = replace(answers, notes=(*answers.notes, *notes))
    if command is not None:
        answers = _checked(answers, command, plan, options)
    written = []
    if options.out is not None:
        written = write_timelines(answers, options.out, options.timeline_format)
    if options.report is not None:
        write_whatif_report(options.report, answers)
        written.append(options.report)
    tail = "".join(f"\nwritten: {path}" for path in written)
    data = answered_data(answers) | {"files": [str(path) for path in written]}
    if command is not None:  # a script that crashes is no success
        data["exit_status"] = int(not answers.checked)
    return data, answered_text(answers) + tail


def _command(options: argparse.Namespace) -> ScriptCommand | None:
    """The script of --check. Raises `InvalidInput` for one of both without the other."""
    if options.check is None and options.command:
        raise InvalidInput(
            "a script behind -- is measured with --check NAME, but --check is missing"
        )
    if options.check is None:
        return None
    if not options.command:
        raise InvalidInput(
            "--check needs the script behind --: autotune what-if TRACE --check amp -- "
            "torchrun --nproc-per-node 2 train.py"
        )
    return read_command(options.command)


def _check_plan(options: argparse.Namespace) -> CheckPlan:
    return CheckPlan(
        options.pairs,
        options.turn_steps,
        parse_seconds(options.timeout, "--timeout"),
        not options.writes_are_fine,
    )


def _checked(
    found: Answered, command: ScriptCommand, plan: CheckPlan, options: argparse.Namespace
) -> Answered:
    names = [one.text for one in _asked_to_check(options)]
    answers = to_check(found.answers, names, command.workers)
    parts = progress_items(answers, plan)
    with terminable() as interruption, CountedProgress(Terminal(), "part", parts) as progress:

        def begin(part: str) -> None:
            interruption.obey()  # Python may have dropped the exception of a signal
            progress.begin(part)

        measured, refusals = check_all(command, answers, plan, begin)
    return replace(found, checked=measured, refusals=refusals)


def register_all(files: list[Path]) -> None:
    """Register the what-ifs of autotune, and those of the user's files."""
    import_module("autotune.whatif.changes.all")
    for path in files:
        load_what_ifs(path)


def _wanted(options: argparse.Namespace) -> Wanted:
    asked: tuple[Asked, ...] = all_asked()
    if options.only:
        asked = read_asked(",".join(options.only))
    elif options.check:
        asked = ()
    predicted = {one.text for one in asked}
    asked += tuple(one for one in _asked_to_check(options) if one.text not in predicted)
    if options.measure is not None:
        path = str(options.measure)
        if "," in path or "+" in path:
            raise InvalidInput(f"--measure needs a path without ',' and '+', but it is {path}")
    memory = RecordedMemory.read(Path(options.traces[0])) if len(options.traces) == 1 else None
    return Wanted(
        asked=asked,
        cluster=None if options.cluster is None else named_cluster(options.cluster),
        workers=() if options.workers is None else _numbers(options.workers),
        parameters=options.parameters,
        rank=options.rank,
        curves=options.report is not None,
        memory=memory,
        unrecorded_s=None
        if options.unrecorded_step is None
        else parse_seconds(options.unrecorded_step, "--unrecorded-step"),
    )


def _asked_to_check(options: argparse.Namespace) -> tuple[Asked, ...]:
    """The what-ifs that `--check` names; none if it has no names."""
    return read_asked(options.check) if options.check else ()


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and len(part) < 10 for part in parts):
        raise InvalidInput(f"--workers needs whole numbers such as 2,4,8, but is {text!r}")
    return checked_workers([int(part) for part in parts])


def write_timelines(found: Answered, folder: Path, form: str) -> list[Path]:
    """Write one steady step before and after each predicted combination; the files."""
    written = [_write_timeline(found.base, folder / "before", form)]
    for one in found.predicted:
        assert one.prediction is not None
        name = one.asked.text.replace("/", "_")
        name += "" if one.workers is None else f".{one.workers}_workers"
        written.append(_write_timeline(one.prediction.base, folder / name, form))
    return written


def _write_timeline(base: Base, stem: Path, form: str) -> Path:
    timeline, section = surrounded_step(base)
    if form == "perfetto" or (form == "auto" and base.ops > JSON_OPS):
        path = stem.with_name(f"{stem.name}.pftrace")
        write_perfetto_trace(timeline, path, section)
    else:
        path = stem.with_name(f"{stem.name}.json.gz")
        write_chrome_trace(timeline, path, section=section)
    return path
