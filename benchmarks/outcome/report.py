"""Write the rows as a Markdown report."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.units import format_seconds
from benchmarks.outcome.figures import Ratio, geomean
from benchmarks.outcome.kept import Group
from benchmarks.outcome.keys import ablation_geomeans, by_ratio, last_line, most_to_gain, of_seeds
from benchmarks.outcome.results import AtMark, DomainFigures, Outcome

HEAD = """## What tuning is worth against every rival

`{command}`, {date}, {cores} cores, {machine}, commits {commits}. The network is emulated with real
transfers. Accelerators are emulated: timed waits, of assumed times for the generated models and of
measured times for the examples, scaled to the stated ratio of computation to communication (one
replica's computation / a ring of all gradients by the cluster file's rates). Ratios of times are
time(rival) / time(ours): above 1 ours is faster. Intervals are 95 % over the rounds. {tuned} DDP is
the better of torch's default and the best of its sweep, with the options of the sweep. The best
rival is the best by all rounds, with the lowest of all lower limits. Ours is what the tuner would
compare with the current setup, exported or not. Bound: max(T_comp, T_comm) by the links' rates.
Reachable: the same, but no gradient is sent before it is ready, and nothing is computed with a
variable before its average has arrived (Jackson's preemptive schedule). At most to DDP: time(DDP) /
what is reachable. The best known plan is the fastest side of all, lossless ones only where ours is:
rivals, searches with other seeds, and a longer search where there was one. With compressors, sides
count only if a test of this repository shows that short training with their settings ends near the
uncompressed loss (`tests/integration/test_compressed_training.py`).
"""
TUNED = (
    "Every rival was tuned with as many trials as our search: over all its settings, or where they "
    "are more, over all sizes and then around the fastest."
)
ONE_SETTING = "Some folders are older: their rivals other than DDP had one setting each."


def section(rows: Sequence[DomainFigures], command: str, date: str) -> str:
    environment, summary = rows[0].environment, last_line(rows)
    parts = [
        HEAD.format(
            command=command,
            date=date,
            cores=environment.cores,
            machine=environment.machine,
            commits=", ".join(summary["commits"]),
            tuned=TUNED if all(row.frozen.swept_s for row in rows) else ONE_SETTING,
        )
    ]
    parts.append(_overview(rows))
    parts.append(
        f"Geometric mean over {summary['domains_in_the_mean']} domain(s): "
        f"{summary['ratio_geomean_lossless']:.3f} to DDP "
        f"(lowest {summary['ratio_min_lossless']:.3f}), "
        f"where at most {summary['ratio_geomean_reachable']:.3f} is reachable, "
        f"{summary['ratio_geomean_any']:.3f} to the best of all rivals "
        f"(lowest {summary['ratio_min_any']:.3f}); "
        f"mean distance to the bound {summary['bound_gap_mean']:.1%}, "
        f"to what is reachable {summary['reachable_gap_mean']:.1%}.\n"
    )
    parts += [_by_ratio(rows), _ablation(rows), _seeds(rows)]
    return "\n".join([*filter(None, parts), *(_domain(row) for row in rows)])


def _by_ratio(rows: Sequence[DomainFigures]) -> str:
    lines = [
        "| computation to communication | domains | geometric mean to DDP | lowest |",
        "|---|---|---|---|",
    ]
    for name, of_ratio in by_ratio(rows).items():
        values = [row.lossless.last.today.value for row in of_ratio]
        lines.append(f"| {name} | {len(values)} | {geomean(values):.3f} | {min(values):.3f} |")
    return "\n".join(lines) + "\n"


def _ablation(rows: Sequence[DomainFigures]) -> str:
    lines = [
        "| time(DDP) / time(...), geometric mean | domains | best plan within the step "
        "| across the step without search | whole method |",
        "|---|---|---|---|---|",
    ]
    for name, of_ratio in by_ratio(rows).items():
        means = ablation_geomeans(of_ratio)
        if means["domains"]:
            cells = (means["within_step"], means["across_without_search"], means["whole"])
            shown = " | ".join(f"{value:.3f}" for value in cells)
            lines.append(f"| ratio {name} | {means['domains']} | {shown} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _seeds(rows: Sequence[DomainFigures]) -> str:
    lines = ["| domain | time(DDP) / time(ours) of each seed of the search |", "|---|---|"]
    for row in rows:
        if row.seeds:
            shown = ", ".join(_interval(ratio) for ratio in of_seeds(row))
            lines.append(f"| {row.domain} | {shown} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _overview(rows: Sequence[DomainFigures]) -> str:
    lines = [
        "| domain | trials | to DDP | at most to DDP | to the best rival | which | above the bound "
        "| above what is reachable | of it, best known | trials until within 2 % of the best known "
        "| with compressors: to DDP |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        last = row.lossless.last
        lossy = _interval(row.lossy.last.today) if row.lossy is not None else "not tried"
        cells = (
            *(
                row.domain,
                f"{last.trials}",
                _interval(last.today),
                f"{most_to_gain(row):.3f}",
                _interval(last.best),
                last.best.rival,
            ),
            *(
                f"{row.gap.value - 1:.1%} ({row.gap.low - 1:.1%} to {row.gap.high - 1:.1%})",
                f"{row.reachable_gap.value - 1:.1%}",
                f"{row.lossless.best_known_s / row.reachable_s - 1:.1%}",
            ),
            *(_near(row.lossless), lossy),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _near(outcome: Outcome) -> str:
    return (
        "not reached"
        if outcome.near is None
        else f"{outcome.near.trials} ({outcome.near.seconds:.0f} s)"
    )


def _interval(ratio: Ratio) -> str:
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _domain(row: DomainFigures) -> str:
    stolen = ""
    if row.stolen is not None:
        stolen = f", cores' time taken by other virtual machines {row.stolen:.1%}"
    bound = "computation" if row.compute_s >= row.transfer_s else "the slowest link"
    lines = [
        f"### {row.domain}\n",
        f"Bound {format_seconds(row.bound_s)} "
        f"({bound}: computation {format_seconds(row.compute_s)}, "
        f"transfer {format_seconds(row.transfer_s)}); reachable {format_seconds(row.reachable_s)}. "
        f"Median overrun of the emulated accelerators {row.overrun:.1%}, "
        f"load {row.load:.1f}{stolen}. "
        f"Best known without loss: {_best_known(row.lossless)}. {_options(row)}\n",
        "| side | step (quartiles) | time(side) / time(ours) | replayed |",
        "|---|---|---|---|",
    ]
    for compared in sorted(row.compared, key=lambda side: side.middle_s):
        if compared.side.group is Group.STOP:
            continue
        low, middle, high = (
            f"{value * 1e3:.1f}" for value in (compared.low_s, compared.middle_s, compared.high_s)
        )
        quartiles = f"{middle} ms ({low} to {high})"
        name = compared.side.name + ("" if compared.side.lossless else " (compressed)")
        replayed = "" if compared.replayed_s is None else f"{compared.replayed_s * 1e3:.1f} ms"
        lines.append(f"| {name} | {quartiles} | {_interval(compared.ratio)} | {replayed} |")
    lines += [f"\n{name} is left out: {why}" for name, why in row.failed.items()]
    lines += ["", *_sweeps(row)]
    for title, outcome in (("without loss", row.lossless), ("with compressors allowed", row.lossy)):
        if outcome is not None:
            lines += ["", f"Ours {title}, by trials:", "", *_marks(outcome.marks)]
    return "\n".join(lines) + "\n"


def _best_known(outcome: Outcome) -> str:
    """Return the best known side, and how much a better search would save."""
    longer = outcome.last.step_s / outcome.best_known_s - 1
    return f"{outcome.best_known} (ours takes {longer:.1%} longer)"


def _options(row: DomainFigures) -> str:
    frozen = row.frozen
    if not frozen.options_s:
        return ""
    times = ", ".join(f"{name} {step_s * 1e3:.1f} ms" for name, step_s in frozen.options_s.items())
    return f"DDP's options: {times}; the script had {frozen.options}."


def _sweeps(row: DomainFigures) -> list[str]:
    return [
        f"{rival}, by its sweep: "
        + ", ".join(f"{setting} {step_s * 1e3:.0f} ms" for setting, step_s in times_s.items())
        + ".\n"
        for rival, times_s in row.frozen.swept_s.items()
        if times_s
    ]


def _marks(marks: Sequence[AtMark]) -> list[str]:
    lines = [
        "| trials | tuning time | step | to DDP | to the best rival |",
        "|---|---|---|---|---|",
    ]
    for at in marks:
        lines.append(
            f"| {at.trials} of {at.asked} | {at.seconds:.0f} s | {at.step_s * 1e3:.1f} ms "
            f"| {_interval(at.today)} | {_interval(at.best)} |"
        )
    return lines
