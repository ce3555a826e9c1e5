"""How well the rankers order the real trials of a trial store: the paper's offline recipe on one's own measurements.

    python -m benchmarks.ranking --directory autotune-jobs

Source: AutoSync, supplement sec. 10: trials of one domain are split into 70 % for training, 15 % for validation and 15 % for
testing; Adam with 1e-3, x0.3 at epochs 80 and 160 of 200, gradient norm clipped to 0.25; mean over 3 runs.
Every domain (model and cluster) trains its own simulators. A plan that was measured more than once counts once, with the
median of its measurements: otherwise a simulator could be tested on what it was trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autotune.commands.workspace import Workspace
from autotune.errors import AutotuneError, InvalidInput
from autotune.features.extract import extract
from autotune.rng import generator
from autotune.simulators.evaluation import ANALYTIC, PAPER, RANDOM, REPLAY, RankingQuality, Split, evaluate, hold_out
from autotune.simulators.interface import Example, Simulator
from autotune.store import PastTrial, Store
from autotune.strategy_space.plan import Plan, plan

SMALLEST_DOMAIN = 20
"""Plans below which a domain is left out: 15 % of fewer are not even three strategies to test on."""
TIE_BAND = 0.01
"""Relative difference below which two measured times count as equal, in training (the recipe's) and in the figures."""

_LEGEND = {
    REPLAY: "replay of the lowered plan, untrained",
    ANALYTIC: "overlap estimate, untrained",
    PAPER: "max(T_comp, T_sync), untrained",
    RANDOM: "chance",
}
_FIGURES = {
    "pairwise_accuracy": "pairwise accuracy",
    "kendall_tau": "Kendall tau",
    "regret_top_1": "regret top 1",
    "regret_top_5": "regret top 5",
}

Makers = Mapping[str, Callable[[], Simulator]]


@dataclass(frozen=True)
class Domain:
    """The trials of one model on one cluster; `examples` holds one entry per distinct plan."""

    name: str
    trials: int
    examples: tuple[Example, ...]


class Progress:
    """Which training runs, for how long everything has run, and how long it may still take, on stderr."""

    def __init__(self, names: Sequence[str], rounds: int) -> None:
        self._took_s: dict[str, list[float]] = {name: [] for name in names}
        self._rounds = rounds
        self._began_s = self._since_s = time.monotonic()
        self._running: str | None = None

    def watched(self, makers: Makers) -> dict[str, Callable[[], Simulator]]:
        """The same makers; `evaluate` calls one when a training begins."""
        return {name: partial(self._started, name, make) for name, make in makers.items()}

    def _started(self, name: str, make: Callable[[], Simulator]) -> Simulator:
        now = time.monotonic()
        if self._running is not None:
            self._took_s[self._running].append(now - self._since_s)
        self._running, self._since_s = name, now
        done = sum(map(len, self._took_s.values()))
        eta = "ETA after the first round"
        if all(self._took_s.values()):
            left_s = sum(statistics.mean(took_s) * (self._rounds - len(took_s)) for took_s in self._took_s.values())
            eta = f"ETA {_clock(left_s)}"
        say(f"{_clock(now - self._began_s)} ({eta}) training {done + 1} of {self._rounds * len(self._took_s)}: {name}")
        return make()


def read_trials(directory: Path) -> list[PastTrial]:
    """The undisturbed measured candidates of all jobs in `directory`, oldest job first."""
    with Store.open(Workspace.existing(directory).store_path) as store:
        return store.past_trials()


def by_domain(trials: Sequence[PastTrial], max_trials: int | None) -> list[Domain]:
    """Domains in order of their names, the trials of each in random order, of which at most `max_trials` are kept.

    Trials lie in the order in which the tuner wanted them, and equal predictions are ranked in the order of the examples: unshuffled,
    a ranker that cannot tell two strategies apart would get the tuner's opinion. The order is the same in every run.
    """
    members: dict[str, list[PastTrial]] = {}
    for trial in trials:
        members.setdefault(f"{trial.workload.id}/{trial.cluster.id}", []).append(trial)
    domains = []
    for name, found in sorted(members.items()):
        order = generator(0, "order of trials", name).permutation(len(found))[:max_trials]
        domains.append(Domain(name, len(order), tuple(merged([found[index] for index in order], name))))
    return domains


def merged(trials: Sequence[PastTrial], domain: str) -> list[Example]:
    """One example per distinct plan, in order of first trial: that trial's features, the median of all its times."""
    first: dict[str, tuple[PastTrial, Plan]] = {}
    times_s: dict[str, list[float]] = {}
    for trial in trials:
        enacted = plan(trial.strategy, trial.workload, trial.cluster.world_size)
        first.setdefault(enacted.id, (trial, enacted))
        times_s.setdefault(enacted.id, []).append(trial.median_s)
    return [
        Example(extract(trial.strategy, enacted, trial.workload, trial.cluster), statistics.median(times_s[plan_id]), domain)
        for plan_id, (trial, enacted) in first.items()
    ]


def usable(domains: Sequence[Domain], show: Callable[[str], None]) -> list[Domain]:
    """The domains that are large enough; what is used, what is skipped and why goes to `show`. `InvalidInput` if none is left."""
    kept = []
    for domain in domains:
        size = f"{domain.name}: {domain.trials} trials of {len(domain.examples)} plans"
        if len(domain.examples) < SMALLEST_DOMAIN:
            show(f"skipped {size}, but at least {SMALLEST_DOMAIN} plans are needed to test a ranking")
        else:
            show(size)
            kept.append(domain)
    if not kept:
        raise InvalidInput(
            f"the benchmark needs a domain (model and cluster) with at least {SMALLEST_DOMAIN} measured plans, but the largest of "
            f"{len(domains)} has {max((len(domain.examples) for domain in domains), default=0)}; "
            "run `autotune tune` with a larger --budget-trials"
        )
    return kept


def splits_within(examples: Sequence[Example], seed: int) -> list[Split]:
    """The split of this seed, cut into one per domain, so that each domain trains its own simulators."""
    [(training, test)] = hold_out(examples, (seed,))
    names = np.array([example.domain for example in examples])
    return [(training[names[training] == name], test[names[test] == name]) for name in sorted(set(names.tolist()))]


def paper_simulators(epochs: int) -> Makers:
    """The three simulators in the paper's sizes with the paper's recipes."""
    from autotune.simulators.gat import gat_simulator
    from autotune.simulators.linear import linear_simulator
    from autotune.simulators.rnn import rnn_simulator
    from autotune.simulators.training import LINEAR_RECIPE, PAPER_RECIPE

    # One thread: the figures then do not depend on the number of cores, and a busy machine does not stall the training.
    recipe = replace(PAPER_RECIPE, epochs=epochs, tie_band=TIE_BAND, threads=1)
    linear = replace(LINEAR_RECIPE, epochs=epochs, tie_band=TIE_BAND, threads=1)
    return {
        "linear": lambda: linear_simulator(linear),
        "rnn": lambda: rnn_simulator(recipe),
        "gat": lambda: gat_simulator(recipe),
    }


def quality_by_seed(domains: Sequence[Domain], makers: Makers, seeds: int) -> dict[str, list[RankingQuality]]:
    """Ranker -> its quality over all domains, once per seed."""
    examples = [example for domain in domains for example in domain.examples]
    watched = Progress(list(makers), seeds * len(domains)).watched(makers)
    found: dict[str, list[RankingQuality]] = {}
    for seed in range(seeds):
        for quality in evaluate(examples, watched, splits_within(examples, seed), seed, TIE_BAND):
            found.setdefault(quality.ranker, []).append(quality)
    return found


def table(found: Mapping[str, Sequence[RankingQuality]]) -> str:
    """One line per ranker, learned ones first; each figure is the mean over the seeds ± their standard deviation."""
    untrained = [name for name in found if name in _LEGEND]
    lines = ["".join([f"{'ranker':<10}", *(f"{title:>20}" for title in _FIGURES.values())])]
    for name in [*(name for name in found if name not in _LEGEND), *untrained]:
        cells = [_mean_and_spread([getattr(quality, figure) for quality in found[name]]) for figure in _FIGURES]
        lines.append("".join([f"{name:<10}", *(f"{cell:>20}" for cell in cells), f"  {_LEGEND.get(name, '')}"]).rstrip())
    return "\n".join(lines)


def means(found: Mapping[str, Sequence[RankingQuality]], figure: str) -> dict[str, float]:
    """Ranker -> mean of one figure over the seeds."""
    return {name: statistics.mean(getattr(quality, figure) for quality in qualities) for name, qualities in found.items()}


def say(text: str) -> None:
    """Progress and messages, apart from the result on stdout."""
    print(text, file=sys.stderr, flush=True)


def _mean_and_spread(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:d}:{int(seconds) % 60:02d}"


def _hardware() -> str:
    import torch

    return f"hardware: {os.cpu_count()} cores; torch {torch.__version__}, training on 1 thread"


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, but is {value}")
        return value

    return whole_number


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranking", description="Ranking quality on the trials of a trial store.")
    parser.add_argument("--directory", type=Path, default=Path("autotune-jobs"), help="where jobs are kept (default autotune-jobs)")
    parser.add_argument("--seeds", type=_at_least(1), default=3, help="splits and trainings per domain (default 3)")
    parser.add_argument("--epochs", type=_at_least(1), default=200, help="of every training (default 200)")
    parser.add_argument("--max-trials", type=_at_least(SMALLEST_DOMAIN), help="trials drawn from each domain (default: all)")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line on stdout")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Print the table unless only JSON is wanted; the object of the last line."""
    began_s = time.monotonic()
    show: Callable[[str], None] = say if options.json else print
    domains = usable(by_domain(read_trials(options.directory), options.max_trials), show)
    show(_hardware())
    found = quality_by_seed(domains, paper_simulators(options.epochs), options.seeds)
    [(points, pairs)] = {(sum(q.points for q in of_one), sum(q.pairs for q in of_one)) for of_one in found.values()}
    show(f"{options.seeds} seeds, {options.epochs} epochs; tested on {points} strategies in {pairs} pairs more than {TIE_BAND:.0%} apart")
    show(table(found))
    return {
        "domains": len(domains),
        "trials": sum(domain.trials for domain in domains),
        **{figure: means(found, figure) for figure in ("pairwise_accuracy", "kendall_tau", "regret_top_5")},
        "seconds": round(time.monotonic() - began_s, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 where the input does not allow a benchmark."""
    options = _options(arguments)
    try:
        result = run(options)
    except AutotuneError as error:
        say(f"error: {error}")
        return 2
    print(json.dumps(result, allow_nan=False), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
