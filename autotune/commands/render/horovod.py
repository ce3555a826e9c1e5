"""A replayed step of a Horovod timeline as text, as data and as a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.commands.render.iteration import iteration_data, iteration_facts, iteration_table
from autotune.dfg.utilisation import IterationSummary
from autotune.profiling.formats.horovod import FusedBatch, HorovodTimeline, TensorOperation
from autotune.profiling.formats.rank_trace import repair_lines
from autotune.profiling.graph.horovod_steps import HorovodStep
from autotune.reports.timeline_page import Fact, Listing, Page
from autotune.units import format_bytes, format_seconds

MOST_BATCHES = 200


@dataclass(frozen=True, eq=False)
class ShownTimeline:
    """The step that was replayed, out of `steps` steps; `outside`: operations of no step."""

    timeline: HorovodTimeline
    step: HorovodStep
    steps: int
    outside: tuple[int, ...]
    summary: IterationSummary

    @property
    def batches(self) -> list[FusedBatch]:
        return [self.timeline.batches[number] for number in self.step.batches]

    @property
    def tensors(self) -> int:
        return sum(len(batch.operations) for batch in self.batches)

    @property
    def outside_operations(self) -> list[TensorOperation]:
        return [self.timeline.operations[at] for at in self.outside]

    @property
    def cycle_s(self) -> float | None:
        """Median distance of the marked cycles, None without marks."""
        cycles_s = self.timeline.cycles_s
        return float(np.median(np.diff(cycles_s))) if len(cycles_s) > 1 else None

    @property
    def error(self) -> float:
        measured_s = self.step.measured_s
        return self.summary.iteration_s / measured_s - 1 if measured_s > 0 else 0.0


def timeline_data(shown: ShownTimeline) -> dict[str, Any]:
    timeline = shown.timeline
    return {
        "format": "horovod",
        "ranks": [0],
        "world_size": timeline.ranks,
        "step": shown.step.number,
        "steps": list(range(shown.steps)),
        "measured_step_s": shown.step.measured_s,
        "replay_error": shown.error,
        "tensors": shown.tensors,
        "batches": [
            {
                "tensors": [timeline.operations[member].tensor for member in batch.operations],
                "transfer": batch.transfer,
                "bytes": batch.size_bytes,
                "start_s": batch.start_s - shown.step.start_s,
                "transfer_s": batch.transfer_s[1] - batch.transfer_s[0],
                "end_s": batch.end_s - shown.step.start_s,
            }
            for batch in shown.batches
        ],
        "cycle_s": shown.cycle_s,
        "outside_steps": {
            "operations": len(shown.outside),
            "bytes": sum(one.size_bytes for one in shown.outside_operations),
            "without_bytes": sum(not one.size_bytes for one in shown.outside_operations),
        },
        "hops": "derived" if any(batch.is_flat for batch in shown.batches) else "whole",
        "repairs": [str(repair) for repair in timeline.repairs],
        **iteration_data(shown.summary),
    }


def timeline_text(shown: ShownTimeline) -> str:
    lines = [
        f"timeline of Horovod, rank 0 of {shown.timeline.ranks}, step {shown.step.number} "
        f"of {shown.steps}: {shown.tensors} tensors in {len(shown.step.batches)} batches"
    ]
    lines += [f"  repaired: {line}" for line in repair_lines(shown.timeline.repairs)]
    lines += [f"  {note}" for note in _notes(shown)]
    lines.append(
        f"measured {format_seconds(shown.step.measured_s)}, replayed {100 * shown.error:+.2f} %"
    )
    return "\n".join([*lines, iteration_table(shown.summary)])


def timeline_page(shown: ShownTimeline) -> Page:
    name = Path(shown.timeline.source).name
    rows = tuple(
        (
            shown.timeline.operations[batch.operations[0]].tensor,
            str(len(batch.operations)),
            format_bytes(batch.size_bytes),
            format_seconds(batch.start_s - shown.step.start_s),
            format_seconds(batch.transfer_s[1] - batch.transfer_s[0]),
        )
        for batch in shown.batches[:MOST_BATCHES]
    )
    columns = ("first tensor", "tensors", "bytes", "starts", "transfer")
    listing = Listing("Fused batches", columns, rows, frozenset({1, 2, 3, 4}))
    measured = Fact(
        "Measured",
        format_seconds(shown.step.measured_s),
        f"the replay is {100 * shown.error:+.2f} % off",
    )
    return Page(
        f"autotune replay · Horovod timeline · {name}",
        f"{format_seconds(shown.summary.iteration_s)} from the first negotiation",
        f"Step {shown.step.number} of {shown.steps}: {shown.tensors} tensors in "
        f"{len(shown.step.batches)} batches.",
        (measured, *iteration_facts(shown.summary)),
        (listing,),
        (*repair_lines(shown.timeline.repairs), *_notes(shown)),
    )


def _notes(shown: ShownTimeline) -> list[str]:
    notes = ["computation is not in a timeline; a step counts from its first negotiation"]
    if shown.outside:
        notes.append(_outside_note(shown))
    hierarchical = sum(not batch.is_flat for batch in shown.batches)
    if hierarchical:
        notes.append(f"{hierarchical} batches are sent hierarchically, each shown as one transfer")
    if shown.timeline.ranks > 1 and hierarchical < len(shown.batches):
        notes.append("the hops of a transfer are derived from a ring of its ranks")
    elif shown.timeline.ranks == 1:
        notes.append("no negotiation names its ranks, so a transfer is shown whole")
    if shown.cycle_s is not None:
        notes.append(f"negotiation cycles begin every {format_seconds(shown.cycle_s)} (median)")
    return notes


def _outside_note(shown: ShownTimeline) -> str:
    operations = shown.timeline.operations
    outside_bytes, all_bytes = (
        format_bytes(sum(one.size_bytes for one in some))
        for some in (shown.outside_operations, operations)
    )
    without = sum(not one.size_bytes for one in shown.outside_operations)
    unstated = f" ({without} state no bytes)" if without else ""
    return (
        f"{len(shown.outside)} of {len(operations)} operations belong to no step, with "
        f"{outside_bytes} of {all_bytes}{unstated}"
    )
