"""The Gaussian process over the replay's residuals, against the textbook's dense formulas."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.errors import InvalidInput
from autotune.rng import generator
from autotune.simulators.gaussian_process import (
    Experience,
    Kernel,
    Residuals,
    _negative_likelihood,
    learned_kernel,
)

KERNEL = Kernel(0.05, 0.1, 0.04, 0.01, (0.7, 1.3))
NOBODY = Residuals(np.zeros((0, 2)), np.zeros(0), np.zeros(0, dtype=np.int64))


def residuals(count: int, domains: int) -> Residuals:
    draw = generator(5, "residuals", count, domains)
    x = draw.normal(size=(count, 2))
    domain = draw.integers(domains, size=count)
    return Residuals(x, 0.1 * np.sin(x[:, 0]) + 0.02 * domain, domain)


def dense(kernel: Kernel, others: Residuals, own_x, own_r, x) -> tuple[np.ndarray, np.ndarray]:
    """Condition one joint normal distribution of all points, the job's domain being -1."""
    points = np.concatenate([others.x, own_x, x])
    domains = np.concatenate([others.domain, np.full(len(own_x) + len(x), -1)])
    scaled = points / np.array(kernel.lengths)
    near = np.exp(-0.5 * ((scaled[:, None] - scaled[None]) ** 2).sum(axis=2))
    same = domains[:, None] == domains[None]
    own = kernel.offset_sd**2 + kernel.own_sd**2 * near
    covariance = kernel.shared_sd**2 * near + same * own
    seen = len(others.r) + len(own_r)
    inverse = np.linalg.inv(covariance[:seen, :seen] + kernel.noise_sd**2 * np.eye(seen))
    cross = covariance[:seen, seen:]
    mean = cross.T @ inverse @ np.concatenate([others.r, own_r])
    return mean, np.sqrt(np.diag(covariance[seen:, seen:] - cross.T @ inverse @ cross))


@pytest.mark.parametrize(("others", "own"), [(30, 6), (30, 0), (0, 6)])
def test_the_correction_is_the_conditional_distribution(others: int, own: int):
    known = residuals(others, 3) if others else NOBODY
    mine, x = residuals(own, 1) if own else NOBODY, residuals(5, 1).x
    correction = Experience(KERNEL, known).correct(x, mine.x, mine.r)
    mean, sd = dense(KERNEL, known, mine.x, mine.r, x)
    np.testing.assert_allclose(correction.mean, mean, atol=1e-10)
    np.testing.assert_allclose(correction.sd, sd, atol=1e-8)


def test_own_trials_make_the_prediction_more_certain():
    known, mine = residuals(30, 3), residuals(12, 1)
    before = Experience(KERNEL, known).correct(mine.x, mine.x[:0], mine.r[:0])
    after = Experience(KERNEL, known).correct(mine.x, mine.x, mine.r)
    assert (after.sd < 0.5 * before.sd).all()


def test_the_gradient_is_that_of_the_likelihood():
    part = residuals(20, 2)
    squared = (part.x.T[:, :, None] - part.x.T[:, None, :]) ** 2
    logs = np.log([0.05, 0.1, 0.04, 0.02, 0.8, 1.5])
    gradient = _negative_likelihood(logs, part, squared)[1]
    for place in range(len(logs)):
        step = np.zeros(len(logs))
        step[place] = 1e-5
        after, before = (
            _negative_likelihood(logs + side * step, part, squared)[0] for side in (1, -1)
        )
        assert gradient[place] == pytest.approx((after - before) / 2e-5, rel=1e-4, abs=1e-4)


def test_the_kernel_is_learned_from_the_trials():
    draw = generator(1, "learned")
    x = draw.normal(size=(120, 2))
    domain = np.repeat(np.arange(3), 40)
    r = (
        0.2 * np.sin(2 * x[:, 0])
        + np.array([-0.3, 0.0, 0.3])[domain]
        + 0.02 * draw.normal(size=120)
    )
    kernel = learned_kernel(Residuals(x, r, domain), draw)
    assert kernel.noise_sd == pytest.approx(0.02, rel=0.3)
    assert kernel.offset_sd > 0.1
    assert kernel.lengths[0] < kernel.lengths[1] / 3  # the second feature says nothing
    assert min(kernel.lengths) > 0.9 * x.std(axis=0).min()


def test_shapes_and_deviations_are_checked():
    with pytest.raises(InvalidInput, match="a row of features, a value and a domain"):
        Residuals(np.zeros((2, 2)), np.zeros(3), np.zeros(2, dtype=np.int64))
    with pytest.raises(InvalidInput, match="noise of at least"):
        Kernel(0.1, 0.1, 0.1, 0.0, (1.0,))
    with pytest.raises(InvalidInput, match="2 trials or more"):
        learned_kernel(NOBODY, generator(0, "none"))
