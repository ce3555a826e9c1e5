"""`autotune profile`: record some training steps of a script on every rank, and summarize them."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from autotune.canonical import to_data
from autotune.commands.render.tables import table_text
from autotune.errors import InvalidInput
from autotune.jobs.record import earlier_kept, record, recorded_files, restore_earlier
from autotune.masking import masked_command
from autotune.recordings.job_file import JOB_FILE, RecordedJob, trace_name
from autotune.recordings.memory_file import RecordedMemory
from autotune.recordings.recorded_steps import CollectiveRow
from autotune.units import format_bytes, format_seconds, parse_seconds
from autotune.zoo.architectures import zoo_name
from runtime_rewriter.recording.settings import RecordSettings
from runtime_rewriter.world.command import read_command

SHOWN_ROWS = 20
PARTS = (
    ("iteration, slowest rank", "iteration_s"),
    ("  until the backward pass", "forward_s"),
    ("  backward pass", "backward_s"),
    ("  after its last operator", "rest_s"),
    ("computation", "computation_s"),
    ("communication", "communication_s"),
    ("  exposed: nothing computes", "exposed_communication_s"),
    ("without communication", "alone_s"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        default=Path("autotune-profile"),
        help="folder of the traces (default autotune-profile)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a recording in this folder"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps to record (default 10)")
    parser.add_argument(
        "--warmup", type=int, default=3, help="steps before the first measurement (default 3)"
    )
    parser.add_argument(
        "--between",
        type=int,
        help="ordinary steps between two recorded ones of PyTorch on CPUs (default: as many as "
        "keep the cost of recording at 3 %% of these steps)",
    )
    parser.add_argument(
        "--timeout", default="10min", help="time until everything is written (default 10min)"
    )
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="let the script train to its end (default: stop it once everything is written)",
    )
    parser.add_argument(
        "--no-workload",
        action="store_true",
        help="skip the steps that measure one replica alone: its times and its memory",
    )
    more = parser.add_argument_group("more in the traces, at a cost")
    more.add_argument("--shapes", action="store_true", help="shapes of every operator's inputs")
    more.add_argument("--memory", action="store_true", help="allocations")
    more.add_argument("--stacks", action="store_true", help="Python stacks")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Record and summarize; raises `LaunchError` if nothing was recorded."""
    if not options.command:
        raise InvalidInput(
            "nothing to run: autotune profile -- torchrun --nproc-per-node 2 train.py"
        )
    command = read_command(options.command)
    timeout_s = parse_seconds(options.timeout, "--timeout")
    folder = options.output.resolve()
    restore_earlier(folder)
    existing = recorded_files(folder)
    if existing and not options.overwrite:
        raise InvalidInput(
            f"{options.output} must not hold a recording or traces yet, but has a "
            f"{existing[0].name}; name another --output, or use --overwrite"
        )
    settings = RecordSettings(  # before anything is changed
        folder=str(folder),
        steps=options.steps,
        warmup=options.warmup,
        between=options.between,
        workload=not options.no_workload,
        stop=not options.go_on,
        record_shapes=options.shapes,
        profile_memory=options.memory,
        with_stack=options.stacks,
        command=masked_command(options.command),
    )
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with (
        _empty_folder_removed(folder, is_new),
        earlier_kept(folder),
        tempfile.TemporaryDirectory(prefix="autotune-profile-") as reports,
    ):
        status = record(command, replace(settings, reports=reports), timeout_s)
    job = RecordedJob.read(folder)
    peak_bytes = _peak_bytes(folder)
    data = {
        **_summary(job),
        "peak_bytes": peak_bytes,
        "folder": str(folder),
        "next": _next_commands(options.output),
        "exit_status": status,
        "job": to_data(job),
    }
    return data, _text(job, options.output, peak_bytes)


@contextmanager
def _empty_folder_removed(folder: Path, is_new: bool) -> Iterator[None]:
    """Remove a new folder in which nothing was written."""
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):
                folder.rmdir()


def _peak_bytes(folder: Path) -> int | None:
    """Peak of a replica without synchronization; None if it was not recorded."""
    memory = RecordedMemory.read(folder)
    return None if memory is None else int(memory.profile.live_bytes.max())


def _summary(job: RecordedJob) -> dict[str, Any]:
    """Times in seconds. The parts are those of the busiest rank, which the others wait for."""
    busiest = max(job.ranks, key=lambda record: record.times.computation_s)
    times = busiest.times
    return {
        "world_size": job.world_size,
        "steps": job.steps,
        "iteration_s": job.iteration_s,
        "between": job.between,
        "ordinary_s": job.ordinary_s,
        "recording_cost": job.recording_cost,
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
    summary = _summary(job)
    short = f" of {job.asked_steps} asked for" if job.steps < job.asked_steps else ""
    head = f"recorded {job.steps} steps{short} on {job.world_size} rank(s)"
    if job.recording_cost is not None:
        head += (
            f", with {job.between} ordinary steps between two of them, which take "
            f"{format_seconds(job.ordinary_s)}: recording adds {job.recording_cost:+.1%} to all"
        )
    table = Table(f"a step (parts: rank {summary['busiest_rank']})", "time", "share")
    iteration_s = summary["iteration_s"]
    for name, key in PARTS:
        if summary[key] is not None:
            share = f"{summary[key] / iteration_s:.0%}" if iteration_s else ""
            table.add_row(name, format_seconds(summary[key]), share)
    text = table_text(table) + _ops(job) + _collectives(job.collectives)
    if peak_bytes is not None:
        text += (
            "peak memory of a replica, without the buffers of synchronization: "
            f"{format_bytes(peak_bytes)}\n"
        )
    notes = "".join(f"note: {note}\n" for note in job.notes)
    names = [record.trace for record in job.ranks if (output / record.trace).exists()]
    trace = names[0] if names else trace_name(0)
    files = f"{output}/{trace} ... (open in https://ui.perfetto.dev), {output}/{JOB_FILE}"
    follow = "\n      ".join(_next_commands(output))
    return f"{head}\n{text}{notes}traces: {files}\nnext: {follow}"


def _next_commands(output: Path) -> list[str]:
    """Commands that read the recording."""
    name = str(output)
    shown = shlex.quote(f"./{name}" if zoo_name(name) else name)
    return [f"autotune replay {shown}", f"autotune optimize {shown} --cluster cluster.yaml"]


def _ops(job: RecordedJob) -> str:
    table = Table("operator (rank 0)", "own time per step", "calls per step")
    for op in job.ranks[0].times.top_ops:
        table.add_row(op.name, format_seconds(op.self_s), f"{op.calls:.1f}")
    return table_text(table) if job.ranks[0].times.top_ops else ""


def _collectives(rows: tuple[CollectiveRow, ...]) -> str:
    table = Table(
        "collective", "label", "bytes", "ranks", "per step", "duration", "+ waiting", "queued"
    )
    for row in rows[:SHOWN_ROWS]:
        times = (format_seconds(value) for value in (row.lasts_s, row.waits_s, row.queue_s))
        table.add_row(
            row.op, row.label, str(row.size_bytes), str(row.ranks), f"{row.per_step:.1f}", *times
        )
    more = f"and {len(rows) - SHOWN_ROWS} more in {JOB_FILE}\n" if len(rows) > SHOWN_ROWS else ""
    return (table_text(table) if rows else "no collectives\n") + more
