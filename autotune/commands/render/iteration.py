"""A replayed iteration as a table, as data and as facts of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from autotune.commands.render.tables import table_text
from autotune.dfg.chrome_trace import write_chrome_trace
from autotune.dfg.utilisation import IterationSummary
from autotune.reports.timeline_page import Fact, kind_name
from autotune.units import format_seconds

TOP_LAYERS = 5


def iteration_table(summary: IterationSummary) -> str:
    """One row per figure, with its share of the iteration."""
    table = Table("figure", "time", "share of the iteration", "")
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, seconds, remark in _rows(summary):
        share = f"{100 * seconds / summary.iteration_s:.1f} %" if summary.iteration_s > 0 else ""
        table.add_row(name, format_seconds(seconds), share, remark)
    queue, busy = summary.bottleneck_queue, 100 * summary.bottleneck_share
    bottleneck = f"bottleneck: {queue}, busy for {busy:.1f} % of the iteration" if queue else ""
    layers = sorted(summary.critical_path.by_layer.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{name or 'no layer'} {format_seconds(seconds)}" for name, seconds in layers][
        : TOP_LAYERS + 1
    ]
    most = f"critical path by layer: {', '.join(named)}" if any(name for name, _ in layers) else ""
    return table_text(table) + "".join(f"{line}\n" for line in (bottleneck, most) if line)


def _rows(summary: IterationSummary) -> list[tuple[str, float, str]]:
    path = summary.critical_path
    worker = f"worker {summary.worker}, which ends last" if summary.worker >= 0 else ""
    kinds = ", ".join(
        f"{kind_name(kind)} {format_seconds(seconds)}" for kind, seconds in path.by_kind.items()
    )
    return [
        ("iteration", summary.iteration_s, worker),
        ("computation", summary.computation_s, "forward, backward, update and other"),
        ("forward", summary.forward_s, ""),
        ("backward", summary.backward_s, ""),
        ("update", summary.update_s, ""),
        ("communication", summary.communication_s, ""),
        ("exposed communication", summary.exposed_communication_s, "no computation overlaps it"),
        ("idle", summary.idle_s, "waits for launches, loads, copies or other workers"),
        ("critical path: computation", path.computation_s, f"{len(path.ops)} ops; {kinds}"),
        ("critical path: communication", path.communication_s, ""),
        ("critical path: other", path.other_s, "launches, loads, copies, delays between queues"),
        ("critical path: waiting", path.total_wait_s, "gaps between the ops of a queue"),
    ]


def iteration_data(summary: IterationSummary) -> dict[str, Any]:
    path = summary.critical_path
    return {
        "iteration_s": summary.iteration_s,
        "worker": summary.worker if summary.worker >= 0 else None,
        "computation_s": summary.computation_s,
        "forward_s": summary.forward_s,
        "backward_s": summary.backward_s,
        "update_s": summary.update_s,
        "communication_s": summary.communication_s,
        "exposed_communication_s": summary.exposed_communication_s,
        "idle_s": summary.idle_s,
        "bottleneck": {"queue": summary.bottleneck_queue, "busy_share": summary.bottleneck_share},
        "critical_path": {
            "ops": len(path.ops),
            "computation_s": path.computation_s,
            "communication_s": path.communication_s,
            "other_s": path.other_s,
            "waiting_s": path.total_wait_s,
            "by_kind_s": {kind_name(kind): seconds for kind, seconds in path.by_kind.items()},
            "by_layer_s": path.by_layer,
        },
        "ops": path.timeline.dfg.ops,
        "queues": path.timeline.dfg.queues,
    }


def iteration_facts(summary: IterationSummary) -> tuple[Fact, ...]:
    whole_s = summary.iteration_s

    def fact(name: str, seconds: float, remark: str = "") -> Fact:
        share = f"{100 * seconds / whole_s:.0f} % of the iteration" if whole_s > 0 else ""
        return Fact(name, format_seconds(seconds), remark or share)

    dfg = summary.critical_path.timeline.dfg
    return (
        fact("Iteration", whole_s, f"{dfg.ops} ops on {dfg.queues} queues"),
        fact("Forward", summary.forward_s),
        fact("Backward", summary.backward_s),
        fact("Update", summary.update_s),
        fact("Communication", summary.communication_s),
        fact("Exposed communication", summary.exposed_communication_s),
        fact("Idle", summary.idle_s),
        Fact(
            "Bottleneck",
            summary.bottleneck_queue or "none",
            f"busy for {100 * summary.bottleneck_share:.0f} %",
        ),
    )


def write_timeline(summary: IterationSummary, path: Path) -> None:
    """Write the Chrome trace of the iteration; raises `InvalidInput` if that fails."""
    write_chrome_trace(summary.critical_path.timeline, path)
