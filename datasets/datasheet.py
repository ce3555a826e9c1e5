"""Write the datasheet of datasets: `python datasets/datasheet.py FOLDER...`.

It computes `DATASHEET.md` and `plots/` from the trials, and writes Croissant metadata next to the
card of every domain. Sections follow Gebru et al., "Datasheets
for Datasets" (2021), as far as they apply.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from influence import Explained, explained
from matplotlib.figure import Figure

from autotune.dataset.card import LICENCE, Card, card_of
from autotune.dataset.croissant import write_croissant
from autotune.dataset.folder import SUMS, read_dataset
from autotune.dataset.noise import STALL, stalled_share, step_noise
from autotune.dataset.trials import DatasetTrial, Domain
from autotune.records import Accelerators

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "datasheet"  # the same trials give the same files
from matplotlib import pyplot as plt  # noqa: E402

ROOT = Path(__file__).parents[1]
WIDTH, ROW = 9.0, 0.32
"""Inches: a plot's width, and the height of a domain's row."""


@dataclass(frozen=True)
class Sheet:
    """One domain's figures.

    `label`: its name, with its dataset's if several have it. `relative`: per plan, the median
    steady step time of its undisturbed trials / that of the references.
    """

    label: str
    domain: Domain
    card: Card
    relative: tuple[float, ...]
    step_noise: float | None
    explained: Explained | None


def sheets_of(folders: Sequence[Path]) -> list[Sheet]:
    sheets = [
        (folder.resolve().name, domain) for folder in folders for domain in read_dataset(folder)
    ]
    held = Counter(domain.name for _, domain in sheets)
    labels = [
        f"{domain.name} ({folder})" if held[domain.name] > 1 else domain.name
        for folder, domain in sheets
    ]
    return sorted(
        (sheet_of(label, domain) for label, (_, domain) in zip(labels, sheets, strict=True)),
        key=lambda sheet: sheet.label,
    )


def sheet_of(label: str, domain: Domain) -> Sheet:
    card = card_of(domain)
    times_s = [float(np.median(values)) for values in domain.plan_steady_s.values()]
    relative = tuple(value / card.reference_s for value in times_s) if card.reference_s else ()
    return Sheet(
        label, domain, card, relative, step_noise(domain), explained(domain, card.repeat_noise)
    )


def spread_plot(sheets: Sequence[Sheet], path: Path) -> None:
    """Plot step times / those of the script's own DDP as boxes with whiskers to the extremes."""
    shown = [sheet for sheet in sheets if sheet.relative]
    figure, axes = plt.subplots(figsize=(WIDTH, 1.2 + ROW * max(len(shown), 1)))
    if shown:
        axes.boxplot(
            [sheet.relative for sheet in shown][::-1],
            orientation="horizontal",
            whis=(0, 100),
            widths=0.6,
        )
    axes.set_yticks(range(1, len(shown) + 1), [sheet.label for sheet in shown][::-1])
    axes.axvline(1.0, linestyle="--", linewidth=0.8, color="0.4")
    axes.set_xscale("log")
    axes.set_xlabel("step time / step time of DDP as the script has it (log scale; left is faster)")
    _save(figure, path)


def noise_plot(sheets: Sequence[Sheet], path: Path) -> None:
    """Plot relative standard deviations, which separate signal from noise."""
    figure, axes = plt.subplots(figsize=(WIDTH, 1.2 + ROW * len(sheets)))
    rows = range(len(sheets), 0, -1)
    kinds = (
        ("repeats of a plan", "o", [sheet.card.repeat_noise for sheet in sheets]),
        ("references", "s", [sheet.card.reference_noise for sheet in sheets]),
        ("single steps", "^", [sheet.step_noise for sheet in sheets]),
        (
            "all strategies",
            "D",
            [sheet.explained.deviation if sheet.explained else None for sheet in sheets],
        ),
    )
    for name, marker, values in kinds:
        points = [(100 * value, row) for value, row in zip(values, rows, strict=True) if value]
        axes.plot(
            [value for value, _ in points],
            [row for _, row in points],
            marker,
            label=name,
            markersize=5,
        )
    axes.set_yticks(list(rows), [sheet.label for sheet in sheets])
    axes.set_xscale("log")
    axes.set_xlabel("relative standard deviation of a step time, % (log scale)")
    axes.legend(fontsize="small")
    _save(figure, path)


