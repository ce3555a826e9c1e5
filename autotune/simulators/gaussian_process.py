"""A Gaussian process that corrects the replay by trials of other domains and of the job itself.

A trial's residual r = ln(measured / replayed) is a sum of independent parts:

    r = offset of the domain + shared(x) + own(x) + noise

`shared` is one function of all domains, `own` another one of each domain, both of the features of
the replayed step. Residuals of other domains teach `shared`; a job's own trials teach all parts.

| symbol | meaning | shape | unit |
|---|---|---|---|
| n | trials of other domains | - | - |
| k, m | own trials, strategies to predict | - | - |
| F | features (`autotune.features.timeline`) | - | - |
| x | features of a replayed step | (F,) | - |
| r | residual, ln(measured / replayed) | - | 1 |
| R | exp(-|x - x'|^2 / 2), with x divided by the lengths | - | 1 |

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, ch. 2 and 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.errors import InvalidInput

SMALLEST_NOISE = 1e-3
"""Least standard deviation of the noise: keeps the matrices invertible."""
HELD_PER_DOMAIN = 40
"""Most trials of a domain from which the kernel is learned; its cost grows with their cube."""


@dataclass(frozen=True)
class Kernel:
    """Standard deviations of the parts of a residual, and a length of each feature, (F,)."""

    offset_sd: float
    shared_sd: float
    own_sd: float
    noise_sd: float
    lengths: tuple[float, ...]

    def __post_init__(self) -> None:
        deviations = (self.offset_sd, self.shared_sd, self.own_sd)
        if min(deviations) < 0 or self.noise_sd < SMALLEST_NOISE or min(self.lengths) <= 0:
            raise InvalidInput(
                f"a kernel needs deviations of at least 0, noise of at least {SMALLEST_NOISE} and "
                f"lengths above 0, but has {deviations}, {self.noise_sd} and {self.lengths}"
            )

    def near(self, a: FloatArray, b: FloatArray) -> FloatArray:
        """R of every pair of rows, shape (len(a), len(b))."""
        scaled_a, scaled_b = a / np.array(self.lengths), b / np.array(self.lengths)
        squared = (
            (scaled_a**2).sum(axis=1)[:, None]
            + (scaled_b**2).sum(axis=1)[None, :]
            - 2 * scaled_a @ scaled_b.T
        )
        nearness: FloatArray = np.exp(-0.5 * np.maximum(squared, 0.0))
        return nearness


@dataclass(frozen=True, eq=False)
class Residuals:
    """Residuals of trials. `x` (n, F), `r` (n,), `domain` (n,): numbers of domains."""

    x: FloatArray
    r: FloatArray
    domain: IntArray

    def __post_init__(self) -> None:
        count = self.x.shape[:1]
        if self.x.ndim != 2 or self.r.shape != count or self.domain.shape != count:
            raise InvalidInput(
                "residuals need a row of features, a value and a domain for each trial, but have "
                f"shapes {self.x.shape}, {self.r.shape} and {self.domain.shape}"
            )

    @cached_property
    def same(self) -> FloatArray:
        """1 for two trials of one domain, shape (n, n)."""
        return np.equal(self.domain[:, None], self.domain[None, :]).astype(np.float64)


@dataclass(frozen=True, eq=False)
class Correction:
    """ln(step time / replayed step) of strategies: `mean` and `sd`, shape (m,), without noise."""

    mean: FloatArray
    sd: FloatArray


class Experience:
    """What trials of other domains teach about the replay; computed once for many corrections."""

    def __init__(self, kernel: Kernel, others: Residuals) -> None:
        from scipy.linalg import cholesky

        self.kernel = kernel
        self._others = others
        count = len(others.r)
        covariance = _covariance(kernel, others) + kernel.noise_sd**2 * np.eye(count)
        self._factor = cholesky(covariance, lower=True) if count else covariance
        self._white = self._whitened(others.r[:, None])[:, 0]

    @property
    def trials(self) -> int:
        """Trials of other domains, n."""
        return len(self._others.r)

    def correct(self, x: FloatArray, own_x: FloatArray, own_r: FloatArray) -> Correction:
        """Predict at `x` (m, F) after own trials at `own_x` (k, F) with residuals `own_r` (k,).

        Without own trials only `shared` and the uncertainty of the other parts are known.
        """
        from scipy.linalg import cho_solve, cholesky

        kernel = self.kernel
        at_own, at_x = self._shared_at(own_x), self._shared_at(x)
        left = own_r - at_own.T @ self._white
        covariance = kernel.shared_sd**2 * kernel.near(own_x, own_x) - at_own.T @ at_own
        covariance += _own_covariance(kernel, own_x, own_x)
        covariance += kernel.noise_sd**2 * np.eye(len(own_r))
        cross = kernel.shared_sd**2 * kernel.near(own_x, x) - at_own.T @ at_x
        cross += _own_covariance(kernel, own_x, x)
        variance = kernel.shared_sd**2 - (at_x**2).sum(axis=0)
        variance += kernel.offset_sd**2 + kernel.own_sd**2
        mean = at_x.T @ self._white
        if len(own_r):
            factor = cholesky(covariance, lower=True)
            weights = cho_solve((factor, True), cross)
            mean = mean + weights.T @ left
            variance = variance - (weights * cross).sum(axis=0)
        return Correction(mean, np.sqrt(np.maximum(variance, 0.0)))

    def _shared_at(self, x: FloatArray) -> FloatArray:
        """The whitened covariance of `shared` at x with the other domains' trials, (n, m)."""
        if not len(self._others.r):
            return np.zeros((0, len(x)))
        kernel = self.kernel
        return self._whitened(kernel.shared_sd**2 * kernel.near(self._others.x, x))

    def _whitened(self, columns: FloatArray) -> FloatArray:
        from scipy.linalg import solve_triangular

        if not len(columns):
            return columns
        whitened: FloatArray = solve_triangular(self._factor, columns, lower=True)
        return whitened


