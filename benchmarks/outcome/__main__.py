"""Measure what tuning is worth against every rival: `python -m benchmarks.outcome` (root).

A domain is a model on an emulated cluster, at a ratio of computation to communication, in dilated
time (`autotune.jobs.campaign.domains`). One running script measures these sides of each domain:
torch's DDP as it is and with the best of everything that torch offers; ByteScheduler-, BytePS- and
ZeRO-2-like strategies, hierarchical all-reduces and parameter servers, each the best of its sweep;
our planned order without a search; random search and scikit-optimize; ours after 25 trials, without
and with lossy compressors, within the step only, and with other seeds. Every sweep and every search
has as many trials. All sides are frozen and measured again, interleaved in rounds of random order.

With `--hooks`, DDP with torch's fp16 and PowerSGD hooks is measured next in the same domains, in
rounds with ours (`benchmarks.outcome.hooks`); with `--horovod`, Horovod
(`benchmarks.outcome.horovod`), and with `--tensorflow`, TensorFlow's MultiWorkerMirroredStrategy
(`benchmarks.outcome.tensorflow`). A run that was cut off resumes, shows the time that is left, and
refuses another commit.

Ratios are time(rival) / time(ours): above 1, ours is faster. The last line is one JSON object, and
`outcome.md` in the folder is a report. The folder is a dataset (`autotune.dataset`) of all trials,
which `datasets/datasheet.py` and `benchmarks.ranking --dataset` read.

    python -m benchmarks.outcome --domain vgg.two_hosts.ratio_1 --quick  # one domain, minutes
    python -m benchmarks.outcome                                          # all domains; resumes
    python -m benchmarks.outcome --ratio 1 --rounds 6                     # a part of them
    python -m benchmarks.outcome --only-evaluate                          # the trials in a folder
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from autotune.dataset.folder import SUMS, read_domain
from autotune.dataset.trials import DatasetTrial
from autotune.errors import InvalidInput
from autotune.jobs.campaign.commit import checkout_commit, commits_in, demand_one_commit
from autotune.jobs.campaign.domains import seeded_domains
from autotune.jobs.campaign.progress import Progress
from autotune.jobs.campaign.retries import persevere
from autotune.jobs.campaign.session import trial_line
from autotune.jobs.campaign.setups import Setup
from autotune.tuning.statistics import CONFIDENCE, fewest_values
from benchmarks.outcome.expected import expected_trials
from benchmarks.outcome.hooks import hook_keys, hook_ratios, hook_rounds, measure_hooks
from benchmarks.outcome.horovod import measure_horovod
from benchmarks.outcome.horovod_sides import horovod_keys, horovod_ratios, horovod_rounds
from benchmarks.outcome.kept import OutcomeSettings
from benchmarks.outcome.keys import last_line
from benchmarks.outcome.measure import DOMAINS, SETUPS, measure
from benchmarks.outcome.report import section
from benchmarks.outcome.results import row_of
from benchmarks.outcome.tensorflow import measure_tensorflow, tensorflow_keys, tensorflow_ratios
from benchmarks.repository import ROOT, can_emulate, option_parser, run_benchmark

MARKS = (25,)
LONG = 100
SEEDS = 3
QUICK_TRIALS = 10

console = Console(stderr=True, highlight=False, markup=False)


def read_settings(options: argparse.Namespace) -> OutcomeSettings:
    """Return the settings. Raises `InvalidInput`."""
    try:
        marks = tuple(sorted({int(mark) for mark in options.marks.split(",")}))
    except ValueError:
        raise InvalidInput(
            f"--marks needs numbers of trials, for example 25,50, but is {options.marks!r}"
        ) from None
    trials = options.trials or (QUICK_TRIALS if options.quick else marks[-1])
    marks = (*(mark for mark in marks if mark < trials), trials)
    if marks[0] < 1:
        raise InvalidInput(f"--marks and --trials must be at least 1, but the first is {marks[0]}")
    fewest = fewest_values(CONFIDENCE)
    rounds = options.rounds or (fewest if options.quick else OutcomeSettings.rounds)
    if rounds < fewest:
        raise InvalidInput(
            f"--rounds must be at least {fewest} for an interval of {CONFIDENCE:.0%}, "
            f"but is {rounds}"
        )
    return OutcomeSettings(
        marks,
        rounds,
        not (options.lossless_only or options.quick),
        options.seed,
        long=0 if options.quick else options.long,
        parts=not options.quick,
        options=not options.quick,
        baselines=not options.no_baselines,
    )


def settings_of(
    name: str, setup: Setup, settings: OutcomeSettings, options: argparse.Namespace
) -> OutcomeSettings:
    """Return the settings of one domain: its ratio, and more seeds where several are drawn."""
    seeds = 1 if options.quick or name not in seeded_domains(ROOT) else options.seeds
    more = tuple(range(settings.seed + 1, settings.seed + seeds))
    return replace(settings, ratio=setup.ratio, more_seeds=more)


def trials_in(folder: Path) -> int:
    """Return the number of trials; a session that ended has put all its trials into the table."""
    return len(read_domain(folder).trials) if (folder / SUMS).exists() else 0


def measured(
    setup: Setup, folder: Path, settings: OutcomeSettings, quick: bool, progress: Progress
) -> bool:
    """Measure the domain and return whether it has all its trials."""

    def on_trial(trial: DatasetTrial) -> None:
        progress.count(f"{setup.name}: {trial_line(trial)}")

    return persevere(
        setup.name,
        lambda: measure(setup, folder, settings, console.log, quick, on_trial),
        lambda: trials_in(folder),
        console.log,
    )


def with_hooks(setup: Setup, folder: Path, settings: OutcomeSettings) -> bool:
    """Measure DDP's hooks in a domain and return whether they have all their rounds."""
    return persevere(
        setup.name,
        lambda: measure_hooks(setup, folder, settings.rounds, console.log),
        lambda: hook_rounds(folder),
        console.log,
    )


