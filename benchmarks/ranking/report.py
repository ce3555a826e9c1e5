"""Write the report: tables of means in Markdown, a learning curve as SVG, all rows as CSV."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from autotune.simulators.evaluation import ANALYTIC, PAPER, RANDOM, REPLAY
from benchmarks.ranking.line_plot import Line, line_plot
from benchmarks.ranking.runs import CHOSEN, WITHOUT_REPLAY, Learned, RankingRow

FIGURES = {
    "pairwise_accuracy": "pairwise accuracy",
    "kendall_tau": "Kendall tau",
    "regret_top_1": "regret top 1",
    "regret_top_5": "regret top 5",
    "regret_top_10": "regret top 10",
}
MEANING = {
    RANDOM: "random (chance)",
    PAPER: "max(T_comp, T_sync)",
    ANALYTIC: "overlap estimate",
    REPLAY: "replay",
    CHOSEN: "chosen by cross-validation, as the tuner does",
}


def figure_of(rows: Iterable[RankingRow], figure: str) -> float:
    """Return the mean over a ranker's campaigns, weighted by pairs (accuracy) or points."""
    given = list(rows)
    weights = [row.pairs if figure == "pairwise_accuracy" else row.points for row in given]
    if not sum(weights):
        return 0.5 if figure == "pairwise_accuracy" else 0.0
    return float(np.average([getattr(row, figure) for row in given], weights=weights))


def by_seed(rows: Iterable[RankingRow], figure: str) -> list[float]:
    """Return for each seed the mean over the domains, each with equal weight."""
    groups: dict[int, dict[str, list[RankingRow]]] = {}
    for row in rows:
        groups.setdefault(row.seed, {}).setdefault(row.domain, []).append(row)
    return [
        statistics.mean(figure_of(of, figure) for of in domains.values())
        for _, domains in sorted(groups.items())
    ]


def means(rows: Sequence[RankingRow], figure: str) -> dict[str, float]:
    """Return "ranker, learned from, not seen before" -> mean, with the largest training parts."""
    return {
        _label(key): statistics.mean(by_seed(group, figure)) for key, group in _whole(rows).items()
    }


def largest_own(rows: Iterable[RankingRow]) -> list[RankingRow]:
    """Return the rows with the domain's largest training part, as if it were one size."""
    given = list(rows)
    most: dict[tuple[str, int], int] = {}
    for row in given:
        most[row.domain, row.seed] = max(row.plans, most.get((row.domain, row.seed), 0))
    return [row for row in given if row.plans == most[row.domain, row.seed]]


def report(rows: Sequence[RankingRow], data: str, sizes: Sequence[int], tuned_from: str) -> str:
    """Return the whole page."""
    domains = sorted({row.domain for row in rows})
    parts = [
        "# Ranking quality\n",
        data,
        "Means over the domains, each with equal weight, ± the standard deviation over the seeds. "
        "Regret: how much slower the best of the k "
        "predicted fastest is than the fastest tested, relative.\n",
        "## All domains\n",
        overview(rows),
        *(
            f"\n## {title.capitalize()} per domain\n\n{_domain_table(rows, domains, figure)}"
            for figure, title in FIGURES.items()
        ),
        "\n## Learning curve: pairwise accuracy by number of own plans\n",
        curve_table(rows, sizes, tuned_from),
        "\n![learning curve](learning-curve.svg)\n",
        "## What training costs\n",
        cost_table(rows),
    ]
    return "\n".join(parts) + "\n"


def overview(rows: Sequence[RankingRow]) -> str:
    """Return every ranker untrained, with all its own trials, and by each kind of transfer."""
    lines = [
        _line("ranker", "learned from", "not seen before", *FIGURES.values()),
        _line(*["---"] * (3 + len(FIGURES))),
    ]
    for (ranker, learned, held_out), group in _whole(rows).items():
        cells = [_spread(by_seed(group, figure)) for figure in FIGURES]
        lines.append(_line(MEANING.get(ranker, ranker), learned, held_out, *cells))
    return "\n".join(lines) + "\n"


def _whole(rows: Sequence[RankingRow]) -> dict[tuple[str, str, str], list[RankingRow]]:
    """Return (ranker, learned from, held out) -> rows of the largest training parts."""
    groups: dict[tuple[str, str, str], list[RankingRow]] = {}
    for row in rows:
        groups.setdefault((row.ranker, row.learned, row.held_out), []).append(row)
    order = list(Learned)
    ordered = sorted(groups, key=lambda key: (order.index(Learned(key[1])), key[2]))
    return {key: largest_own(groups[key]) for key in ordered}


def _domain_table(rows: Sequence[RankingRow], domains: Sequence[str], figure: str) -> str:
    groups = _whole(rows)
    names = [_label(key) for key in groups]
    lines = [
        _line("ranker, learned from, not seen before", *domains),
        _line(*["---"] * (1 + len(domains))),
    ]
    for name, group in zip(names, groups.values(), strict=True):
        cells = [
            _mean_or_dash(by_seed([row for row in group if row.domain == domain], figure))
            for domain in domains
        ]
        lines.append(_line(name, *cells))
    return "\n".join(lines) + "\n"


