"""The tables and the keys of the part in which the tuner decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.simulators.evaluation import REPLAY
from benchmarks.ranking.corrections import JUDGED, OWN, TUNER
from benchmarks.ranking.decisions import FIGURES, DecisionRow, mean_and_worst, mean_bias
from benchmarks.ranking.wrong_replays import Recovery, recovered_share


def decision_page(rows: Sequence[DecisionRow], strengths: Mapping[str, float]) -> str:
    """Return a table of each ranker's means and worst domains, and of their ceilings."""
    lines = [
        "Mean over the domains (worst domain), and the ceiling that noise sets.\n",
        _line("ranker", "own trials", *FIGURES.values(), "bias"),
        _line(*["---"] * (3 + len(FIGURES))),
    ]
    for ranker in dict.fromkeys(row.ranker for row in rows):
        for own in sorted({row.own for row in rows if row.ranker == ranker}):
            cells = [_cell(*mean_and_worst(rows, ranker, own, figure)[:2]) for figure in FIGURES]
            lines.append(_line(ranker, str(own), *cells, f"{mean_bias(rows, ranker, own):+.3f}"))
    limits = [_ceiling(mean_and_worst(rows, REPLAY, 0, figure)[2]) for figure in FIGURES]
    lines.append(_line("noise ceiling", "", *limits, ""))
    lines.append("\nStrengths that the other domains support: " + _strengths(strengths) + ".\n")
    return "\n".join(lines)


def recovery_page(rows: Sequence[Recovery]) -> str:
    """Return a table of all pairs' accuracy with right, wrong and corrected replays."""
    lines = [
        f"Accuracy over all pairs after {JUDGED} own trials, mean over domains and test parts.\n",
        _line("replay", "right", "wrong, alone", "calibrated", "corrected", "recovered share"),
        _line(*["---"] * 6),
    ]
    for case in (*dict.fromkeys(row.case for row in rows), "all"):
        of_case = [row for row in rows if case in (row.case, "all")]
        means = [
            sum(getattr(row, name) for row in of_case) / len(of_case)
            for name in ("right", "wrong", "calibrated", "corrected")
        ]
        share = recovered_share(of_case)
        lines.append(_line(case, *(f"{mean:.3f}" for mean in means), f"{share:.2f}"))
    return "\n".join(lines) + "\n"


def decision_keys(
    rows: Sequence[DecisionRow], strengths: Mapping[str, float], ranker: str = TUNER
) -> dict[str, Any]:
    """Return the keys of the aims, for the ranker as the tuner uses it, and all means.

    None: unknown, as a distance from a ceiling where the noise is unknown.
    """

    def below(figure: str) -> float:
        mean, _, limit = mean_and_worst(rows, ranker, JUDGED, figure)
        return limit - mean

    keys = {
        "all_pairs": mean_and_worst(rows, ranker, JUDGED, "all_pairs")[0],
        "fastest_quarter_below_ceiling": below("fastest_quarter"),
        "lossless_quarter_below_ceiling": below("lossless_quarter"),
        "regret_above_noise": -below("regret_top_1"),
        "proposal_bias": mean_bias(rows, ranker, JUDGED),
    }
    return {
        **{name: _number(value) for name, value in keys.items()},
        "strengths": dict(strengths),
        "decisions": {
            f"{name}, {own} own": {
                figure: dict(
                    zip(
                        ("mean", "worst", "ceiling"),
                        map(_number, mean_and_worst(rows, name, own, figure)),
                        strict=True,
                    )
                )
                for figure in FIGURES
            }
            for name in dict.fromkeys(row.ranker for row in rows)
            for own in OWN
            if any((row.ranker, row.own) == (name, own) for row in rows)
        },
    }


def recovery_keys(rows: Sequence[Recovery]) -> dict[str, Any]:
    """Return `recovered_share`, and each case's share with the replay alone and corrected."""
    cases = {}
    for case in dict.fromkeys(row.case for row in rows):
        of_case = [row for row in rows if row.case == case]
        cases[case] = {
            **{
                name: _number(sum(getattr(row, name) for row in of_case) / len(of_case))
                for name in ("right", "wrong", "calibrated", "corrected")
            },
            "recovered_share": _number(recovered_share(of_case)),
        }
    return {"recovered_share": _number(recovered_share(rows)), "wrong_replays": cases}


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else round(value, 4)


def _strengths(strengths: Mapping[str, float]) -> str:
    return ", ".join(f"{domain} {strength:g}" for domain, strength in strengths.items())


def _cell(mean: float, worst: float) -> str:
    return f"{mean:.3f} ({worst:.3f})"


def _ceiling(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3f}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