def with_tensorflow(setup: Setup, folder: Path, settings: OutcomeSettings) -> bool:
    """Measure TensorFlow in a domain; an error ends the benchmark."""
    measure_tensorflow(setup, folder, settings.rounds, console.log)
    return True


def with_horovod(setup: Setup, folder: Path, settings: OutcomeSettings, quick: bool) -> bool:
    """Measure Horovod in a domain and return whether it has all its rounds."""
    return persevere(
        setup.name,
        lambda: measure_horovod(setup, folder, settings.rounds, console.log, quick),
        lambda: horovod_rounds(folder),
        console.log,
    )


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = option_parser(__doc__)
    _add_domains(parser)
    _add_budgets(parser)
    _add_parts(parser)
    options = parser.parse_args(words)
    # A quick run probes too little to judge a whole one.
    options.folder = options.folder or Path(
        "quick-outcome-trials" if options.quick else "outcome-trials"
    )
    try:
        options.settings = read_settings(options)
        options.domain = chosen_domains(options)
    except InvalidInput as error:
        parser.error(str(error))
    return options


def _add_domains(parser: argparse.ArgumentParser) -> None:
    """Which domains are measured, and where their files lie."""
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of the dataset (default outcome-trials, with --quick quick-outcome-trials)",
    )
    parser.add_argument(
        "--domain",
        nargs="+",
        metavar="MODEL.CLUSTER.dilated_TIMES.ratio_RATIO",
        help=f"of {', '.join(DOMAINS)} (default all; evaluation: all in the folder), or the same "
        "without dilation of time",
    )
    parser.add_argument(
        "--ratio",
        nargs="+",
        type=float,
        help="only domains with these ratios of computation to communication (default all)",
    )


def _add_budgets(parser: argparse.ArgumentParser) -> None:
    """How long the searches and the closing comparisons are."""
    parser.add_argument(
        "--marks",
        default=",".join(map(str, MARKS)),
        help=f"trials after which ours is frozen (default {','.join(map(str, MARKS))})",
    )
    parser.add_argument(
        "--trials",
        type=int,
        help="budget of every search and rival, and the last mark (default the largest of --marks)",
    )
    parser.add_argument(
        "--long",
        type=int,
        default=LONG,
        help=f"trials of the search for the best known plan (default {LONG}; 0: none)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=SEEDS,
        help=f"seeds of our search in the domains drawn for it (default {SEEDS})",
    )
    parser.add_argument(
        "--rounds", type=int, help=f"of the closing comparison (default {OutcomeSettings.rounds})"
    )


