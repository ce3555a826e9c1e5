"""`autotune profile -- torchrun ... train.py`: some training steps of the script as it is, recorded on every rank."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from autotune.canonical import to_data
from autotune.commands.render.tables import table_text
from autotune.errors import InvalidInput, LaunchError
from autotune.jobs.processes import Launched
from autotune.recordings.job_file import JOB_FILE, RecordedJob, trace_name
from autotune.recordings.memory_file import MEMORY_FILE, RecordedMemory
from autotune.recordings.recorded_steps import CollectiveRow
from autotune.units import format_bytes, format_seconds, parse_seconds
from runtime_rewriter.recording.settings import RecordSettings
from runtime_rewriter.world.command import ScriptCommand, read_command, torchrun_with_launcher

STOPPING_S = 30.0
"""How long a script may take to end once all is written."""
SHOWN_ROWS = 20


def profile(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Record, then say what was found; raises `LaunchError` where nothing was."""
    if not options.command:
        raise InvalidInput(
            "nothing to run: autotune profile -- torchrun --nproc-per-node 2 train.py"
        )
    command = read_command(options.command)
    timeout_s = parse_seconds(options.timeout, "--timeout")
    folder = options.output.resolve()
    if (folder / JOB_FILE).exists() and not options.overwrite:
        raise InvalidInput(
            f"{options.output} must not hold a recording yet, but has a {JOB_FILE}; name another --output, or use --overwrite"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    with tempfile.TemporaryDirectory(prefix="autotune-profile-") as reports:
        settings = RecordSettings(
            folder=str(folder),
            steps=options.steps,
            warmup=options.warmup,
            workload=not options.no_workload,
            stop=not options.go_on,
            record_shapes=options.shapes,
            profile_memory=options.memory,
            with_stack=options.stacks,
            reports=reports,
            command=tuple(options.command),
        )
        status = _run(command, settings, timeout_s)
    job = RecordedJob.read(folder)
    follow = [
        f"autotune {verb} {shlex.quote(str(options.output))}" for verb in ("replay", "optimize")
    ]
    peak_bytes = _peak_bytes(folder)
    data = {
        **_summary(job),
        "peak_bytes": peak_bytes,
        "folder": str(folder),
        "next": follow,
        "exit_status": status,
        "job": to_data(job),
    }
    return data, _text(job, options.output, peak_bytes)


def _peak_bytes(folder: Path) -> int | None:
    """Of a replica without synchronization; None where it was not recorded."""
    memory = RecordedMemory.read(folder)
    return None if memory is None else int(memory.profile.live_bytes.max())


def _clear(folder: Path) -> None:
    """Traces of an earlier recording would be read along with the new ones."""
    for path in (folder / JOB_FILE, folder / MEMORY_FILE, *folder.glob(trace_name("*"))):
        path.unlink(missing_ok=True)


def _run(command: ScriptCommand, settings: RecordSettings, timeout_s: float) -> int:
    """Until all is written and the script has ended, or is left to itself until it ends; its exit status, 0 where we ended it."""
    reports = Path(settings.reports)
    settings.write(reports / "settings.json")
    launcher = ("--record", str(reports / "settings.json"))
    if command.workers is None:
        words = [
            sys.executable,
            "-m",
            "runtime_rewriter.rank.launch",
            *launcher,
            "--",
            *command.as_python_words(),
        ]
    else:
        words = torchrun_with_launcher(command, command.workers, launcher)
    launched = Launched(words)
    written = Path(settings.folder) / JOB_FILE
    with launched.signals_passed_on():
        status = launched.wait(time.monotonic() + timeout_s, written.exists)
        if written.exists() and status is None:
            patience_s = STOPPING_S if settings.stop else float("inf")
            status = launched.wait(time.monotonic() + patience_s, lambda: False)
            if status is None:
                launched.end()
                status = 0
        elif status is None:
            message = _told(
                launched,
                reports,
                f"nothing was recorded within {timeout_s:g} s (--timeout)",
                command,
            )
            launched.end()  # what it says then is about its end
            raise LaunchError(message)
    if not written.exists():
        raise LaunchError(
            _told(
                launched,
                reports,
                f"nothing was recorded, and the script ended with status {status}",
                command,
            )
        )
    return 0 if settings.stop else status


def _told(launched: Launched, reports: Path, what: str, command: ScriptCommand) -> str:
    """What the ranks said, and where they said nothing the end of the script's own output."""
    said = {report["rank"]: report for report in _reports(reports)}
    problems = [report for report in said.values() if "problem" in report]
    # A rank that ends brings down those that are connected to it; the one that says something else says why.
    first = [report for report in problems if "onnection" not in report["problem"]]
    lines = list(dict.fromkeys(report["problem"] for report in first or problems))
    if lines and (first or len(said) == (command.workers or 1)):
        return f"{what}: " + "; ".join(lines[:3])
    quiet = (
        [rank for rank in range(command.workers or 1) if rank not in said]
        if command.nodes == 1
        else []
    )
    heard = "".join(f"; {line}" for line in lines[:1])
    silent = f"; rank {', '.join(map(str, quiet))} ended or stayed without a word" if quiet else ""
    return f"{what}{silent}{heard}; its last output:\n{launched.tail().rstrip()}"


def _reports(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("rank*.report.json"))
    ]


