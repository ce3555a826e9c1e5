"""Measure how well the rankers order real trials, on known and on new domains.

    python -m benchmarks.ranking --dataset datasets/trials   # or a folder of another campaign
    python -m benchmarks.ranking --directory autotune-jobs   # the trial store of your own jobs

Source: AutoSync, supplement sec. 10 (recipe; ranking accuracy on a test part, mean over 3 runs),
and its transfer between domains. A domain is one model on one cluster. Rankers are chance, the
paper's max(T_comp, T_sync), the overlap estimate, the replay, and the learned simulators with and
without the replayed time. Simulators learn from a domain's own trials, from other domains, or from
these and then its own; `benchmarks.ranking.tasks` keeps training and test parts apart. A folder
gets `ranking.md`, `learning-curve.svg` and `rows.csv`; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from autotune.arrays import FloatArray
from autotune.errors import AutotuneError, InvalidInput
from autotune.features.extract import StrategyFeatures
from autotune.simulators.interface import Example, FitReport
from benchmarks.ranking.calibrations import Calibrate, Calibrations
from benchmarks.ranking.corrections import judged
from benchmarks.ranking.decision_report import (
    decision_keys,
    decision_page,
    recovery_keys,
    recovery_page,
)
from benchmarks.ranking.report import FIGURES, curve_plot, curves, means, overview, report, write
from benchmarks.ranking.residuals import residual_keys, residual_page, residuals_of, write_residuals
from benchmarks.ranking.runs import TIE_BAND, Maker, Study, Trainer, run
from benchmarks.ranking.tasks import HeldOut
from benchmarks.ranking.trials import (
    Campaign,
    Point,
    ReplayedTimes,
    of_datasets,
    of_store,
    plans_by_domain,
    points_of,
)
from benchmarks.ranking.wrong_replays import recoveries
from benchmarks.repository import option_parser

SMALLEST_DOMAIN = 20
"""A domain with fewer plans is not tested: its test part would be smaller than ten."""
FEWEST_MODELS = 3
"""One is held out, a strength is judged on another one, and a third one teaches the kernel."""
SIZES = (25, 50, 100, 200, 400)
RANKERS = ("linear", "rnn", "gat")
PARTS = ("residuals", "orders", "decisions", "wrong-replays")


class TrainingProgress:
    """Shows on stderr which training runs, and the time that has passed and is left."""

    def __init__(self, planned: Sequence[tuple[str, int]]) -> None:
        """`planned`: ranker and number of trials of every training to come."""
        self._began_s = self._since_s = time.monotonic()
        self._running: tuple[str, int] | None = None
        self._took: dict[str, tuple[float, int]] = {}
        self._left = list(planned)

    def began(self, ranker: str, examples: int) -> None:
        """Start the next training, so the one before has ended."""
        now = time.monotonic()
        if self._running is not None:
            name, count = self._running
            took_s, runs = self._took.get(name, (0.0, 0))
            self._took[name] = took_s + now - self._since_s, runs + count
        self._running, self._since_s = (ranker, examples), now
        eta = "ETA after one training of each"
        if all(name in self._took for name, _ in self._left):
            left_s = (
                self._took[name][0] / self._took[name][1] * count for name, count in self._left
            )
            eta = f"ETA {_clock(sum(left_s))}"
        say(
            f"{_clock(now - self._began_s)} ({eta}, {len(self._left)} trainings) "
            f"{ranker} on {examples} trials"
        )
        if (ranker, examples) in self._left:
            self._left.remove((ranker, examples))


def makers(names: Sequence[str], paper: bool, epochs: int | None) -> dict[str, Maker]:
    """Return the simulators on one thread, as the tuner trains them or as in the paper.

    `epochs` replaces the recipe's number.
    """
    from autotune.simulators.registry import SIMULATORS
    from autotune.simulators.residual import ResidualSimulator

    def maker(make: Maker) -> Maker:
        def build() -> ResidualSimulator:
            simulator = make()
            assert isinstance(simulator, ResidualSimulator)
            # One thread: figures do not depend on the number of cores, nor on a busy machine.
            recipe = replace(simulator.recipe, tie_band=TIE_BAND, threads=1)
            simulator.recipe = (
                recipe if epochs is None else replace(recipe, epochs=epochs, warm_epochs=None)
            )
            return simulator

        return build

    given = _paper_makers() if paper else SIMULATORS
    return {name: maker(given[name]) for name in names}


def _paper_makers() -> dict[str, Maker]:
    from autotune.simulators.gat import gat_simulator
    from autotune.simulators.linear import linear_simulator
    from autotune.simulators.rnn import rnn_simulator

    return {"linear": linear_simulator, "rnn": rnn_simulator, "gat": gat_simulator}


def usable(
    points: Sequence[Point], smallest: int, wanted: Sequence[str], show: Callable[[str], None]
) -> list[str]:
    """Return the tested domains and `show` those left out.

    Raises `InvalidInput` if none is left.
    """
    usable_domains = []
    plans = plans_by_domain(points)
    unknown = sorted(set(wanted) - set(plans))
    if unknown:
        raise InvalidInput(
            f"a domain to test must be among the trials, but {unknown[0]!r} is not; "
            f"there are {', '.join(plans) or 'none'}"
        )
    for name, ids in plans.items():
        if len(ids) < smallest:
            show(
                f"not tested: {name} has {len(ids)} plans, but at least {smallest} are needed "
                "to test a ranking; it is a source for others"
            )
        elif not wanted or name in wanted:
            usable_domains.append(name)
    if not usable_domains:
        raise InvalidInput(
            "the benchmark needs a domain (model and cluster) with at least "
            f"{smallest} measured plans, but the largest of {len(plans)} has "
            f"{max(map(len, plans.values()), default=0)}; measure more (`datasets/collect.py`, "
            "or `autotune tune` with a larger --budget-trials)"
        )
    return usable_domains


def limited(points: Sequence[Point], most: int | None) -> list[Point]:
    """Return at most `most` plans of each domain, the first of its random order."""
    if most is None:
        return list(points)
    chosen: dict[str, set[str]] = {}
    remaining = []
    for point in points:
        plans = chosen.setdefault(point.domain, set())
        if point.plan_id in plans or len(plans) < most:
            plans.add(point.plan_id)
            remaining.append(point)
    return remaining


def described(campaigns: Sequence[Campaign], points: Sequence[Point], tested: Sequence[str]) -> str:
    """Return a table of the domains, campaigns and trials."""
    plans = plans_by_domain(points)
    header = "| domain | tested | campaigns | trials | plans | left out |"
    lines = [header, "|---|---|---|---|---|---|"]
    for name in sorted({campaign.domain for campaign in campaigns}):
        of_domain = [campaign for campaign in campaigns if campaign.domain == name]
        trials = sum(len(campaign.measured) for campaign in of_domain)
        left_out = "; ".join(campaign.left_out for campaign in of_domain if campaign.left_out)
        tests, count = "yes" if name in tested else "no", len(plans.get(name, []))
        lines.append(f"| {name} | {tests} | {len(of_domain)} | {trials} | {count} | {left_out} |")
    return "\n".join(lines) + "\n"


def planned(
    points: Sequence[Point], domains: Sequence[str], study: Study, names: Mapping[str, Maker]
) -> list[tuple[str, int]]:
    """Return (ranker, trials) of every training, from a run with simulators that do nothing."""
    trainings: list[tuple[str, int]] = []
    makers = {name: cast(Maker, _Untrained) for name in names}
    trainer = Trainer(points, makers, lambda name, count: trainings.append((name, count)))
    run(points, domains, study, trainer)
    return trainings


class _Untrained:
    """Learns and predicts nothing."""

    def fit(
        self,
        examples: Sequence[Example],
        seed: int,
        warm_start: bool = False,
        limit_s: float = math.inf,
    ) -> FitReport:
        return FitReport(0, 0, 0.0, "nothing to do")

    def predict_step_s(self, features: Sequence[StrategyFeatures]) -> FloatArray:
        return np.ones(len(features))


def say(text: str) -> None:
    """Print progress and messages to stderr, apart from the result on stdout."""
    print(text, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:d}:{int(seconds) % 60:02d}"


def _hardware() -> str:
    import torch

    return f"{os.cpu_count()} cores; torch {torch.__version__}, training on 1 thread"


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, but is {value}")
        return value

    return whole_number


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, but is {value}")
    return value


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.prog = "python -m benchmarks.ranking"
    source = parser.add_argument_group("trials").add_mutually_exclusive_group()
    source.add_argument("--dataset", type=Path, nargs="+", help="folders of datasets")
    jobs, reports = Path("autotune-jobs"), Path("ranking-report")
    jobs_help = "where jobs are kept (default autotune-jobs)"
    source.add_argument("--directory", type=Path, default=jobs, help=jobs_help)
    transfers = [kind.name.lower() for kind in HeldOut]
    one, two, three = _at_least(1), _at_least(2), _at_least(3)

    def add(name: str, text: str, **settings: Any) -> None:
        parser.add_argument(name, help=text, **settings)

    def some(name: str, text: str, values: Sequence[str]) -> None:
        add(name, text, nargs="*", default=list(values), choices=values)

    add("--output", f"folder of the report (default {reports})", type=Path, default=reports)
    add("--domains", "tested ones (default: all that are large enough)", nargs="*", default=[])
    smallest = "plans that a tested domain has (default 20)"
    add("--smallest", smallest, type=three, default=SMALLEST_DOMAIN)
    parts_help = (
        "of the benchmark: residuals by kind, how rankers order all plans, how they decide, "
        "wrong replays"
    )
    some("--parts", parts_help, PARTS)
    some("--rankers", "learned ones (default: all)", RANKERS)
    paper = "sizes and epochs of the paper instead of the tuner's (many times longer)"
    add("--paper", paper, action="store_true")
    add("--epochs", "of every training (default: the recipe's)", type=one)
    add("--seeds", "test parts and trainings per domain (default 3)", type=one, default=3)
    sizes = "of the learning curve, plans (default 25 to 400)"
    add("--sizes", sizes, type=two, nargs="*", default=list(SIZES))
    share = "of a domain's plans (default 0.3; the paper's: 0.15)"
    add("--test-share", share, type=_share, default=0.3)
    some("--transfers", "what is held out (default: all four)", transfers)
    tuned_from = "transfer that goes on with own trials"
    add("--tuned-from", tuned_from, choices=[*transfers, "none"], default="domain")
    most = "most plans of each source domain (default 60)"
    add("--source-plans", most, type=two, default=60)
    add("--max-plans", "of each domain in all (default: all)", type=three)
    no_choice = "leave out what the tuner's cross-validation would choose"
    add("--no-choice", no_choice, action="store_true")
    add("--json", "print nothing but the last line on stdout", action="store_true")
    return parser.parse_args(arguments)


def _campaigns(options: argparse.Namespace) -> list[Campaign]:
    if options.dataset is not None:
        return of_datasets(options.dataset)
    return of_store(options.directory)


def study_of(options: argparse.Namespace) -> Study:
    transfers = tuple(HeldOut[name.upper()] for name in options.transfers)
    tuned_from = None if options.tuned_from == "none" else HeldOut[options.tuned_from.upper()]
    tuned_from = tuned_from if tuned_from in transfers else None
    sizes, choice = tuple(options.sizes), not options.no_choice and bool(options.rankers)
    return Study(
        options.seeds,
        sizes,
        options.test_share,
        transfers,
        tuned_from,
        options.source_plans,
        choice,
    )


def evaluated(options: argparse.Namespace, keys: dict[str, Any]) -> None:
    """Write the report, print its first tables unless `--json`, and add to the last line's `keys`.

    The keys of a part are added when it ends, so they are there if a later part fails.
    """
    began_s = time.monotonic()
    show: Callable[[str], None] = say if options.json else print
    campaigns = _campaigns(options)
    wanted = set(options.parts)
    if "residuals" in wanted:
        keys.update(_residuals(options.output, campaigns, show))
    if wanted != {"residuals"}:
        _ranked(options, campaigns, wanted, keys, show)
    keys["seconds"] = round(time.monotonic() - began_s, 1)


def _ranked(
    options: argparse.Namespace,
    campaigns: Sequence[Campaign],
    wanted: set[str],
    keys: dict[str, Any],
    show: Callable[[str], None],
) -> None:
    """Judge rankers in the wanted parts, whose keys are added to `keys`."""
    replayed = ReplayedTimes(options.output / "replayed-times.jsonl")
    points = limited(points_of(campaigns, replayed), options.max_plans)
    domains = usable(points, options.smallest, options.domains, show)
    learned = makers(options.rankers, options.paper, options.epochs)

    def calibrations_of(some: Sequence[Campaign], of_all: Sequence[Point]) -> Calibrate:
        return Calibrations(some, of_all, replayed, options.output / "calibrations.jsonl").of

    plans = plans_by_domain(points)
    keys.update(domains=len(domains), plans=sum(len(plans[name]) for name in domains))
    models = len({point.model_id for point in points})
    if models < FEWEST_MODELS and wanted - {"orders", "residuals"}:
        show(
            "decisions and wrong replays are left out: "
            f"they need trials of at least {FEWEST_MODELS} models, but there are {models}"
        )
        wanted = wanted & {"orders"}
    if "orders" in wanted:
        keys.update(_orders(options, campaigns, points, domains, learned, show))
    if "decisions" in wanted:
        trainer = Trainer(points, learned, lambda name, count: say(f"{name} on {count} trials"))
        calibrate = calibrations_of(campaigns, points)
        judgements = judged(
            points, domains, options.seeds, trainer, options.source_plans, calibrate
        )
        _write(options.output / "decisions.md", decision_page(*judgements), show)
        keys.update(decision_keys(*judgements))
    if "wrong-replays" in wanted:
        rows = recoveries(
            campaigns,
            points,
            domains,
            options.seeds,
            lambda each: points_of(each, replayed),
            calibrations_of,
            say,
        )
        _write(options.output / "wrong-replays.md", recovery_page(rows), show)
        keys.update(recovery_keys(rows))


def _residuals(
    folder: Path, campaigns: Sequence[Campaign], show: Callable[[str], None]
) -> dict[str, Any]:
    """Judge the replay on every plan by kind; return the keys."""
    rows = residuals_of(campaigns)
    if not rows:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    write_residuals(folder / "residuals.csv", rows)
    _write(folder / "residuals.md", residual_page(rows), show)
    return residual_keys(rows)


def _orders(
    options: argparse.Namespace,
    campaigns: Sequence[Campaign],
    points: Sequence[Point],
    domains: Sequence[str],
    learned: Mapping[str, Maker],
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Judge how the rankers order all tested plans; return the keys."""
    study = study_of(options)
    progress = TrainingProgress(planned(points, domains, study, learned))
    rows = run(points, domains, study, Trainer(points, learned, progress.began))
    data = f"{_hardware()}; {study.seeds} seeds; pairs at least {TIE_BAND:.0%} apart.\n\n"
    data += described(campaigns, points, domains)
    tuned_from = study.tuned_from or ""
    page = report(rows, data, study.sizes, tuned_from)
    write(options.output, rows, page, curve_plot(rows, study.sizes, tuned_from))
    show(overview(rows))
    show(f"report: {options.output / 'ranking.md'}")
    trainings = {
        (r.domain, r.seed, r.ranker, r.learned, r.held_out, r.plans): r.train_cpu_s for r in rows
    }
    return {
        **{figure: means(rows, figure) for figure in FIGURES},
        "learning_curve": {
            line.name: dict(line.points) for line in curves(rows, study.sizes, tuned_from)
        },
        "train_cpu_s": round(sum(trainings.values()), 1),
    }


def _write(path: Path, page: str, show: Callable[[str], None]) -> None:
    path.write_text(page, encoding="utf-8")
    show(page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 2 if the input does not allow a benchmark.

    The last line is printed also after a failure, with the keys of the parts that have ended.
    """
    options = _options(arguments)
    keys: dict[str, Any] = {}
    try:
        evaluated(options, keys)
    except AutotuneError as error:
        say(f"error: {error}")
        return 2
    finally:
        if keys:
            print(json.dumps(keys, allow_nan=False), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
