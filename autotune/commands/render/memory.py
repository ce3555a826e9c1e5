"""The memory of a replica: its peak by parts, and the passes that reduce it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from autotune.commands.render.tables import table_text
from autotune.memory.fitting import MemoryFit
from autotune.memory.peak import MemoryEstimate
from autotune.recordings.memory_file import RecordedMemory
from autotune.reports.timeline_page import Fact, Listing
from autotune.units import format_bytes, format_seconds

PARTS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "activation": "activations",
    "buffer": "buffers of the module",
    "communication": "communication buffers",
    "temporary": "temporaries",
    "library": "kept by libraries",
}
"""Names for people, by `TensorRole`."""


@dataclass(frozen=True)
class ShownMemory:
    """The predicted peak of a replica. `budget_bytes` and `fit` are set if there was a budget."""

    estimate: MemoryEstimate
    recorded: RecordedMemory
    budget_bytes: int | None = None
    fit: MemoryFit | None = None

    @property
    def runs(self) -> list[list[str]]:
        """Names of the recomputed regions, one list for each run."""
        runs = () if self.fit is None else self.fit.runs
        regions = self.recorded.profile.regions
        return [[one.name for one in regions[run.first : run.last + 1]] for run in runs]

    @property
    def during(self) -> str:
        """Phase and time of the peak."""
        profile = self.recorded.profile if self.fit is None else self.fit.profile
        phase = profile.segments[self.estimate.segment].phase.value
        return f"{phase}, {format_seconds(self.estimate.at_s)} into the step"

    @property
    def assumed(self) -> list[str]:
        """Assumed, not measured."""
        if self.fit is None or self.fit.parts == 1:
            return []
        times = "" if self.recorded.fixed is not None else " and times"
        return [f"activations{times} of a micro-batch, in proportion to its samples"]


def memory_data(shown: ShownMemory | None) -> dict[str, Any] | None:
    """None if it is unknown."""
    if shown is None:
        return None
    data: dict[str, Any] = {
        "peak_bytes": shown.estimate.peak_bytes,
        "parts_bytes": {name: shown.estimate.by_kind[kind] for kind, name in PARTS.items()},
        "at_s": shown.estimate.at_s,
        "budget_bytes": shown.budget_bytes,
    }
    if shown.fit is not None:
        data["passes"] = {
            "recomputed": [name for run in shown.runs for name in run],
            "runs": shown.runs,
            "micro_batches": shown.fit.parts,
            "price_s": shown.fit.price_s,
            "peak_before_bytes": shown.fit.before.peak_bytes,
            "assumed": shown.assumed,
        }
    return data


def memory_table(shown: ShownMemory | None) -> str:
    """One row per part, and a line about the passes."""
    if shown is None:
        return ""
    table = Table("peak memory of a replica", "bytes", "share")
    table.columns[1].justify = table.columns[2].justify = "right"
    for row in _rows(shown.estimate):
        table.add_row(*row)
    return table_text(table) + "".join(
        f"{line}\n" for line in (f"at its peak: {shown.during}", *_passes(shown))
    )


def memory_facts(shown: ShownMemory | None) -> tuple[Fact, ...]:
    if shown is None:
        return ()
    remark = (
        f"budget {format_bytes(shown.budget_bytes)}"
        if shown.budget_bytes is not None
        else "predicted, of a replica"
    )
    return (Fact("Peak memory", format_bytes(shown.estimate.peak_bytes), remark),)


def memory_listings(shown: ShownMemory | None) -> tuple[Listing, ...]:
    if shown is None:
        return ()
    text = " ".join(
        f"{line[0].upper()}{line[1:]}."
        for line in (f"at its peak: {shown.during}", *_passes(shown))
    )
    return (
        Listing(
            "Peak memory of a replica",
            ("for", "bytes", "share"),
            tuple(_rows(shown.estimate)),
            frozenset({1, 2}),
            text,
        ),
    )


def _rows(estimate: MemoryEstimate) -> list[tuple[str, str, str]]:
    whole = max(estimate.peak_bytes, 1)
    rows = [(name, estimate.by_kind[kind]) for kind, name in PARTS.items()]
    rows.append(("total", estimate.peak_bytes))
    return [(name, format_bytes(size), f"{100 * size / whole:.1f} %") for name, size in rows]


def _passes(shown: ShownMemory) -> list[str]:
    fit = shown.fit
    if fit is None or shown.budget_bytes is None:
        return []
    if not fit.runs and fit.parts == 1:
        return [f"it fits into {format_bytes(shown.budget_bytes)} as it is"]
    what = []
    if fit.parts > 1:
        what.append(f"the batch in {fit.parts} parts (gradient accumulation)")
    if shown.runs:
        what.append(f"recomputed: {', '.join(map(_checkpoint, shown.runs))}")
    price = f"predicted price {format_seconds(fit.price_s)} a step with DDP's default buckets"
    lines = [
        f"to fit into {format_bytes(shown.budget_bytes)} instead of "
        f"{format_bytes(fit.before.peak_bytes)}: {'; '.join(what)}",
        f"{price} ({format_seconds(fit.before_step_s)} to {format_seconds(fit.step_s)})",
    ]
    return lines + [f"assumed, not measured: {one}" for one in shown.assumed]


def _checkpoint(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} to {names[-1]} as one checkpoint"