def _summary(job: RecordedJob) -> dict[str, Any]:
    """In seconds. The parts are those of the rank that computes longest: the others wait for it, each in another place."""
    busiest = max(job.ranks, key=lambda record: record.times.computation_s)
    times = busiest.times
    return {
        "world_size": job.world_size,
        "steps": job.steps,
        "iteration_s": job.iteration_s,
        "busiest_rank": busiest.rank,
        "forward_s": times.forward_s,
        "backward_s": times.backward_s,
        "rest_s": times.rest_s,
        "computation_s": times.computation_s,
        "communication_s": times.communication_s,
        "exposed_communication_s": times.exposed_s,
        "alone_s": None if job.workload is None else job.workload.compute_s,
        "untimed_collectives": sum(record.untimed for record in job.ranks),
    }


def _text(job: RecordedJob, output: Path, peak_bytes: int | None) -> str:
    found = _summary(job)
    short = f" of {job.asked_steps} asked for" if job.steps < job.asked_steps else ""
    head = f"recorded {job.steps} steps{short} on {job.world_size} rank(s)"
    table = Table(f"a step (parts: rank {found['busiest_rank']})", "time", "of it")
    for name, key in (
        ("iteration, slowest rank", "iteration_s"),
        ("  until the backward pass", "forward_s"),
        ("  backward pass", "backward_s"),
        ("  after its last operator", "rest_s"),
        ("something computes", "computation_s"),
        ("a collective is under way", "communication_s"),
        ("  and nothing computes", "exposed_communication_s"),
        ("without communication", "alone_s"),
    ):
        if found[key] is not None:
            table.add_row(
                name,
                format_seconds(found[key]),
                f"{found[key] / found['iteration_s']:.0%}" if found["iteration_s"] else "",
            )
    text = table_text(table) + _ops(job) + _collectives(job.collectives)
    if peak_bytes is not None:
        text += f"peak memory of a replica, without what synchronization allocates: {format_bytes(peak_bytes)}\n"
    notes = "".join(f"note: {note}\n" for note in job.notes)
    shown = shlex.quote(str(output))
    follow = (
        f"next: autotune replay {shown}\n      autotune optimize {shown} --cluster cluster.yaml"
    )
    here = next(
        (record.trace for record in job.ranks if (output / record.trace).exists()), trace_name(0)
    )
    return f"{head}\n{text}{notes}traces: {output}/{here} ... (open in https://ui.perfetto.dev), {output}/{JOB_FILE}\n{follow}"


def _ops(job: RecordedJob) -> str:
    table = Table("operator (rank 0)", "own time a step", "calls a step")
    for op in job.ranks[0].times.top_ops:
        table.add_row(escape(op.name), format_seconds(op.self_s), f"{op.calls:.1f}")
    return table_text(table) if job.ranks[0].times.top_ops else ""


def _collectives(rows: tuple[CollectiveRow, ...]) -> str:
    table = Table("collective", "of", "bytes", "ranks", "a step", "lasts", "+ waiting", "queued")
    for row in rows[:SHOWN_ROWS]:
        times = (format_seconds(value) for value in (row.lasts_s, row.waits_s, row.queue_s))
        table.add_row(
            row.op,
            escape(row.label),
            str(row.size_bytes),
            str(row.ranks),
            f"{row.per_step:.1f}",
            *times,
        )
    more = f"and {len(rows) - SHOWN_ROWS} more in {JOB_FILE}\n" if len(rows) > SHOWN_ROWS else ""
    return (table_text(table) if rows else "no collectives\n") + more
