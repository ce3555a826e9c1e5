"""Collect trials on emulated clusters: `python datasets/collect.py --all --trials 200` (root).

Each domain (`domains.py`) gets `--trials` candidates of a mixture of strategies (`mixture.py`),
with a reference every few trials. Earlier trials count: the same command resumes a collection that
was stopped by Ctrl-C, SIGTERM or a crash, and a larger number extends a dataset. Every finished
trial is on disk. A world that fails is restarted. A domain whose world fails three times without a
trial in between is skipped, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

from domains import DOMAINS
from mixture import sample_domain
from rich.console import Console

from autotune.dataset.folder import CARD, SUMS, read_card, read_sums
from autotune.dataset.trials import DatasetTrial
from autotune.jobs.campaign.retries import persevere
from autotune.jobs.campaign.session import TrialLength, trial_line, trial_session
from autotune.jobs.campaign.setups import Setup
from autotune.jobs.signals import Interruption, terminable
from autotune.testbed.capabilities import capabilities
from autotune.units import format_seconds

FOLDER = Path(__file__).parent
LENGTH = TrialLength(warmup_steps=2, timed_steps=6)
LINE_EVERY_S = 15.0

console = Console(stderr=True, highlight=False, markup=False)


@dataclass
class CollectionProgress:
    """The trials that are left, at the pace of this run."""

    wanted: int
    there: int
    taken: int = 0
    began_s: float = field(default_factory=time.monotonic)
    logged_s: float = 0.0

    def count(self, name: str, trial: DatasetTrial) -> None:
        """Count a candidate, and log the progress now and then."""
        self.taken += trial.strategy is not None
        if time.monotonic() - self.logged_s < LINE_EVERY_S or not self.taken:
            return
        self.logged_s = time.monotonic()
        pace_s = (self.logged_s - self.began_s) / self.taken
        left = max(self.wanted - self.there - self.taken, 0)
        console.log(
            f"{name}: {trial_line(trial)} | {pace_s:.2f} s a candidate with all around it, "
            f"{left} left: {format_seconds(left * pace_s)}"
        )


def visited(
    folder: Path,
    setup: Setup,
    goal: int,
    seed: int,
    progress: CollectionProgress,
    interruption: Interruption,
) -> bool:
    """Visit the domain, and return whether it has all its candidates."""

    def visit() -> None:
        say, save = partial(log_line, setup.name), partial(progress.count, setup.name)
        with trial_session(folder / setup.name, setup, LENGTH, say, save) as session:
            sample_domain(session, goal, seed, interruption.obey)

    return persevere(setup.name, visit, lambda: candidates(folder, setup), console.log)


def log_line(name: str, line: str) -> None:
    console.log(f"{name}: {line}")


def candidates(folder: Path, setup: Setup) -> int:
    """Return the candidates on the domain's card; trials only in the journal are not counted."""
    domain = folder / setup.name
    sums = read_sums(domain) if (domain / SUMS).exists() else {}
    return read_card(domain, sums).candidates if CARD in sums else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--domain", nargs="+", choices=list(DOMAINS), metavar="NAME", help=", ".join(DOMAINS)
    )
    which.add_argument("--all", action="store_true", help="every domain, one after the other")
    parser.add_argument(
        "--trials", type=int, default=200, help="candidates a domain in all (default 200)"
    )
    parser.add_argument(
        "--visit",
        type=int,
        default=200,
        help="candidates a domain before the next one has its turn (default 200)",
    )
    parser.add_argument(
        "--out", type=Path, default=FOLDER / "trials", help="default datasets/trials"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    able = capabilities()
    if not able.possible:
        console.print(able.message)
        return 2
    setups = [DOMAINS[name] for name in (DOMAINS if options.all else options.domain)]
    there = sum(min(candidates(options.out, setup), options.trials) for setup in setups)
    progress = CollectionProgress(options.trials * len(setups), there)
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
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