def curve(
    rows: Sequence[RankingRow],
    ranker: str,
    learned: Learned,
    sizes: Sequence[int],
    held_out: str = "",
) -> list[tuple[int, float]]:
    """Return (own plans, mean accuracy) over the domains that have every size, the same at each."""
    of_ranker = [
        row
        for row in rows
        if (row.ranker, row.learned, row.held_out) == (ranker, learned, held_out)
        and row.plans in sizes
    ]
    common = _common_domains(of_ranker)
    used = sorted({row.plans for row in of_ranker if row.domain in common})
    return [
        (
            size,
            statistics.mean(
                by_seed(
                    [r for r in of_ranker if r.plans == size and r.domain in common],
                    "pairwise_accuracy",
                )
            ),
        )
        for size in used
    ]


def _common_domains(rows: Sequence[RankingRow]) -> set[str]:
    """Return the domains with the most sizes: a mean over changing domains would be no curve."""
    sizes: dict[str, set[int]] = {}
    for row in rows:
        sizes.setdefault(row.domain, set()).add(row.plans)
    most = max(map(len, sizes.values()), default=0)
    return {name for name, domain_sizes in sizes.items() if len(domain_sizes) == most}


def curves(rows: Sequence[RankingRow], sizes: Sequence[int], tuned_from: str) -> list[Line]:
    """Return learned rankers by own plans, and level lines of those that learn nothing."""
    lines = []
    for ranker in dict.fromkeys(row.ranker for row in rows if row.learned is not Learned.NOTHING):
        untransferred = curve(rows, ranker, Learned.OWN, sizes)
        tuned = curve(rows, ranker, Learned.BOTH, sizes, tuned_from)
        lines += [Line(ranker, untransferred)] if untransferred else []
        lines += [Line(f"{ranker}, after other domains", tuned, dashed=True)] if tuned else []
    if lines:
        used = sorted({size for line in lines for size, _ in line.points})
        common = _common_domains(
            [
                row
                for row in rows
                if row.learned in (Learned.OWN, Learned.BOTH) and row.plans in sizes
            ]
        )
        for ranker in (REPLAY, ANALYTIC, PAPER):
            level = [row for row in rows if row.ranker == ranker and row.domain in common]
            value = statistics.mean(by_seed(level, "pairwise_accuracy"))
            lines.insert(0, Line(MEANING[ranker], [(size, value) for size in used]))
    return lines


def curve_table(rows: Sequence[RankingRow], sizes: Sequence[int], tuned_from: str) -> str:
    curve_lines = curves(rows, sizes, tuned_from)
    if not curve_lines:
        return "No domain has that many plans to learn from.\n"
    used = sorted({size for each in curve_lines for size, _ in each.points})
    common = _common_domains(
        [row for row in rows if row.learned in (Learned.OWN, Learned.BOTH) and row.plans in sizes]
    )
    lines = [
        f"Over the {len(common)} domains that have all of these.\n",
        _line("ranker", *map(str, used)),
        _line(*["---"] * (1 + len(used))),
    ]
    for each in curve_lines:
        values = dict(each.points)
        lines.append(
            _line(each.name, *(f"{values[size]:.3f}" if size in values else "-" for size in used))
        )
    return "\n".join(lines) + "\n"


def curve_plot(rows: Sequence[RankingRow], sizes: Sequence[int], tuned_from: str) -> str | None:
    lines = [line for line in curves(rows, sizes, tuned_from) if WITHOUT_REPLAY not in line.name]
    if not lines:
        return None
    return line_plot(lines, "own plans learned from", "pairwise accuracy on held-out plans")


def cost_table(rows: Sequence[RankingRow]) -> str:
    """Return CPU seconds per training on one thread, by ranker and number of examples."""
    seconds: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row.train_examples:
            seconds.setdefault((row.ranker, row.learned), {})[row.train_examples] = row.train_cpu_s
    lines = [
        _line("ranker", "learned from", "examples: CPU s of one training, one thread"),
        _line("---", "---", "---"),
    ]
    for (ranker, learned), costs in seconds.items():
        shown = sorted(costs.items())
        picked = shown[:: max(1, len(shown) // 5)]
        lines.append(
            _line(ranker, learned, ", ".join(f"{count}: {cpu_s:.1f}" for count, cpu_s in picked))
        )
    return "\n".join(lines) + "\n"


def write(folder: Path, rows: Sequence[RankingRow], page: str, plot: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ranking.md").write_text(page, encoding="utf-8")
    if plot is not None:
        (folder / "learning-curve.svg").write_text(plot, encoding="utf-8")
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [field.name for field in fields(RankingRow)])
        table.writeheader()
        table.writerows([asdict(row) for row in rows])


def _label(key: Sequence[str]) -> str:
    return ", ".join(part for part in key if part)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def _mean_or_dash(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f}" if values else "-"
