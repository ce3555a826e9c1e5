"""(a) Predicts unrecorded step times of variants from one recording in fp32.

Each model is predicted with factors that were fitted on the other models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import autotune.whatif.changes.all  # noqa: F401 - registers the what-ifs
from autotune.dfg.graph import NONE
from autotune.errors import InvalidInput
from autotune.whatif.answers.predict import changed
from autotune.whatif.base import Base, steady
from autotune.whatif.changes import batch, optimizer, precision
from autotune.whatif.kernels.factors import FactorTable
from autotune.whatif.kernels.h100_factors import H100
from autotune.whatif.primitives import scale, select
from autotune.whatif.question import Question, Reading
from autotune.whatif.recording.recording_cost import without_recording
from autotune.whatif.registry import WHAT_IFS, Change, WhatIf
from benchmarks.whatif_truth.fit import Facts, facts, table_of
from benchmarks.whatif_truth.recorded_models import PLAIN, RecordedModel, Timed, recorded_models

MS = 1e3
_FITTED: dict[str, Any] = {
    "amp": precision.amp,
    "amp_fp16": precision.amp_fp16,
    "tf32": precision.tf32,
    "fused_adam": optimizer.fused_adam,
    "for_each_optimizer": optimizer.for_each_optimizer,
    "batch": batch.batch,
    "accumulate": batch.accumulate,
}
"""What-ifs that take a table of factors."""
_PRECISIONS = {"tf32": "tf32", "bf16": "amp", "fp16": "amp_fp16"}
_OPTIMIZERS = {"fused": "fused_adam", "for_each": "for_each_optimizer"}


@dataclass(frozen=True)
class Row:
    """One variant. Times in seconds; `refused` states why there is no prediction."""

    model: str
    timed: Timed
    what_ifs: str
    plain_s: float
    predicted_s: float = float("nan")
    low_s: float = float("nan")
    high_s: float = float("nan")
    device_s: float = float("nan")
    host_s: float = float("nan")
    paper_s: float = float("nan")
    refused: str = ""

    @property
    def judged(self) -> bool:
        return not self.timed.host_bound and not self.refused

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.timed.step_s - 1)

    @property
    def unchanged_error(self) -> float:
        return abs(self.plain_s / self.timed.step_s - 1)

    @property
    def paper_error(self) -> float:
        return abs(self.paper_s / self.timed.step_s - 1)

    @property
    def covered(self) -> bool:
        return self.low_s <= self.timed.step_s <= self.high_s


def what_ifs_of(variant: dict[str, Any]) -> tuple[list[str], dict[str, float]]:
    """The what-ifs that make up a variant of `times.json`, and their amounts."""
    names, amounts = [], {}
    if variant.get("batch_factor", 1.0) != 1.0:
        names.append("batch")
        amounts["batch"] = float(variant["batch_factor"])
    if variant.get("recompute"):
        names.append("recompute")
    if variant["precision"] != PLAIN:
        names.append(_PRECISIONS[variant["precision"]])
    if variant.get("channels_last"):
        names.append("channels_last")
    if variant.get("compiled"):
        names.append("fused_elementwise")
    if variant["optimizer"] in _OPTIMIZERS:
        names.append(_OPTIMIZERS[variant["optimizer"]])
    if variant.get("parts", 1) != 1:
        names.append("accumulate")
        amounts["accumulate"] = float(variant["parts"])
    return names, amounts


def with_table(name: str, table: FactorTable) -> WhatIf:
    """The what-if of this name, with other factors than those of the package."""
    one = WHAT_IFS[name]
    if name not in _FITTED:
        return one
    change: Change = partial(_FITTED[name], table=table)
    return replace(one, change=change)


def paper_amp(base: Base, question: Question) -> Base:
    """Alg. 3 as printed: products take a third, all other kernels half."""
    products = select(base, name=r"gemm|nvjet|cudnn|conv|fprop|dgrad|wgrad", on_device=True)
    return scale(scale(base, products, 1 / 3), base.on_device & ~products, 1 / 2)


def paper_fused(base: Base, question: Question) -> Base:
    """Alg. 4 with the launches removed: one kernel takes the sum of all."""
    table = replace(H100, fused=replace(H100.fused, optimistic=1, expected=1, pessimistic=1))
    return optimizer.fused_adam(base, question, table)


_PAPER = {
    "amp": WhatIf("amp", "", "", "", paper_amp),
    "amp_fp16": WhatIf("amp_fp16", "", "", "", paper_amp),
    "fused_adam": WhatIf("fused_adam", "", "", "", paper_fused),
}


def rows_of(model: RecordedModel, table: FactorTable, margin: float) -> Iterator[Row]:
    """`margin`: the largest relative error of an unchanged step of the other models, with noise."""
    base = without_recording(model.plain, table.recording)
    plain_s = steady(base).step_s
    for timed in model.timed:
        if timed.name == PLAIN:
            continue
        names, amounts = what_ifs_of(dict(timed.variant))
        row = Row(model.name, timed, "+".join(names), plain_s)
        try:
            yield _predicted(row, model, table, margin, base, names, Question(amounts=amounts))
        except (InvalidInput, KeyError) as refusal:
            yield replace(row, refused=str(refusal))


def _predicted(
    row: Row,
    model: RecordedModel,
    table: FactorTable,
    margin: float,
    base: Base,
    names: Sequence[str],
    question: Question,
) -> Row:
    what_ifs = [with_table(name, table) for name in names]
    expected = changed(base, what_ifs, question)
    times_s = [steady(expected).step_s]
    for reading in (Reading.OPTIMISTIC, Reading.PESSIMISTIC):
        start = without_recording(model.plain, table.recording, reading)
        if reading is Reading.OPTIMISTIC:
            start = start.without_unknown_waits()
        asked = replace(question, reading=reading)
        times_s.append(steady(changed(start, what_ifs, asked)).step_s)
    paper_s = times_s[0]
    if any(name in _PAPER for name in names):
        paper = [_PAPER.get(name, one) for name, one in zip(names, what_ifs, strict=True)]
        try:
            paper_s = steady(changed(base, paper, question)).step_s
        except InvalidInput:  # the paper's factors leave no changes of layout to remove
            paper_s = steady(changed(base, paper[:1], question)).step_s
    host = ~expected.on_device & (expected.queue != NONE)
    return replace(
        row,
        predicted_s=times_s[0],
        low_s=min(times_s) * (1 - margin),
        high_s=max(times_s) * (1 + margin),
        device_s=float(expected.duration_s[expected.on_device].sum()),
        host_s=float((expected.duration_s + expected.gap_s)[host].sum()),
        paper_s=paper_s,
    )


def judged_rows(folder: Path) -> tuple[list[Row], list[str]]:
    """All rows of a folder, and the models without a recording."""
    models, unrecorded = recorded_models(folder)
    known: list[Facts] = [facts(model) for model in models]
    rows: list[Row] = []
    for model in models:
        others = [one for one in known if one.model != model.name]
        margin = max((abs(one.replay_error) + one.repetition for one in others), default=0.0)
        rows += rows_of(model, table_of(others), margin)
    return rows, unrecorded


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | variant | what-ifs | measured (ms) | predicted | interval | error | judged "
        "| no change | paper | device | host | issued |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        timed = row.timed
        start = f"| {row.model} | {timed.name} | {row.what_ifs} | {MS * timed.step_s:.2f} "
        if row.refused:
            lines.append(f"{start}| refused: {row.refused} |" + " |" * 8)
            continue
        judged = "yes" if row.judged else "host-bound"
        lines.append(
            f"{start}| {MS * row.predicted_s:.2f} "
            f"| {MS * row.low_s:.2f} to {MS * row.high_s:.2f}{'' if row.covered else ' (missed)'} "
            f"| {row.error:.1%} | {judged} | {row.unchanged_error:.1%} | {row.paper_error:.1%} "
            f"| {MS * row.device_s:.2f} | {MS * row.host_s:.2f} | {MS * timed.issue_s:.2f} |"
        )
    return "\n".join(lines)


def keys(rows: Sequence[Row]) -> dict[str, float]:
    """The figures of the issue; see the package's docstring."""
    judged = [row for row in rows if row.judged]
    host_bound = [row for row in rows if row.timed.host_bound and not row.refused]
    if not judged:
        return {"judged": 0}
    error = fmean(row.error for row in judged)
    unchanged = fmean(row.unchanged_error for row in judged)
    by_paper = [row for row in judged if set(row.what_ifs.split("+")) & set(_PAPER)]
    figures = {
        "error_mean": error,
        "error_max": max(row.error for row in judged),
        "skill": 1 - error / unchanged,
        "interval_coverage": fmean(row.covered for row in judged),
        "error_mean_no_change": unchanged,
        "judged": len(judged),
        "host_bound": len(host_bound),
        "refused": sum(bool(row.refused) for row in rows),
    }
    if by_paper:
        figures["error_mean_where_paper"] = fmean(row.error for row in by_paper)
        figures["error_mean_paper"] = fmean(row.paper_error for row in by_paper)
    if host_bound:
        figures["error_mean_host_bound"] = fmean(row.error for row in host_bound)
        figures["interval_coverage_host_bound"] = fmean(row.covered for row in host_bound)
    return figures


def fitted(folder: Path) -> FactorTable:
    """The table of all models of a folder, as the package ships it for the H100."""
    models, _ = recorded_models(folder)
    return table_of([facts(model) for model in models])