def influence_plot(sheets: Sequence[Sheet], path: Path) -> None:
    """Plot the share of the variance of log step time that each choice explains alone."""
    shown = [(sheet, sheet.explained) for sheet in sheets if sheet.explained is not None]
    names = choice_names(sheets)
    table = np.array(
        [
            [
                influences.choices[name].alone if name in influences.choices else np.nan
                for name in names
            ]
            for _, influences in shown
        ]
    )
    figure, axes = plt.subplots(figsize=(WIDTH, 2.0 + ROW * max(len(shown), 1)))
    if len(shown):
        image = axes.imshow(table, vmin=0, vmax=1, aspect="auto", cmap="Blues")
        for row, column in zip(*np.nonzero(np.isfinite(table)), strict=True):
            value = max(table[row, column], 0.0)
            axes.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize="x-small",
                color="w" if value > 0.6 else "k",
            )
        figure.colorbar(image, ax=axes, label="share of the variance")
    axes.set_yticks(range(len(shown)), [sheet.label for sheet, _ in shown])
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
    _save(figure, path)


def choice_names(sheets: Sequence[Sheet]) -> list[str]:
    """Return all choices that vary somewhere, the most important on average first."""
    values: dict[str, list[float]] = {}
    for sheet in sheets:
        for name, influence in sheet.explained.choices.items() if sheet.explained else ():
            values.setdefault(name, []).append(influence.alone)
    return sorted(values, key=lambda name: (-float(np.mean(values[name])), name))


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def command_of(folders: Sequence[Path]) -> str:
    """Return the command that computes the datasheet, from the root of the repository."""
    words = [_folder_word(folder.resolve()) for folder in folders]
    return " ".join(["python", "datasets/datasheet.py", *words])


def _folder_word(folder: Path) -> str:
    return str(folder.relative_to(ROOT)) if folder.is_relative_to(ROOT) else folder.name


def text_of(sheets: Sequence[Sheet], folders: Sequence[Path]) -> str:
    """Return the whole datasheet in Markdown."""
    cards = [sheet.card for sheet in sheets]
    emulated = sum(
        sheet.domain.environment.conditions.accelerators is Accelerators.EMULATED
        for sheet in sheets
    )
    candidates, references = (
        sum(card.candidates for card in cards),
        sum(card.references for card in cards),
    )
    failed, disturbed = (
        sum(sum(card.failed.values()) for card in cards),
        sum(card.disturbed for card in cards),
    )
    domains = len({sheet.domain.name for sheet in sheets})
    plans = len(
        {
            (sheet.domain.name, trial.plan_id)
            for sheet in sheets
            for trial in sheet.domain.trials
            if trial.plan_id is not None
        }
    )
    sources = _summed([card.sources for card in cards])
    machines = "; ".join(
        sorted(
            {f"{s.domain.environment.cores} cores, {s.domain.environment.machine}" for s in sheets}
        )
    )
    return f"""# Datasheet

Every figure is computed from the trials by this command:

    {command_of(folders)}

## What it is

{candidates} trials of {plans} distinct plans (each counted once per domain), and {references} of
the script's own DDP between them, over {domains} domains (a model on a cluster), profiled
{len(sheets)} times: {emulated} with emulated accelerators, {len(sheets) - emulated} with real
computation. {failed} failed and are kept
with their reason; {disturbed} are marked as disturbed. A trial has its strategy, plan, step times
of every rank, and conditions. Hosts are network namespaces of one machine ({machines}); transfers
are real.

## How strategies were chosen

{", ".join(f"{count} {name}" for name, count in sources.items())}
(kinds of `source`, which `autotune/dataset/trials.py` defines). Trials from tuning are not
independent of each other: the tuner proposes strategies that it expects to be fast. A sweep or a
closing comparison measures the same plans in every round; figures below count a plan once.

## Domains

{domain_table(sheets)}

"Fastest" and "slowest" are relative to the script's own DDP. Noise is the relative standard
deviation of a trial's median: of neighbouring references, and of repeats of one plan, corrected by
the references around them. "Stalled" is the share of steps that took more than {STALL:g} times
their trial's median, within the step (with DDP) and across it. "Explained" is the share of the
variance of the log step time that the choices below explain together (adjusted for their number).
"Taken by others" is the share of CPU time that the host gave to other virtual machines during the
median trial, if it was noted.

![step times of every domain](plots/spread.svg)

![noise of every domain](plots/noise.svg)

## What matters most

{influence_table(sheets)}

Mean over the domains of the share of the variance that a choice explains alone, and beyond all
others; numbers are grouped by quartiles. Only domains where a choice varies count. This describes
the strategies that were tried, not all strategies.

![influence of every choice](plots/influence.svg)

## Who should not use it

Do not use it for times of real accelerators or of a real network; it has neither. Emulated
accelerators wait instead of computing; parameters, gradients and transfers are real. A domain's
times belong to its machine: compare strategies within a domain.

## Licence

{LICENCE}; the scripts are Apache-2.0.
"""


