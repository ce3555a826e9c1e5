"""Rows of part (b), their table and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class CpuRow:
    """Step times in seconds; `reason` where the change does not apply."""

    example: str
    change: str
    baseline_s: float = 0.0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    reason: str = ""

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)

    @property
    def error_of_no_change(self) -> float:
        return abs(self.baseline_s / self.measured_s - 1)


def keys(found: Sequence[CpuRow]) -> dict[str, Any]:
    """The benchmark's keys of this part."""
    measured = [row for row in found if not row.reason]
    if not measured:
        return {}
    return {
        "error_mean_cpu": fmean(row.error for row in measured),
        "error_max_cpu": max(row.error for row in measured),
        "error_no_change_cpu": fmean(row.error_of_no_change for row in measured),
        "changes_cpu": len(measured),
        "refused_cpu": len(found) - len(measured),
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
