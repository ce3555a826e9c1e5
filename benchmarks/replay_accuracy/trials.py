"""Collect fresh trials of strategies of every kind, measured as the tuner measures them.

A domain is one model on one cluster. A run that was stopped resumes with the strategies that have
no trial.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autotune.cluster import Cluster
from autotune.dataset.folder import SUMS, read_domain
from autotune.dataset.trials import DatasetTrial, Domain
from autotune.jobs.campaign import domains
from autotune.jobs.campaign.session import TrialLength, trial_line, trial_session
from autotune.jobs.campaign.setups import Setup
from autotune.jobs.campaign.strategy_sources import Sourced, built, drawn, shuffled
from autotune.sampler.random import sample_many
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Synchronizer
from autotune.workload import Workload

LENGTHS = TrialLength(warmup_steps=3, timed_steps=8, most_steps=24, precision=0.01)
REFERENCE_EVERY = 8
DIRECT_SEED = 100
"""Added to the seed for direct exchanges, so that they are not drawn as the others are."""
MODELS = ("resnet_digits", "gpt_text", "layers")
CLUSTERS = {
    "four_hosts": "even",
    "four_hosts_uneven": "uneven",
    "two_hosts_two_devices": "two devices a host",
}
ALL_MODELS = tuple(dict.fromkeys((*MODELS, *domains.MODELS)))
ALL_CLUSTERS = tuple(dict.fromkeys((*CLUSTERS, *domains.DILATIONS)))


def collected(folder: Path, setup: Setup) -> Domain | None:
    """Return the domain measured so far, or None."""
    file = folder / setup.name / SUMS
    return read_domain(file.parent) if file.exists() else None


def strategies(workload: Workload, cluster: Cluster, count: int, seed: int) -> list[Sourced]:
    """Return `count` pairs of a source and a strategy.

    A quarter are builders' strategies and a quarter direct exchanges, half of them builders' and
    the others random. The others are random: half from the lossless space, half from the one with
    compressors. Parts are rounded down, but for the lossless ones. So 12 are 3 builders', 1 direct
    exchange of builders' and 2 random ones, 3 lossless and 3 that may compress; 7 are 1, 0 and 1, 3
    and 2.
    """
    lossless, lossy = SearchSpace.default(), SearchSpace.default(lossy=True)
    builders = built(workload, cluster, lossy)
    order = shuffled(builders, seed, "accuracy", workload.id, cluster.id)
    chosen, others = order[: count // 4], order[count // 4 :]
    on_direct = [pair for pair in others if pair[1].direct][: count // 8]
    only_direct = replace(lossless, synchronizers=(Synchronizer.DIRECT_EXCHANGE,))
    left = count // 4 - len(on_direct)
    random = sample_many(workload, cluster, only_direct, left, seed + DIRECT_SEED)
    chosen += on_direct + [("random:direct", strategy) for strategy in random]
    chosen += drawn(workload, cluster, (lossless, lossy), count - len(chosen), seed)
    return shuffled(chosen, seed, "order", workload.id)


def collect(folder: Path, setup: Setup, count: int, seed: int, say: Callable[[str], None]) -> None:
    """Measure until `count` strategies of this seed have a trial."""
    earlier = collected(folder, setup)
    if earlier is not None and not _left(earlier, count, seed):
        return

    def show(trial: DatasetTrial) -> None:
        say(f"{setup.name}: {trial_line(trial)}")

    with trial_session(folder / setup.name, setup, LENGTHS, say, show) as session:
        todo = _left(session.writer.domain, count, seed)
        for number, (source, strategy) in enumerate(todo):
            if number % REFERENCE_EVERY == 0:
                session.reference()
            session.candidate(source, strategy)


def _left(domain: Domain, count: int, seed: int) -> list[Sourced]:
    tried = {trial.strategy.id for trial in domain.candidates if trial.strategy is not None}
    wanted = strategies(domain.workload, domain.cluster, count, seed)
    return [(source, strategy) for source, strategy in wanted if strategy.id not in tried]
