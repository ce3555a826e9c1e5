"""`autotune replay TRACE...`: traces of a job, aligned, replayed as one graph, and what their iteration is made of."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.cluster import Cluster
from autotune.commands.iteration import iteration_data, iteration_facts, iteration_table, write_timeline
from autotune.commands.memory import ShownMemory, memory_data, memory_facts, memory_listings, memory_table
from autotune.dfg.replay import replay as run
from autotune.dfg.utilisation import IterationSummary, iteration_summary
from autotune.errors import InvalidInput
from autotune.optimizer.within_memory import highest_peak
from autotune.profiling.job_file import RecordedJob
from autotune.profiling.memory_file import RecordedMemory
from autotune.profiling.traces.job import TraceJob, read_job
from autotune.timeline_report import Fact, Listing, Page, write_timeline_report
from autotune.units import format_seconds

if TYPE_CHECKING:
    from autotune.profiling.alignment.result import Alignment

SHOWN_REPAIRS, SHOWN_STEPS = 8, 12
MOST_RANK_ROWS = 64


def replay(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Read, align, replay; the step that is shown is the median one where none is named."""
    job = read_job(options.traces)
    aligned = _aligned(job, options.align)
    number = job.chosen_step(_step(options.step), aligned)
    measured_s = job.measured_step_s(number, aligned)
    summary = iteration_summary(run(job.global_dfg(number, aligned)))
    memory = _memory(options.traces)
    error = summary.iteration_s / measured_s - 1 if measured_s > 0 else 0.0
    if options.timeline is not None:
        write_timeline(summary, options.timeline)
    if options.report is not None:
        write_timeline_report(options.report, _page(job, number, measured_s, error, aligned, memory, summary), summary)
    data = {
        "ranks": list(job.rank_numbers),
        "world_size": job.world_size,
        "step": number,
        "steps": list(job.steps),
        "matched_collectives": len(job.joints),
        "measured_step_s": measured_s,
        "replay_error": error,
        "unexplained_s": _unexplained_s(job, number),
        "alignment": None if aligned is None else _alignment_data(job, aligned),
        "repairs": [str(repair) for repair in job.repairs],
        "memory": memory_data(memory),
        **iteration_data(summary),
    }
    tables = iteration_table(summary) + memory_table(memory)
    return data, "\n".join([*_head(job, number, measured_s, error, aligned), tables + _tail(options)]).rstrip()


def _memory(traces: list[str]) -> ShownMemory | None:
    """Of a recorded folder that tells it: the predicted peak of a replica of that job, as it ran."""
    folder = Path(traces[0])
    if len(traces) != 1 or (memory := RecordedMemory.read(folder)) is None:
        return None
    job = RecordedJob.read(folder)
    if job.workload is None:
        return None
    peak = highest_peak(memory, memory.profile, job.workload, job.plan, Cluster.local(job.world_size))
    return ShownMemory(peak, memory)


def _step(text: str) -> int | Any:
    if text == "median" or text.isdigit():
        return int(text) if text.isdigit() else "median"
    raise InvalidInput(f"--step must be the number of a step, or median, but is {text!r}")


def _aligned(job: TraceJob, wanted: bool) -> Alignment | None:
    if not wanted or len(job.ranks) < 2 or not job.joints:
        return None
    from autotune.profiling.alignment.align import align

    return align(job)


def _head(job: TraceJob, number: int, measured_s: float, error: float, aligned: Alignment | None) -> list[str]:
    ranks = f"{len(job.ranks)} of {job.world_size} ranks" if len(job.ranks) < job.world_size else f"{len(job.ranks)} ranks"
    others = ""
    if len(job.steps) > 1:
        listed = ", ".join(map(str, job.steps[:SHOWN_STEPS])) + (" ..." if len(job.steps) > SHOWN_STEPS else "")
        others = f" (of {len(job.steps)}: {listed})"
    lines = [f"{ranks}, step {number}{others}, {len(job.joints)} collectives matched across ranks"]
    lines += [f"  repaired: {repair}" for repair in job.repairs[:SHOWN_REPAIRS]]
    if len(job.repairs) > SHOWN_REPAIRS:
        lines.append(f"  and {len(job.repairs) - SHOWN_REPAIRS} more (all with --json)")
    if aligned is not None:
        lines.append(_alignment_text(aligned))
    lines.append(f"measured {format_seconds(measured_s)}, replayed {100 * error:+.2f} %")
    if unexplained_s := _unexplained_s(job, number):
        waits = f"streams wait {format_seconds(unexplained_s)} in all without a cause in the traces"
        lines.append(f"{waits}, kept as measured (of the rank with the most)")
    return lines


