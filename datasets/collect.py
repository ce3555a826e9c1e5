"""Collect trials on emulated clusters: `python datasets/collect.py --all` (root).

Each domain (`domains.py`) gets `--trials` candidates of a mixture of strategies (`mixture.py`),
with a reference every few trials. Earlier trials count: the same command resumes a collection that
was stopped by Ctrl-C, SIGTERM or a crash, and a larger number extends a dataset. Every finished
trial is on disk. A world that fails is restarted. A domain is skipped if its world fails three
times without a trial in between, or if its mixture ends with too few candidates; the exit status is
then 1. Trials that fail are kept with their reason. All sessions are at one commit. The last line
counts what the folder has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

from domains import DOMAINS
from mixture import sample_domain
from rich.console import Console

from autotune.dataset.folder import CARD, SUMS, read_card, read_dataset, read_sums
from autotune.dataset.trials import DatasetTrial
from autotune.errors import InvalidInput
from autotune.jobs.campaign.commit import checkout_commit, commits_in, demand_one_commit
from autotune.jobs.campaign.progress import Progress
from autotune.jobs.campaign.retries import persevere
from autotune.jobs.campaign.session import TrialLength, trial_line, trial_session
from autotune.jobs.campaign.setups import Setup
from autotune.jobs.signals import Interruption, terminable
from autotune.testbed.capabilities import capabilities

FOLDER = Path(__file__).parent
LENGTH = TrialLength(warmup_steps=2, timed_steps=6)
TRIALS = 160
"""Candidates a domain by default: 4,480 in all, so that failures and repeats leave 4,000."""

console = Console(stderr=True, highlight=False, markup=False)


def visited(
    folder: Path, setup: Setup, goal: int, seed: int, progress: Progress, interruption: Interruption
) -> bool:
    """Visit the domain, and return whether it has all its candidates."""

    def visit() -> None:
        say, save = partial(log_line, setup.name), partial(count, progress, setup.name)
        with trial_session(folder / setup.name, setup, LENGTH, say, save) as session:
            sample_domain(session, goal, seed, interruption.obey)

    ended = persevere(setup.name, visit, lambda: candidates(folder, setup), console.log)
    return ended and has_all(folder, setup, goal)


def has_all(folder: Path, setup: Setup, goal: int) -> bool:
    """Return whether the domain has `goal` candidates; log that its mixture ended before."""
    number = candidates(folder, setup)
    if number < goal:
        console.log(f"{setup.name}: its mixture ended with {number} of {goal} candidates")
    return number >= goal


def log_line(name: str, line: str) -> None:
    console.log(f"{name}: {line}")


def count(progress: Progress, name: str, trial: DatasetTrial) -> None:
    progress.count(f"{name}: {trial_line(trial)}", trial.strategy is not None)


def candidates(folder: Path, setup: Setup) -> int:
    """Return the candidates on the domain's card; trials only in the journal are not counted."""
    domain = folder / setup.name
    sums = read_sums(domain) if (domain / SUMS).exists() else {}
    return read_card(domain, sums).candidates if CARD in sums else 0


def summary(folder: Path) -> str:
    """Return a line with the numbers of trials, plans, domains and failures in the folder."""
    domains = read_dataset(folder)
    candidates = [trial for domain in domains for trial in domain.candidates]
    plans = {trial.plan_id for trial in candidates}
    failed = sum(bool(trial.failure) for trial in candidates)
    return (
        f"{len(candidates)} trials of {len(plans)} plans in {len(domains)} domains, {failed} failed"
    )


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--domain", nargs="+", choices=list(DOMAINS), metavar="NAME", help=", ".join(DOMAINS)
    )
    which.add_argument("--all", action="store_true", help="every domain, one after the other")
    parser.add_argument(
        "--trials", type=positive, default=TRIALS, help=f"candidates a domain (default {TRIALS})"
    )
    parser.add_argument(
        "--visit",
        type=positive,
        default=200,
        help="candidates a domain before the next one has its turn (default 200)",
    )
    parser.add_argument(
        "--out", type=Path, default=FOLDER / "trials", help="default datasets/trials"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--any-commit", action="store_true", help="go on at another commit, or with changes"
    )
    options = parser.parse_args(arguments)
    able = capabilities()
    if not able.possible:
        console.print(able.message)
        return 2
    setups = [DOMAINS[name] for name in (DOMAINS if options.all else options.domain)]
    there = sum(min(candidates(options.out, setup), options.trials) for setup in setups)
    if not options.any_commit:
        try:
            demand_one_commit(commits_in(options.out), checkout_commit())
        except InvalidInput as error:
            console.print(error)
            return 2
    progress = Progress(options.trials * len(setups), there, console.log, "candidate")
    left: list[Setup] = []
    goals = [*range(options.visit, options.trials, options.visit), options.trials]
    try:
        with terminable() as interruption:
            for goal, setup in product(goals, setups):
                if setup in left or candidates(options.out, setup) >= goal:
                    continue
                if not visited(options.out, setup, goal, options.seed, progress, interruption):
                    left.append(setup)
    except KeyboardInterrupt:
        console.log("stopped; the same command goes on")
        return 130
    if left:
        console.log(f"given up: {', '.join(setup.name for setup in left)}")
    console.print(summary(options.out))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
