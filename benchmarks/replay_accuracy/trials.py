"""Collect fresh trials of strategies of every kind, measured as the tuner measures them.

A domain is one model on one cluster. A run that was stopped resumes with the strategies that have
no trial.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune.cluster import Cluster
from autotune.dataset.folder import SUMS, read_domain
from autotune.dataset.trials import Domain
from autotune.jobs.campaign.session import TrialLength, trial_line, trial_session
from autotune.jobs.campaign.setups import Setup
from autotune.rng import generator
from autotune.sampler.random import sample_many
from autotune.strategy_space.builders.registry import seed_strategies
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload

LENGTHS = TrialLength(warmup_steps=3, timed_steps=8, most_steps=24, precision=0.01)
REFERENCE_EVERY = 8
MODELS = ("resnet_digits", "gpt_text", "layers")
CLUSTERS = {
    "four_hosts": "even",
    "four_hosts_uneven": "uneven",
    "two_hosts_two_devices": "two devices a host",
}


def collected(folder: Path, setup: Setup) -> Domain | None:
    """Return the domain measured so far, or None."""
    own = folder / setup.name
    return read_domain(own) if (own / SUMS).exists() else None


def strategies(
    workload: Workload, cluster: Cluster, count: int, seed: int
) -> list[tuple[str, Strategy]]:
    """Return (source, strategy): hand-made, random, random and compressed; a third each."""
    lossless, lossy = SearchSpace.default(), SearchSpace.default(lossy=True)
    made = [
        (f"builder:{name}", strategy)
        for name, strategy in seed_strategies(workload, cluster, lossy)
    ]
    order = generator(seed, "accuracy", workload.id, cluster.id).permutation(len(made)).tolist()
    third = count // 3
    chosen = [made[index] for index in order[:third]]
    left = count - len(chosen)
    drawn = [
        ("random:lossless", strategy)
        for strategy in sample_many(workload, cluster, lossless, left - left // 2, seed)
    ]
    drawn += [
        ("random:lossy", strategy)
        for strategy in sample_many(workload, cluster, lossy, left // 2, seed + 1)
    ]
    both = [*chosen, *drawn]
    mixed = generator(seed, "order", workload.id).permutation(len(both)).tolist()
    return [both[index] for index in mixed]


def collect(folder: Path, setup: Setup, count: int, seed: int, say: Callable[[str], None]) -> None:
    """Measure until `count` strategies of this seed have a trial."""
    earlier = collected(folder, setup)
    if earlier is not None and not _left(earlier, count, seed):
        return
    own = folder / setup.name
    with trial_session(
        own, setup, LENGTHS, say, lambda trial: say(f"{setup.name}: {trial_line(trial)}")
    ) as session:
        todo = _left(session.writer.domain, count, seed)
        for number, (source, strategy) in enumerate(todo):
            if number % REFERENCE_EVERY == 0:
                session.reference()
            session.candidate(source, strategy)


def _left(domain: Domain, count: int, seed: int) -> list[tuple[str, Strategy]]:
    there = {trial.strategy.id for trial in domain.candidates if trial.strategy is not None}
    return [
        each
        for each in strategies(domain.workload, domain.cluster, count, seed)
        if each[1].id not in there
    ]