def domain_table(sheets: Sequence[Sheet]) -> str:
    head = (
        "| domain | trials | failed | disturbed | DDP | fastest | slowest | noise: references "
        "| repeats | stalled: within | across | explained | taken by others |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(_domain_row(sheet) for sheet in sheets)


def _domain_row(sheet: Sheet) -> str:
    card = sheet.card
    reference = "-" if card.reference_s is None else f"{card.reference_s * 1e3:.1f} ms"
    ends = (
        (f"{min(sheet.relative):.3f}", f"{max(sheet.relative):.2f}")
        if sheet.relative
        else ("-", "-")
    )
    together = "-" if sheet.explained is None else f"{sheet.explained.together:.2f}"
    cells = (
        sheet.label,
        card.candidates,
        sum(card.failed.values()),
        card.disturbed,
        reference,
        *ends,
        _share(card.reference_noise),
        _share(card.repeat_noise),
        *(_share(stalled_share(trials)) for trials in _by_family(sheet.domain)),
        together,
        _share(
            float(np.median(stolen))
            if (stolen := [t.stolen for t in sheet.domain.trials if t.stolen is not None])
            else None
        ),
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _by_family(domain: Domain) -> tuple[list[DatasetTrial], list[DatasetTrial]]:
    """Return trials that synchronize within the step (with references), and across it."""
    across = [trial for trial in domain.trials if trial.plan is not None and trial.plan.cross_step]
    return [
        trial for trial in domain.trials if trial.plan is None or not trial.plan.cross_step
    ], across


def influence_table(sheets: Sequence[Sheet]) -> str:
    rows = []
    for name in choice_names(sheets):
        cells = [
            sheet.explained.choices[name]
            for sheet in sheets
            if sheet.explained and name in sheet.explained.choices
        ]
        alone, beyond = (
            float(np.mean([getattr(one, kind) for one in cells])) for kind in ("alone", "beyond")
        )
        rows.append(f"| {name} | {alone:.2f} | {beyond:.2f} | {len(cells)} |")
    if not rows:
        return "No domain has enough strategies yet."
    return "| choice | alone | beyond the others | domains |\n|---|---|---|---|\n" + "\n".join(rows)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _summed(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    names = sorted({name for one in counts for name in one})
    return {name: sum(one.get(name, 0) for one in counts) for name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "dataset",
        type=Path,
        nargs="+",
        help="folders of domains, as datasets/collect.py and benchmarks.outcome fill them",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of DATASHEET.md and plots/ (default: the one above the first dataset)",
    )
    options = parser.parse_args(arguments)
    out = options.out or options.dataset[0].resolve().parent
    sheets = sheets_of(options.dataset)
    (out / "plots").mkdir(parents=True, exist_ok=True)
    spread_plot(sheets, out / "plots" / "spread.svg")
    noise_plot(sheets, out / "plots" / "noise.svg")
    influence_plot(sheets, out / "plots" / "influence.svg")
    (out / "DATASHEET.md").write_text(text_of(sheets, options.dataset))
    for folder in options.dataset:
        for sums in sorted(folder.glob(f"*/{SUMS}")):
            write_croissant(sums.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
