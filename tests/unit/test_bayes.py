"""The Bayesian baseline is reproducible, can be restored, and finds the better fusion."""

from __future__ import annotations

import math

import pytest

from autotune.errors import InvalidInput
from autotune.sampler.bayes import BayesianSearch
from autotune.sampler.encodings import FusionScalars
from autotune.strategy_space.plan import plan
from autotune.workload import Variable, Workload

GRADIENTS = tuple(Variable(f"v{i:02d}", (2**20,)) for i in range(24))  # 4 MiB each
MODEL = Workload("m", GRADIENTS, backward_s=0.2)


def fusion(seed: int) -> BayesianSearch:
    return BayesianSearch(FusionScalars(MODEL), seed)


def pretended_step_s(strategy):
    """Best at 12 messages: overhead grows with their number, lost overlap with their size."""
    messages = len(plan(strategy, MODEL, 4).messages)
    return 0.2 + 0.01 * abs(math.log2(messages / 12))


def run(search, trials):
    """The strategies asked for and their times."""
    results = []
    for _ in range(trials):
        strategy = search.ask()
        results.append((strategy.id, pretended_step_s(strategy)))
        search.tell(*results[-1])
    return results


def test_the_same_seed_proposes_the_same_and_another_seed_does_not():
    first = run(fusion(seed=3), 5)
    assert first == run(fusion(seed=3), 5)
    assert first[:3] != run(fusion(seed=4), 3)


def test_telling_the_results_again_restores_the_state_and_its_open_proposal():
    search, restored = fusion(seed=5), fusion(seed=5)
    for result in run(search, 4):
        restored.tell(*result)
    assert restored.ask() == search.ask()
    assert search.ask() is search.ask()


@pytest.mark.parametrize("seed", [0, 3])
def test_it_improves_on_its_first_random_points(seed):
    steps_s = [step_s for _, step_s in run(fusion(seed), 6)]
    assert min(steps_s) < min(steps_s[:3])


def test_a_foreign_id_or_a_time_that_is_none_is_refused_and_changes_nothing():
    search = fusion(seed=0)
    strategy = search.ask()
    with pytest.raises(InvalidInput, match=f"open proposal {strategy.id}, but is for strategy-0"):
        search.tell("strategy-0", 0.1)
    for bad in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(InvalidInput, match="finite number of seconds above 0, but is"):
            search.tell(strategy.id, bad)
    assert search.ask() is strategy
