"""`autotune replay`: align and replay the traces of a job, and break an iteration down.

Rank 0's timeline of Horovod is replayed alone."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.cluster import Cluster
from autotune.commands.arguments import add_ranks, add_replay_outputs
from autotune.commands.render.horovod import (
    ShownTimeline,
    timeline_data,
    timeline_page,
    timeline_text,
)
from autotune.commands.render.iteration import (
    iteration_data,
    iteration_facts,
    iteration_table,
    write_timeline,
)
from autotune.commands.render.memory import (
    ShownMemory,
    memory_data,
    memory_facts,
    memory_listings,
    memory_table,
)
from autotune.dfg.replay import replay
from autotune.dfg.utilisation import IterationSummary, iteration_summary
from autotune.errors import InvalidInput, MissingExtra
from autotune.memory.peak import highest_peak
from autotune.profiling.formats.horovod import HorovodTimeline
from autotune.profiling.formats.rank_trace import repair_lines
from autotune.profiling.graph.global_graph import build_dfg
from autotune.profiling.graph.horovod_steps import (
    chosen_step,
    horovod_steps,
    operations_outside,
    step_dfg,
)
from autotune.profiling.graph.traced_steps import TracedSteps
from autotune.profiling.traces.job import TraceJob, read_job, read_timeline
from autotune.recordings.job_file import RecordedJob
from autotune.recordings.memory_file import RecordedMemory
from autotune.reports.timeline_page import Fact, Listing, Page, write_timeline_report
from autotune.units import format_seconds

if TYPE_CHECKING:
    from autotune.profiling.alignment.result import Alignment

SHOWN_REPAIRS, SHOWN_STEPS = 8, 12
MOST_RANK_ROWS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces",
        nargs="+",
        help="traces of torch.profiler (Kineto) of one job's ranks: files, folders, archives, or "
        "patterns; or the timeline that Horovod's rank 0 wrote",
    )
    parser.add_argument(
        "--step", default="median", help="number of the step (default: the one of median time)"
    )
    parser.add_argument(
        "--hosts",
        default="",
        metavar="HOSTS",
        help="ranks that share a clock: a name per rank (a,a,b,b) or ranks per host",
    )
    add_ranks(parser)
    parser.add_argument(
        "--no-align",
        dest="align",
        action="store_false",
        help="use the clocks of the ranks unchanged",
    )
    add_replay_outputs(parser)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Read, align and replay the traces; show the chosen step."""
    if (timeline := read_timeline(options.traces)) is not None:
        return _run_timeline(timeline, options)
    job = read_job(options.traces, options.hosts, options.ranks)
    aligned = _aligned(job, options.align)
    steps = TracedSteps(job, aligned)
    number = steps.chosen(_step(options.step))
    parts = steps.parts(number)
    summary = iteration_summary(replay(build_dfg(parts, job.joints)))
    unexplained_s = max(part.ops.unexplained_s for part in parts)
    shown = _Shown(
        job,
        aligned,
        number,
        steps.measured_s(number),
        summary,
        unexplained_s,
        _memory(options.traces),
    )
    if options.timeline is not None:
        write_timeline(summary, options.timeline)
    if options.report is not None:
        write_timeline_report(options.report, _page(shown), summary)
    tables = iteration_table(summary) + memory_table(shown.memory)
    return _data(shown), "\n".join([*_head(shown), tables + _tail(options)]).rstrip()