def _add_parts(parser: argparse.ArgumentParser) -> None:
    """Which searches and rivals take part."""
    parser.add_argument(
        "--lossless-only", action="store_true", help="no search with lossy compressors"
    )
    parser.add_argument(
        "--no-baselines", action="store_true", help="neither random search nor scikit-optimize"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_TRIALS} trials, a short probe, the fewest rounds, lossless only, no sweep of "
        "DDP's options, no ablation, at any commit",
    )
    parser.add_argument(
        "--hooks", action="store_true", help="then measure DDP with torch's compression hooks"
    )
    parser.add_argument(
        "--horovod", action="store_true", help="then measure Horovod in the same domains"
    )
    parser.add_argument(
        "--tensorflow",
        action="store_true",
        help="then measure TensorFlow's MultiWorkerMirroredStrategy in the same domains",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-evaluate", action="store_true", help="of what lies in the folder")


def chosen_domains(options: argparse.Namespace) -> list[str]:
    """Return the names of the domains. Raises `InvalidInput` for one that does not exist."""
    there = sorted(path.parent.name for path in options.folder.glob(f"*/{SUMS}"))
    default = there if options.only_evaluate else list(DOMAINS)
    known = there if options.only_evaluate else list(SETUPS)
    names = options.domain or default
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise InvalidInput(
            f"--domain must be some of {', '.join(known) or 'none'}, but has {unknown[0]!r}"
        )
    if options.ratio is None:
        return names
    suffixes = tuple(f".ratio_{ratio:g}" for ratio in options.ratio)
    return [name for name in names if name.endswith(suffixes)]


def measure_all(options: argparse.Namespace) -> list[str]:
    """Measure the domains, and return those that were given up."""
    settings = {
        name: settings_of(name, SETUPS[name], options.settings, options) for name in options.domain
    }
    folders = {name: options.folder / name for name in options.domain}
    wanted = sum(map(expected_trials, settings.values()))
    progress = Progress(wanted, sum(map(trials_in, folders.values())), console.log)
    left = [
        name
        for name in options.domain
        if not measured(SETUPS[name], folders[name], settings[name], options.quick, progress)
    ]
    for asked, follow in (
        (options.hooks, with_hooks),
        (options.horovod, partial(with_horovod, quick=options.quick)),
        (options.tensorflow, with_tensorflow),
    ):
        if asked:
            left += [
                name
                for name in options.domain
                if name not in left and not follow(SETUPS[name], folders[name], settings[name])
            ]
    return left


def main(words: Sequence[str] | None = None) -> int:
    options = parsed(words)
    left: list[str] = []
    if not options.only_evaluate:
        if not can_emulate():
            return 2
        if not options.quick:
            try:
                demand_one_commit(commits_in(options.folder), checkout_commit())
            except InvalidInput as error:
                print(error, file=sys.stderr)
                return 2
        left = measure_all(options)
        if left:
            console.log(f"given up: {', '.join(left)}")
    rows = [row for name in options.domain if (row := row_of(options.folder / name))]
    if not rows:
        print(
            f"{options.folder} holds no complete domain of {', '.join(options.domain)}; "
            "measure one first",
            file=sys.stderr,
        )
        return 2
    text = section(
        rows,
        f"python -m benchmarks.outcome {' '.join(sys.argv[1:])}".strip(),
        f"{datetime.now(UTC):%Y-%m-%d}",
    )
    (options.folder / "outcome.md").write_text(text, encoding="utf-8")
    print(text)
    folders = [options.folder / name for name in options.domain]
    hooks = hook_keys([one for folder in folders if (one := hook_ratios(folder))])
    horovod = horovod_keys([found for folder in folders if (found := horovod_ratios(folder))])
    mirrored = [each for folder in folders if (each := tensorflow_ratios(folder))]
    print(json.dumps({**last_line(rows), **hooks, **horovod, **tensorflow_keys(mirrored)}))
    return 1 if left else 0


if __name__ == "__main__":
    run_benchmark(main)
