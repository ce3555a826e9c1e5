"""Rows of part (b), their table and keys, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune.parsing import parse


@dataclass(frozen=True)
class CpuRow:
    """Step times in seconds; `reason` where the change does not apply. `load`: of the machine."""

    __pydantic_config__ = {"extra": "forbid"}

    example: str
    change: str
    baseline_s: float = 0.0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    reason: str = ""
    load: float = 0.0

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)

    @property
    def error_of_no_change(self) -> float:
        return abs(self.baseline_s / self.measured_s - 1)


class KeptRows:
    """The rows of a run in a file, one JSON object per line; a run that was cut off goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows = [parse(CpuRow, json.loads(line), str(path)) for line in lines]

    def of(self, example: str, change: str) -> CpuRow | None:
        known = (row for row in self.rows if (row.example, row.change) == (example, change))
        return next(known, None)

    def add(self, row: CpuRow) -> None:
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def keys(found: Sequence[CpuRow]) -> dict[str, Any]:
    """The benchmark's keys of this part; `refused_cpu`: rows that have a reason instead."""
    measured = [row for row in found if not row.reason]
    counts = {"changes_cpu": len(measured), "refused_cpu": len(found) - len(measured)}
    if not measured:
        return counts
    return {
        "error_mean_cpu": fmean(row.error for row in measured),
        "error_max_cpu": max(row.error for row in measured),
        "error_no_change_cpu": fmean(row.error_of_no_change for row in measured),
        **counts,
        "load_max_cpu": max(row.load for row in measured),
    }


def table(found: Sequence[CpuRow]) -> str:
    lines = [
        "| example | change | without (ms) | predicted | measured | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        if row.reason:
            lines.append(f"| {row.example} | {row.change} | | | | {row.reason} |")
            continue
        shown = " | ".join(
            f"{1e3 * value:.1f}" for value in (row.baseline_s, row.predicted_s, row.measured_s)
        )
        lines.append(f"| {row.example} | {row.change} | {shown} | {row.error:.1%} |")
    return "\n".join(lines)
