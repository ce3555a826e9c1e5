"""The HTML page of a replayed iteration: its timeline, critical path and further tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.dfg.critical_path import CriticalPath
from autotune.dfg.graph import Kind
from autotune.dfg.utilisation import IterationSummary, busy_share
from autotune.reports.pages import write_page
from autotune.reports.timeline_charts import LEGEND, MOST_ROWS, gantt_chart

MOST_LAYERS, MOST_OPS, MOST_QUEUES = 20, 20, 40


@dataclass(frozen=True)
class Fact:
    """A figure in a box, with a remark in small print."""

    name: str
    value: str
    remark: str = ""


@dataclass(frozen=True)
class Listing:
    """A table. `numeric` columns are right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    text: str = ""


@dataclass(frozen=True)
class Page:
    """The text above the timeline. `won` colors the headline."""

    kicker: str
    title: str
    text: str
    facts: tuple[Fact, ...]
    listings: tuple[Listing, ...] = ()
    notes: tuple[str, ...] = ()
    won: bool = False


def write_timeline_report(path: Path, page: Page, summary: IterationSummary) -> None:
    """Write the page; raises `InvalidInput` if `path` cannot be written."""
    critical_path = summary.critical_path
    context = {
        "page": page,
        "gantt": gantt_chart(critical_path.timeline, critical_path),
        "legend": LEGEND,
        "most_rows": MOST_ROWS,
        "kinds": _kinds(critical_path),
        "layers": _shares(critical_path.by_layer, critical_path, MOST_LAYERS),
        "ops": _ops(critical_path),
        "queues": _queues(critical_path),
        "makespan_s": critical_path.timeline.makespan_s,
    }
    write_page(path, "timeline_page.html.j2", context, "the report")


def kind_name(kind: Kind) -> str:
    """The name for people. A virtual op with a duration is a delay, such as a thread wake-up."""
    return "delay" if kind == Kind.VIRTUAL else kind.name.lower()


def _kinds(path: CriticalPath) -> list[tuple[str, float, float]]:
    """(name, seconds, share) of the critical path, waits included."""
    named = {kind_name(kind): seconds for kind, seconds in path.by_kind.items()}
    if path.total_wait_s > 0:
        named["waiting"] = path.total_wait_s
    return _shares(named, path, len(named))


def _shares(
    seconds: dict[str, float], path: CriticalPath, most: int
) -> list[tuple[str, float, float]]:
    whole_s = path.timeline.makespan_s
    largest = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))[:most]
    return [
        (name or "(no layer)", part_s, part_s / whole_s if whole_s > 0 else 0.0)
        for name, part_s in largest
    ]


def _ops(path: CriticalPath) -> list[dict[str, Any]]:
    """The longest ops of the critical path, by start time."""
    dfg, timeline = path.timeline.dfg, path.timeline
    longest = path.ops[np.argsort(-timeline.duration_s[path.ops], kind="stable")[:MOST_OPS]]
    return [
        {
            "name": dfg.names.ops[op],
            "queue": dfg.names.queues[dfg.queue[op]] if dfg.queue[op] >= 0 else "",
            "kind": kind_name(Kind(int(dfg.kind[op]))),
            "start_s": float(timeline.start_s[op]),
            "duration_s": float(timeline.duration_s[op]),
        }
        for op in sorted(longest.tolist(), key=lambda op: (timeline.start_s[op], op))
    ]


def _queues(path: CriticalPath) -> list[tuple[str, float]]:
    share = busy_share(path.timeline)
    busiest: Sequence[int] = np.argsort(-share, kind="stable")[:MOST_QUEUES].tolist()
    return [(path.timeline.dfg.names.queues[queue], float(share[queue])) for queue in busiest]
