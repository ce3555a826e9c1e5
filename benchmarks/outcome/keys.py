"""The rows as the benchmark's last line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.jobs.campaign.domains import CLIPPED, RATIO
from benchmarks.outcome.figures import WITHIN, Ratio, geomean
from benchmarks.outcome.results import DomainFigures, Outcome


def last_line(rows: Sequence[DomainFigures]) -> dict[str, Any]:
    """Return the last line. Ratios are time(rival) / time(ours), above 1 where ours is faster.

    The keys without a ratio in their names are those of the domains at `RATIO`, or at their own.
    """
    headline = [row for row in rows if row.ratio in (None, RATIO)] or rows
    today = [row.lossless.last.today.value for row in headline]
    best = [row.lossless.last.best.value for row in headline]
    lossy = [row.lossy.last for row in headline if row.lossy is not None]
    marks = sorted({at.asked for row in headline for at in row.lossless.marks})
    seeded = [row for row in headline if row.seeds]
    return {
        "ratio_geomean_lossless": geomean(today),
        "ratio_min_lossless": min(today),
        "ratio_geomean_reachable": geomean([most_to_gain(row) for row in headline]),
        "ratio_geomean_any": geomean(best),
        "ratio_min_any": min(best),
        "ratio_clipped_geomean": _geomean_today([row for row in headline if row.model == CLIPPED]),
        "bound_gap_mean": float(np.mean([row.gap.value - 1 for row in headline])),
        "reachable_gap_mean": float(np.mean([row.reachable_gap.value - 1 for row in headline])),
        "ratio_geomean_lossy_allowed": geomean([at.today.value for at in lossy]) if lossy else None,
        "ratio_geomean_lossless_at": {
            mark: geomean(
                [
                    at.today.value
                    for row in headline
                    for at in row.lossless.marks
                    if at.asked == mark
                ]
            )
            for mark in marks
        },
        "ratio_geomean_by_computation_to_communication": {
            name: _geomean_today(of_ratio) for name, of_ratio in by_ratio(rows).items()
        },
        "ablation": ablation_geomeans(headline),
        "seeds": {row.domain: [ratio.value for ratio in of_seeds(row)] for row in seeded},
        "ratio": "time(rival) / time(ours); _lossless: to DDP with its best setting, "
        "_any: to the best of all rivals",
        "within": WITHIN,
        "domains_in_the_mean": len(headline),
        "commits": sorted({commit for row in rows for commit in row.commits}),
        "domains": [_data(row) for row in rows],
        "network": "emulated",
        "accelerators": "emulated",
        "cores": rows[0].environment.cores,
        "machine": rows[0].environment.machine,
    }


def most_to_gain(row: DomainFigures) -> float:
    """Return time(DDP) / the time that no lossless strategy can beat."""
    return row.lossless.last.today.value * row.reachable_gap.value


def _geomean_today(rows: Sequence[DomainFigures]) -> float | None:
    return geomean([row.lossless.last.today.value for row in rows]) if rows else None


def by_ratio(rows: Sequence[DomainFigures]) -> dict[str, list[DomainFigures]]:
    """Return ratio of computation to communication -> rows, ascending."""
    ratios = sorted({row.ratio for row in rows}, key=lambda ratio: (ratio is None, ratio))
    return {
        "the model's own" if ratio is None else f"{ratio:g}": [
            row for row in rows if row.ratio == ratio
        ]
        for ratio in ratios
    }


def of_seeds(row: DomainFigures) -> tuple[Ratio, ...]:
    """Return time(DDP) / time(ours) of every seed of our search, the first seed first."""
    return (row.lossless.last.today, *row.seeds)


def ablation_geomeans(rows: Sequence[DomainFigures]) -> dict[str, Any]:
    """Return the geometric means to DDP over the domains that have all three parts."""
    whole = [row.ablation for row in rows if row.ablation.within and row.ablation.without_search]
    if not whole:
        return {"domains": 0}
    return {
        "within_step": geomean([one.within.value for one in whole if one.within]),
        "across_without_search": geomean(
            [one.without_search.value for one in whole if one.without_search]
        ),
        "whole": geomean([one.whole.value for one in whole]),
        "domains": len(whole),
    }


def _data(row: DomainFigures) -> dict[str, Any]:
    return {
        "domain": row.domain,
        "computation_to_communication": row.ratio,
        "lossless": _outcome_data(row.lossless),
        "lossy_allowed": _outcome_data(row.lossy) if row.lossy is not None else None,
        "bound_s": row.bound_s,
        "bound_gap": row.gap.value - 1,
        "bound_gap_low": row.gap.low - 1,
        "bound_gap_high": row.gap.high - 1,
        "reachable_s": row.reachable_s,
        "reachable_gap": row.reachable_gap.value - 1,
        "ratio_reachable": most_to_gain(row),
        "overrun": row.overrun,
        "load": row.load,
        "stolen": row.stolen,
        "median_s": {compared.side.name: compared.middle_s for compared in row.compared},
        "replayed_s": {compared.side.name: compared.replayed_s for compared in row.compared},
        "failed": dict(row.failed),
    }


def _outcome_data(outcome: Outcome) -> dict[str, Any]:
    def interval(ratio: Ratio) -> dict[str, Any]:
        return {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "rival": ratio.rival}

    marks = {
        at.asked: {"step_s": at.step_s, "today": interval(at.today), "best": interval(at.best)}
        for at in outcome.marks
    }
    near = (
        None
        if outcome.near is None
        else {"trials": outcome.near.trials, "seconds": outcome.near.seconds}
    )
    return {
        "marks": marks,
        "best_known": outcome.best_known,
        "best_known_s": outcome.best_known_s,
        "near_the_best": near,
    }