def _run_timeline(
    timeline: HorovodTimeline, options: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    steps = horovod_steps(timeline)
    wanted = _step(options.step)
    step = chosen_step(steps, None if wanted == "median" else wanted)
    summary = iteration_summary(replay(step_dfg(timeline, step)))
    outside = operations_outside(timeline, steps)
    shown = ShownTimeline(timeline, step, len(steps), outside, summary)
    if options.timeline is not None:
        write_timeline(summary, options.timeline)
    if options.report is not None:
        write_timeline_report(options.report, timeline_page(shown), summary)
    return timeline_data(shown), (timeline_text(shown) + _tail(options)).rstrip()


@dataclass(frozen=True, eq=False)
class _Shown:
    """`unexplained_s`: waits without a cause in the traces, on the rank with the most.

    The replay keeps them as measured. A change before them may not move them.
    """

    job: TraceJob
    aligned: Alignment | None
    step: int
    measured_s: float
    summary: IterationSummary
    unexplained_s: float
    memory: ShownMemory | None

    @property
    def error(self) -> float:
        return self.summary.iteration_s / self.measured_s - 1 if self.measured_s > 0 else 0.0


def _data(shown: _Shown) -> dict[str, Any]:
    job, aligned = shown.job, shown.aligned
    return {
        "ranks": list(job.rank_numbers),
        "world_size": job.world_size,
        "hosts": list(job.hosts.names),
        "hosts_from": job.hosts.source,
        "step": shown.step,
        "steps": list(job.steps),
        "matched_collectives": len(job.joints),
        "measured_step_s": shown.measured_s,
        "replay_error": shown.error,
        "unexplained_s": shown.unexplained_s,
        "alignment": None if aligned is None else _alignment_data(aligned),
        "execution_traces": [asdict(link) for link in job.links],
        "repairs": [str(repair) for repair in job.repairs],
        "dropped_events": dict(job.dropped),
        "memory": memory_data(shown.memory),
        **iteration_data(shown.summary),
    }


def _memory(traces: list[str]) -> ShownMemory | None:
    """The predicted peak of a replica of the recorded job, if its folder holds the memory."""
    folder = Path(traces[0])
    if len(traces) != 1 or (memory := RecordedMemory.read(folder)) is None:
        return None
    job = RecordedJob.read(folder)
    if job.workload is None:
        return None
    cluster = Cluster.local(job.world_size)
    return ShownMemory(
        highest_peak(memory, memory.profile, job.workload, job.plan, cluster), memory
    )


def _step(text: str) -> int | Any:
    if text == "median" or text.isdigit():
        return int(text) if text.isdigit() else "median"
    raise InvalidInput(f"--step must be the number of a step, or median, but is {text!r}")


def _aligned(job: TraceJob, wanted: bool) -> Alignment | None:
    if not wanted or len(job.ranks) < 2 or not any(joint.aligns for joint in job.joints):
        return None
    from autotune.profiling.alignment.align import align

    try:
        return align(job)
    except MissingExtra as error:
        if _one_clock(job):
            return None
        raise MissingExtra(f"{error}; or use the clocks unchanged (--no-align)") from error


def _one_clock(job: TraceJob) -> bool:
    """Whether the traces or the user state that all ranks are on one host."""
    hosts = job.hosts
    return bool(hosts.source) and not hosts.assumed and len(set(hosts.names)) == 1


def _head(shown: _Shown) -> list[str]:
    job, several = shown.job, len(shown.job.ranks) > 1
    ranks = f"{len(job.ranks)} rank{'s' * several}"
    if len(job.ranks) < job.world_size:
        ranks = f"{len(job.ranks)} of {job.world_size} ranks"
    others = ""
    if len(job.steps) > 1:
        more = " ..." if len(job.steps) > SHOWN_STEPS else ""
        listed = ", ".join(map(str, job.steps[:SHOWN_STEPS]))
        others = f" (of {len(job.steps)}: {listed}{more})"
    matched = f", {len(job.joints)} collectives matched across ranks" if several else ""
    lines = [f"{ranks}, step {shown.step}{others}{matched}"]
    repairs = repair_lines(job.repairs)
    lines += [f"  repaired: {repair}" for repair in repairs[:SHOWN_REPAIRS]]
    if len(repairs) > SHOWN_REPAIRS:
        lines.append(f"  and {len(repairs) - SHOWN_REPAIRS} more (all with --json)")
    lines += [f"  {line}" for line in job.unknown_lines]
    lines += [
        f"execution trace of rank {link.rank}: {link.by_id} of {link.collectives} collectives "
        "linked by id"
        for link in job.links
        if link.by_id
    ][:SHOWN_REPAIRS]
    if several:
        lines += [job.hosts.text(job.rank_numbers), *_clock_lines(job, shown.aligned)]
    lines.append(
        f"measured {format_seconds(shown.measured_s)}, replayed {100 * shown.error:+.2f} %"
    )
    if shown.unexplained_s:
        lines.append(
            f"streams wait {format_seconds(shown.unexplained_s)} in all without a cause in the "
            "traces, kept as measured (rank with the most)"
        )
    return lines


def _clock_lines(job: TraceJob, aligned: Alignment | None) -> list[str]:
    if aligned is None:
        shared = "; the ranks share the clock of their host" if _one_clock(job) else ""
        return [f"clocks: not aligned{shared}"]
    text = f"clocks: offsets up to {format_seconds(float(np.abs(aligned.offset_s).max()))}"
    if np.isfinite(aligned.spread_s).all():
        spread_s = float(aligned.spread_s.max())
        text += f", uncertain by {format_seconds(spread_s)} (standard deviation)"
    if aligned.drift.any():
        text += f"; drifts up to {1e6 * np.abs(aligned.drift).max():.2f} ppm"
    return [text, *(f"  {note}" for note in aligned.notes)]


def _alignment_data(aligned: Alignment) -> dict[str, Any]:
    def finite(values: np.ndarray) -> list[float | None]:
        return [float(value) if np.isfinite(value) else None for value in values]

    return {
        "offset_s": finite(aligned.offset_s),
        "low_s": finite(aligned.low_s),
        "high_s": finite(aligned.high_s),
        "spread_s": finite(aligned.spread_s),
        "drift": finite(aligned.drift),
        "drift_spread": finite(aligned.drift_spread),
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


def _page(shown: _Shown) -> Page:
    job, aligned, summary = shown.job, shown.aligned, shown.summary
    title = f"{format_seconds(summary.iteration_s)} per iteration"
    percent = 100 / summary.iteration_s if summary.iteration_s > 0 else 0.0
    text = (
        f"{percent * summary.exposed_communication_s:.0f} % is communication that no computation "
        f"hides; in {percent * summary.idle_s:.0f} % neither runs. Step {shown.step} took "
        f"{format_seconds(shown.measured_s)}."
    )
    remark = f"the replay is {100 * shown.error:+.2f} % off"
    facts = (
        Fact("Measured", format_seconds(shown.measured_s), remark),
        *iteration_facts(summary),
        *memory_facts(shown.memory),
    )
    listings = memory_listings(shown.memory)
    notes = [job.hosts.text(job.rank_numbers)] if len(job.ranks) > 1 else []
    notes += [*repair_lines(job.repairs)[:SHOWN_REPAIRS], *job.unknown_lines]
    if aligned is not None:
        listings = (_clocks(job, aligned), *listings)
        notes += aligned.notes
    source = Path(job.source).name or job.source
    kicker = f"autotune replay · {len(job.ranks)} of {job.world_size} ranks · {source}"
    return Page(kicker, title, text, facts, listings, tuple(notes))


def _clocks(job: TraceJob, aligned: Alignment) -> Listing:
    def shown(value: float) -> str:
        if not np.isfinite(value):
            return "unknown"
        return format_seconds(value) if value >= 0 else f"-{format_seconds(-value)}"

    figures = (aligned.offset_s, aligned.low_s, aligned.high_s, aligned.spread_s)
    rows = tuple(
        (
            str(rank),
            job.hosts.names[place] or "unknown",
            *(shown(float(values[place])) for values in figures),
            f"{1e6 * drift:.2f} ppm",
        )
        for place, (rank, drift) in enumerate(
            zip(job.rank_numbers[:MOST_RANK_ROWS], aligned.drift.tolist(), strict=False)
        )
    )
    columns = ("rank", "host", "offset", "lowest", "highest", "standard deviation", "drift")
    text = (
        "Offsets added to the times of each rank. Between lowest and highest, no event precedes "
        "its cause."
    )
    return Listing("Clocks", columns, rows, frozenset({2, 3, 4, 5, 6}), text)
