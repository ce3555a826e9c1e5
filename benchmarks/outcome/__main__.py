"""Measure what tuning is worth against every rival: `python -m benchmarks.outcome` (root).

A domain is a model on an emulated cluster. One running script measures these sides of each domain:
torch's DDP as it is and with the best bucket size of a sweep; one message per variable, a single
bucket, parameter servers, BytePS-, ByteScheduler- and ZeRO-2-like strategies; random search and
scikit-optimize; ours after 25, 50, 100 and 200 trials, without and with lossy compressors. All are
frozen and measured again, interleaved in rounds of random order.

With `--horovod`, Horovod is measured next in the same domains, in rounds with ours
(`benchmarks.outcome.horovod`), and with `--tensorflow`, TensorFlow's MultiWorkerMirroredStrategy
(`benchmarks.outcome.tensorflow`). A run that was cut off resumes.

Ratios are time(rival) / time(ours): above 1, ours is faster. The last line is one JSON object, and
`outcome.md` in the folder is a report. The folder is a dataset (`autotune.dataset`) of all trials,
which `datasets/datasheet.py` and `benchmarks.ranking --dataset` read.

    python -m benchmarks.outcome --domain vgg.four_hosts --quick   # one domain in a few minutes
    python -m benchmarks.outcome --marks 25,50                     # all domains; resumes a run
    python -m benchmarks.outcome --domain vgg.four_hosts --quick --horovod
    python -m benchmarks.outcome --only-evaluate                   # the trials in a folder
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from autotune.dataset.folder import SUMS, read_domain
from autotune.errors import InvalidInput
from autotune.jobs.campaign.retries import persevere
from autotune.jobs.campaign.setups import Setup
from autotune.tuning.statistics import CONFIDENCE, fewest_values
from benchmarks.outcome.horovod import measure_horovod
from benchmarks.outcome.horovod_sides import horovod_keys, horovod_ratios, horovod_rounds
from benchmarks.outcome.kept import OutcomeSettings
from benchmarks.outcome.measure import DOMAINS, measure
from benchmarks.outcome.report import section
from benchmarks.outcome.results import last_line, row_of
from benchmarks.outcome.tensorflow import measure_tensorflow, tensorflow_keys, tensorflow_ratios
from benchmarks.repository import can_emulate, option_parser

MARKS = (25, 50, 100, 200)
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
        1 if options.quick else OutcomeSettings.sweeps,
        not (options.lossless_only or options.quick),
        options.seed,
    )


def trials_in(folder: Path) -> int:
    """Return the number of trials; a session that ended has put all its trials into the table."""
    return len(read_domain(folder).trials) if (folder / SUMS).exists() else 0


def measured(setup: Setup, folder: Path, settings: OutcomeSettings, quick: bool) -> bool:
    """Measure the domain and return whether it has all its trials."""
    return persevere(
        setup.name,
        lambda: measure(setup, folder, settings, console.log, quick),
        lambda: trials_in(folder),
        console.log,
    )


def with_horovod(setup: Setup, folder: Path, settings: OutcomeSettings, quick: bool) -> bool:
    """Measure Horovod in a domain and return whether it has all its rounds."""
    return persevere(
        setup.name,
        lambda: measure_horovod(setup, folder, settings.rounds, console.log, quick),
        lambda: horovod_rounds(folder),
        console.log,
    )


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of the dataset (default outcome-trials, with --quick quick-outcome-trials)",
    )
    domains_help = f"of {', '.join(DOMAINS)} (default all)"
    parser.add_argument(
        "--domain",
        nargs="+",
        default=list(DOMAINS),
        choices=list(DOMAINS),
        metavar="MODEL.CLUSTER",
        help=domains_help,
    )
    parser.add_argument(
        "--marks",
        default=",".join(map(str, MARKS)),
        help="trials after which ours is frozen (default 25,50,100,200)",
    )
    parser.add_argument(
        "--trials",
        type=int,
        help="budget of every search, and the last mark (default the largest of --marks)",
    )
    parser.add_argument(
        "--rounds", type=int, help=f"of the closing comparison (default {OutcomeSettings.rounds})"
    )
    parser.add_argument(
        "--lossless-only", action="store_true", help="no search with lossy compressors"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_TRIALS} trials, a short probe, the fewest rounds, lossless only",
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
    options = parser.parse_args()
    # A quick run probes too little to judge a whole one.
    options.folder = options.folder or Path(
        "quick-outcome-trials" if options.quick else "outcome-trials"
    )
    try:
        settings = read_settings(options)
    except InvalidInput as error:
        parser.error(str(error))
    left: list[str] = []
    if not options.only_evaluate:
        if not can_emulate():
            return 2
        left = [
            name
            for name in options.domain
            if not measured(DOMAINS[name], options.folder / name, settings, options.quick)
        ]
        if options.horovod:
            left += [
                name
                for name in options.domain
                if name not in left
                and not with_horovod(DOMAINS[name], options.folder / name, settings, options.quick)
            ]
        if options.tensorflow:
            for name in options.domain:
                if name not in left:
                    measure_tensorflow(
                        DOMAINS[name], options.folder / name, settings.rounds, console.log
                    )
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
    horovod = horovod_keys([one for folder in folders if (one := horovod_ratios(folder))])
    mirrored = [found for folder in folders if (found := tensorflow_ratios(folder))]
    print(json.dumps({**last_line(rows), **horovod, **tensorflow_keys(mirrored)}))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
