"""The search ends early where nothing can be won, and not where something can."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from synthetic_job import SyntheticWorld, drive, job_spec

from autotune.records import CURRENT_SETUP, Role
from autotune.rng import generator
from autotune.tuning.instructions import Finish
from autotune.tuning.prospects import best_expected, provable_gain

PRECISION = 0.01
TRIALS, ROUND = 60, 6
TOLERANCE = 0.03
"""Two standard deviations of a share of 5 % among 200 jobs."""
Draw = Callable[[np.random.Generator], float]


def stopped(draw: Draw, noise: float, seed: int, needed: float = PRECISION) -> tuple[bool, float]:
    """Whether a simulated search ends early, and the true g of its fastest strategy by then."""
    rng = generator(seed, "prospects")
    true: list[float] = []
    measured: list[float] = []
    references = [rng.normal(0, noise)]
    while len(true) < TRIALS:
        for _ in range(ROUND):
            true.append(draw(rng))
            measured.append(true[-1] + rng.normal(0, noise))
        references.append(rng.normal(0, noise))
        reference = float(np.median(references))
        g = [value - reference for value in measured]
        left = TRIALS - len(true)
        bound = best_expected(g, max(noise, 0.01), len(references), left, 0.95)
        if bound >= math.log(1 - needed):
            return True, min(true)
    return False, min(true)


def share_stopped(draw: Draw, noise: float, jobs: int = 200, needed: float = PRECISION) -> float:
    return sum(stopped(draw, noise, seed, needed)[0] for seed in range(jobs)) / jobs


def mostly(value: float, share: float) -> Draw:
    """A `share` of the strategies has this g; others are 2 % slower, or much slower."""

    def draw(rng: np.random.Generator) -> float:
        if rng.random() < share:
            return value
        return float(rng.normal(0.02, 0.005) if rng.random() < 0.6 else rng.exponential(0.3))

    return draw


@pytest.mark.parametrize(
    ("draw", "noise", "least"),
    [
        (lambda rng: 0.0, 0.005, 0.95),
        (lambda rng: 0.0, 0.01, 0.7),
        (mostly(0.0, 0.0), 0.01, 0.9),
        (mostly(0.0, 0.0), 0.005, 0.9),
        (lambda rng: rng.normal(0.03, 0.01), 0.005, 0.8),
    ],
)
def test_a_job_without_gains_ends_early(draw: Draw, noise: float, least: float) -> None:
    assert share_stopped(draw, noise) >= least


@pytest.mark.parametrize("noise", [0.005, pytest.param(0.01, marks=pytest.mark.slow), 0.02])
@pytest.mark.parametrize(
    "draw",
    [
        mostly(-0.05, 0.3),
        mostly(-0.05, 0.1),
        lambda rng: rng.normal(-0.02, 0.02),
        lambda rng: rng.normal(0.0, 0.02),
        lambda rng: -0.05 if rng.random() < 0.1 else rng.normal(0.0, 0.015),
    ],
)
def test_a_job_in_which_5_percent_can_be_won_goes_on(draw: Draw, noise: float) -> None:
    assert share_stopped(draw, noise) <= 0.05 + TOLERANCE  # 1 - confidence


def test_a_gain_that_was_measured_is_not_given_up() -> None:
    for noise in (0.005, 0.01, 0.02):
        known = [stopped(mostly(-0.05, 0.1), noise, seed) for seed in range(200)]
        assert sum(ended and best < -0.03 for ended, best in known) <= 0.02 * len(known)


def test_too_few_strategies_say_nothing() -> None:
    assert best_expected([], 0.01, 3, 10, 0.95) == -math.inf
    assert best_expected([0.5] * 28, 0.01, 3, 10, 0.95) == -math.inf
    assert best_expected([0.5] * 30, 0.01, 3, 10, 0.95) > 0.45


def test_the_end_of_a_job_is_decided_without_a_comparison_and_with_figures() -> None:
    spec = job_spec(max_trials=60)
    history, instruction = drive(spec, SyntheticWorld(default_s=0.11, noise=0.01))
    assert isinstance(instruction, Finish) and len(history.rounds) == 8
    decision = instruction.decision
    assert decision.strategy_id == CURRENT_SETUP and decision.comparison is None
    assert not any(trial.request.role is Role.AB for trial in history.trials)
    assert decision.reason.startswith("nothing to win: the fastest of 32 strategies is ")
    assert (
        "slower than the current setup, and with 95% confidence 28 more trials" in decision.reason
    )
    assert "1.0% is the precision asked for; so the current setup stays" in decision.reason


@pytest.mark.parametrize("noise", [0.03, 0.1])
@pytest.mark.parametrize("draw", [lambda rng: 0.0, mostly(0.0, 0.0)])
def test_noise_that_hides_all_gains_ends_a_search(draw: Draw, noise: float) -> None:
    needed = provable_gain(noise, job_spec(ab_pairs=20))
    ended = share_stopped(draw, noise, needed=needed)
    assert ended >= 0.4 and ended > 1.2 * share_stopped(draw, noise, needed=PRECISION)


@pytest.mark.parametrize("noise", [0.005, 0.02])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_noise_that_hides_no_gain_ends_no_search(share: float, noise: float) -> None:
    needed = provable_gain(noise, job_spec(ab_pairs=20))
    assert share_stopped(mostly(-0.05, share), noise, needed=needed) <= 0.05 + TOLERANCE


def noisy_machine(seed: int, noise: float) -> Callable[[int], float]:
    return lambda number: math.exp(generator(seed, "machine", number).normal(0, noise))


def test_a_noisy_job_ends_early_with_the_comparison_that_could_prove_no_more() -> None:
    spec = job_spec(max_trials=1000, ab_pairs=10, reference_every=2)
    reasons = []
    for seed in range(10):
        slow = generator(seed, "slow").normal(0.02, 0.005, 32)
        world = SyntheticWorld(
            {number: 0.1 * (1 + float(share)) for number, share in enumerate(slow)},
            factor=noisy_machine(seed, 0.03),
        )
        _history, instruction = drive(spec, world)
        assert isinstance(instruction, Finish)
        reasons.append(instruction.decision.reason)
    early = [reason for reason in reasons if "; the search ended early with nothing to" in reason]
    assert len(early) >= 5
    assert all("a closing comparison of 10 pairs proves" in reason for reason in early)