def _own_covariance(kernel: Kernel, a: FloatArray, b: FloatArray) -> FloatArray:
    covariance: FloatArray = kernel.offset_sd**2 + kernel.own_sd**2 * kernel.near(a, b)
    return covariance


def _covariance(kernel: Kernel, of: Residuals) -> FloatArray:
    """Covariance of the residuals without noise, shape (n, n)."""
    near = kernel.near(of.x, of.x)
    within_domain = kernel.offset_sd**2 + kernel.own_sd**2 * near
    covariance: FloatArray = kernel.shared_sd**2 * near + of.same * within_domain
    return covariance


def learned_kernel(trials: Residuals, draw: np.random.Generator) -> Kernel:
    """Maximise the marginal likelihood (eq. 5.9) of at most `HELD_PER_DOMAIN` trials per domain.

    No length is below the spread of its feature: shorter ones fit the trials at hand and no others.
    Raises `InvalidInput` below two trials.
    """
    from scipy.optimize import minimize

    if len(trials.r) < 2:
        raise InvalidInput(f"a kernel is learned from 2 trials or more, not from {len(trials.r)}")
    held = np.concatenate(
        [
            draw.permutation(np.flatnonzero(trials.domain == number))[:HELD_PER_DOMAIN]
            for number in np.unique(trials.domain)
        ]
    )
    part = Residuals(trials.x[held], trials.r[held], trials.domain[held])
    spread = np.maximum(part.x.std(axis=0), 1e-3)
    squared = (part.x.T[:, :, None] - part.x.T[:, None, :]) ** 2  # (F, n, n)
    start = np.log([0.05, 0.05, 0.05, 0.02, *spread])
    bounds = [(math.log(1e-3), math.log(2.0))] * 4
    bounds += [(math.log(size), math.log(30 * size)) for size in spread]
    fitted = minimize(
        _negative_likelihood, start, (part, squared), "L-BFGS-B", jac=True, bounds=bounds
    )
    offset_sd, shared_sd, own_sd, noise_sd, *lengths = np.exp(fitted.x).tolist()
    return Kernel(offset_sd, shared_sd, own_sd, max(noise_sd, SMALLEST_NOISE), tuple(lengths))


def _negative_likelihood(
    logs: FloatArray, of: Residuals, squared: FloatArray
) -> tuple[float, FloatArray]:
    """The negative log likelihood and its gradient (eq. 5.9) by the logarithms of the kernel."""
    from scipy.linalg import cho_solve, cholesky

    offset, shared, own, noise = np.exp(2 * logs[:4])
    weights = np.exp(-2 * logs[4:])
    near = np.exp(-0.5 * np.tensordot(weights, squared, axes=1))
    smooth = (shared + own * of.same) * near
    identity = np.eye(len(of.r))
    factor = cholesky(smooth + offset * of.same + noise * identity, lower=True)
    inverse = cho_solve((factor, True), identity)
    solved = inverse @ of.r
    value = 0.5 * float(of.r @ solved) + float(np.log(np.diag(factor)).sum())
    slope = 0.5 * (inverse - np.outer(solved, solved))
    parts = [offset * of.same, shared * near, own * of.same * near, noise * identity]
    gradient = [2 * float((slope * part).sum()) for part in parts]
    sloped = slope * smooth
    gradient += (weights * np.tensordot(squared, sloped, axes=2)).tolist()
    return value, np.array(gradient)