def _unexplained_s(job: TraceJob, number: int) -> float:
    """Of the rank with the most: the replay comes out right by these waits, and a change of what is before them may not move them."""
    return max(job.rank_ops(place, number).unexplained_s for place in range(len(job.ranks)))


def _alignment_text(aligned: Alignment) -> str:
    largest, spread = float(np.abs(aligned.offset_s).max()), float(aligned.spread_s.max())
    text = f"clocks: offsets up to {format_seconds(largest)}, uncertain by {format_seconds(spread)} (standard deviation)"
    if aligned.worst_slack_s > 0:
        text += f"; {len(aligned.residuals)} collectives break the order of events, by up to {format_seconds(aligned.worst_slack_s)}"
    return text


def _alignment_data(job: TraceJob, aligned: Alignment) -> dict[str, Any]:
    def finite(values: np.ndarray) -> list[float | None]:
        return [float(value) if np.isfinite(value) else None for value in values]

    return {
        "offset_s": finite(aligned.offset_s),
        "low_s": finite(aligned.low_s),
        "high_s": finite(aligned.high_s),
        "spread_s": finite(aligned.spread_s),
        "worst_slack_s": aligned.worst_slack_s,
        "notes": list(aligned.notes),
    }


def _tail(options: argparse.Namespace) -> str:
    lines = []
    if options.timeline is not None:
        lines.append(f"timeline: {options.timeline} (opens in Perfetto)")
    if options.report is not None:
        lines.append(f"report: {options.report}")
    return "\n".join(lines)


def _page(
    job: TraceJob,
    number: int,
    measured_s: float,
    error: float,
    aligned: Alignment | None,
    memory: ShownMemory | None,
    summary: IterationSummary,
) -> Page:
    title = f"{format_seconds(summary.iteration_s)} per iteration"
    exposed = summary.exposed_communication_s / summary.iteration_s if summary.iteration_s > 0 else 0.0
    text = f"{100 * exposed:.0f} % of it is communication that no computation hides; step {number} took {format_seconds(measured_s)}."
    facts = (
        Fact("Measured", format_seconds(measured_s), f"the replay is {100 * error:+.2f} % off"),
        *iteration_facts(summary),
        *memory_facts(memory),
    )
    listings = (*(() if aligned is None else (_clocks(job, aligned),)), *memory_listings(memory))
    notes = tuple(str(repair) for repair in job.repairs[:SHOWN_REPAIRS])
    kicker = f"autotune replay · {len(job.ranks)} of {job.world_size} ranks · {Path(job.source).name or job.source}"
    return Page(kicker, title, text, facts, listings, notes)


def _clocks(job: TraceJob, aligned: Alignment) -> Listing:
    rows = tuple(
        (str(rank), *(format_seconds(abs(value)) if value >= 0 else f"-{format_seconds(-value)}" for value in values))
        for rank, *values in zip(
            job.rank_numbers[:MOST_RANK_ROWS],
            aligned.offset_s.tolist(),
            np.nan_to_num(aligned.low_s, neginf=0.0).tolist(),
            np.nan_to_num(aligned.high_s, posinf=0.0).tolist(),
            aligned.spread_s.tolist(),
            strict=False,
        )
    )
    text = "What is added to the times of each rank; between lowest and highest no event comes before its cause."
    return Listing("Clocks", ("rank", "offset", "lowest", "highest", "standard deviation"), rows, frozenset({1, 2, 3, 4}), text)
