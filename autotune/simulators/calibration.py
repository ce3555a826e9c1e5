"""Calibrate the replay's constants on a job's own trials, by maximum a posteriori.

A correction by features of a wrong timeline cannot find what is wrong. So the few constants that
cause the timeline are fitted, and the process of `gaussian_process` corrects what is left.

| symbol | meaning | shape | unit |
|---|---|---|---|
| n, F | trials, factors (`constants`) | - | - |
| x | logarithms of the factors; their priors are Student's t around 0 | (F,) | 1 |
| r | ln(measured / replayed with x) | (n,) | 1 |
| J | -dr / dx | (n, F) | 1 |
| K | covariance of the misfit, which no constants explain; similar in similar steps | (n, n) | 1 |
| v | variance of each trial's noise, larger for outliers (Student's t) | (n,) | 1 |

x minimizes r' (K + diag v)^-1 r / 2 + the negative log priors of x and v, by Gauss-Newton steps.
J comes from forward differences and follows later steps by Broyden's update. Steps find a local
optimum, where the effect of one wrong link may be spread over other factors or links. So more
descents start with a single wrong link, with all links wrong by the same factor, or with other
limits.

The optimum explains the trials better than it predicts other plans, most of all among the fastest
ones. So replays use x times the weight that `combination` gives it.

Sources: Kennedy and O'Hagan, Bayesian calibration of computer models, 2001, eq. 5 (misfit); Nocedal
and Wright, Numerical Optimization, 2006, ch. 10.3 and 11.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from autotune.arrays import FloatArray
from autotune.features.extract import Extractor
from autotune.records import Constants
from autotune.simulators.combination import fitted_weight
from autotune.simulators.constants import (
    LIMIT_COST,
    LIMITS,
    LINKS,
    link_of,
    stated_costs,
    widths,
    with_constants,
)
from autotune.simulators.gaussian_process import Kernel
from autotune.strategy_space.plan import PlannedStrategy

MISFIT = Kernel(0.02, 0.05, 0.0, 0.03, (0.3, 1.6, 2.8, 0.3, 0.6))
"""Misfit and noise of replays with right constants: smaller than the kernel of corrections, since
constants explain a part of theirs."""
PRIOR_TAIL, NOISE_TAIL = 3.0, 4.0
"""Degrees of freedom of the priors and of the noise."""
STEP = 0.05
"""Step of the forward differences, in the logarithm. A smaller one would measure the jumps that a
replay makes when its critical path changes."""
MOST_STEPS = 10
"""Steps of one descent."""
LONGEST = 1.0
"""Largest change of a factor's logarithm in one step."""
STALE = 0.4
"""Change of a factor after which J is computed anew."""
GAIN = 1.0
"""A smaller gain of log probability is no progress."""
RESTARTS = 2
"""Descents after the first one."""
SLACK = 3.0
"""A restart may begin with a cost that is this much above the best."""
CLEAR = 0.1
"""A smaller change of a factor leaves J as it is, and a smaller one of a link is no restart."""
WRONG = 0.7
"""Logarithm of a link that is half or twice as fast as stated, with which a descent may start."""
NOISE_ROUNDS = 6
"""Updates of v for each x."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """The most probable constants, `fitted`, and their weight next to the stated ones.

    `sd`: standard deviations of the logarithms after the trials; of a host's link with the common
    factor of all links.
    """

    fitted: Constants = field(default_factory=Constants)
    sd: Mapping[str, float] = field(default_factory=dict)
    weight: float = 1.0

    @property
    def constants(self) -> Constants:
        """Return those to replay with. Limits, which have no half way, are the heavier side's."""
        logs = {name: self.weight * x for name, x in self.fitted.logs.items()}
        return Constants(logs, self.fitted.limits if self.weight >= 0.5 else {})


class OutOfTime(Exception):
    """The time for a calibration has passed."""


def calibrate(
    extractor: Extractor,
    trials: Sequence[PlannedStrategy],
    measured_s: FloatArray,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Calibration:
    """Fit the constants of `extractor` to trials with these step times, shape (n,).

    Raises `OutOfTime` once `out_of_time`, which is asked before each trial is replayed.
    """
    if not len(trials):
        return Calibration()
    fit = _Fit(extractor, trials, np.log(measured_s), out_of_time)
    stated = fit.point(np.zeros(len(fit.names)), {})
    wrong = [*fit.other_limits(stated), *fit.wrong_links(stated)]
    starts = [stated, min(wrong, key=_cost)]
    best = min((fit.descended(one) for one in starts if one.cost <= stated.cost), key=_cost)
    for _ in range(RESTARTS):
        start = min([*fit.other_limits(best), *fit.other_links(best)], key=_cost)
        if start.cost > best.cost + SLACK:
            break
        reached = fit.descended(start)
        if reached.cost >= best.cost:
            break
        best = reached
    return fit.calibration(best, stated)


@dataclass(frozen=True, eq=False)
class _Point:
    """`replayed` (n,): logarithms of the replayed times; `cost`: negative log probability.

    `slope`: J, where it is known.
    """

    x: FloatArray
    limits: Mapping[str, int]
    replayed: FloatArray
    cost: float
    slope: FloatArray | None = None


def _cost(point: _Point) -> float:
    return point.cost


class _Fit:
    """The trials of one calibration, with the covariance of their misfit."""

    def __init__(
        self,
        extractor: Extractor,
        trials: Sequence[PlannedStrategy],
        measured: FloatArray,
        out_of_time: Callable[[], bool],
    ) -> None:
        self._extractor, self._trials, self._measured = extractor, trials, measured
        self._out_of_time = out_of_time
        of_factor = widths(extractor)
        self.names = list(of_factor)
        self._widths = np.array(list(of_factor.values()))
        self._links = np.array([self.names.index(LINKS), *self._positions_of_links()])
        rows = np.array([_timeline_row(extractor, planned) for planned in self._in_time()])
        self._misfit: FloatArray = MISFIT.offset_sd**2 + MISFIT.shared_sd**2 * MISFIT.near(
            rows, rows
        )

    def _positions_of_links(self) -> list[int]:
        names = [link_of(host.name) for host in self._extractor.cluster.hosts]
        return [self.names.index(name) for name in names if name in self.names]

    def point(self, x: FloatArray, limits: Mapping[str, int]) -> _Point:
        """Replay the trials with these constants."""
        replayed = self._replayed(x, limits)
        cost = self._noise(self._measured - replayed)[1]
        cost += float(_student_cost(x, self._widths, PRIOR_TAIL).sum()) + LIMIT_COST * len(limits)
        return _Point(x, limits, replayed, cost)

    def other_limits(self, point: _Point) -> Iterator[_Point]:
        """Yield the point with each other value of each of `LIMITS`."""
        stated = stated_costs(self._extractor)
        for names, values in LIMITS:
            others = {name: value for name, value in point.limits.items() if name not in names}
            for value in values:
                changed = {name: value for name in names if stated[name] != value}
                if {**others, **changed} != point.limits:
                    yield self.point(point.x, {**others, **changed})

    def other_links(self, point: _Point) -> Iterator[_Point]:
        """Yield points in which one link, or all of them, cause what slow links explain."""
        of_host = point.x[self._links[0]] + point.x[self._links[1:]]
        if len(of_host) and np.abs(of_host).max() > CLEAR:
            cause = float(of_host[np.argmax(np.abs(of_host))])
            yield self._with_cause(point, int(self._links[0]), float(np.mean(of_host)))
            for factor in self._links.tolist():
                yield self._with_cause(point, factor, cause)

    def wrong_links(self, point: _Point) -> Iterator[_Point]:
        """Yield points in which one link, or all of them, are half or twice as fast."""
        for factor, cause in product(self._links.tolist(), (-WRONG, WRONG)):
            yield self._with_cause(point, factor, cause)

    def _with_cause(self, point: _Point, factor: int, cause: float) -> _Point:
        x = point.x.copy()
        x[self._links] = 0.0
        x[factor] = cause
        return self.point(x, point.limits)

    def descended(self, point: _Point) -> _Point:
        """Return where Gauss-Newton steps from this point end."""
        slope, moved = self._slope(point), 0.0
        for _ in range(MOST_STEPS):
            step = self._step(point, slope)
            reached, slope = self._shortened(point, step, slope)
            moved = max(moved, float(np.abs(reached.x - point.x).max()))
            progress, point = point.cost - reached.cost > GAIN, reached
            if not progress and moved < CLEAR:
                break
            if not progress or moved > STALE:
                slope, moved = self._slope(point), 0.0
        return replace(point, slope=slope)

    def calibration(self, point: _Point, stated: _Point) -> Calibration:
        """Return the result; its deviations are those of the normal distribution at the optimum."""
        assert point.slope is not None, "a descent ends with its slope"
        covariance = np.linalg.inv(self._information(point, point.slope)[0])
        prior = _student_weight(point.x, self._widths, PRIOR_TAIL)
        parameters = float(np.sum(1.0 - np.diag(covariance) * prior))
        together = np.eye(len(self.names))
        together[self._links[1:], self._links[0]] = 1.0
        sd = np.sqrt(np.diag(together @ covariance @ together.T))
        logs = dict(zip(self.names, point.x.tolist(), strict=True))
        of_factor = dict(zip(self.names, sd.tolist(), strict=True))
        of_stated, of_fitted = self._measured - stated.replayed, self._measured - point.replayed
        weight = fitted_weight(of_stated, of_fitted, parameters)
        return Calibration(Constants(logs, point.limits), of_factor, weight)

    def _replayed(self, x: FloatArray, limits: Mapping[str, int]) -> FloatArray:
        logs = dict(zip(self.names, x.tolist(), strict=True))
        steps = with_constants(self._extractor, Constants(logs, limits)).steps
        return np.log([steps.step_s(planned.plan) for planned in self._in_time()])

    def _in_time(self) -> Iterator[PlannedStrategy]:
        """Yield the trials; raise `OutOfTime` before the first one for which there is no time."""
        for planned in self._trials:
            if self._out_of_time():
                raise OutOfTime
            yield planned

    def _slope(self, point: _Point) -> FloatArray:
        """J by forward differences."""
        columns = []
        for number in range(len(point.x)):
            x = point.x.copy()
            x[number] += STEP
            columns.append((self._replayed(x, point.limits) - point.replayed) / STEP)
        return np.column_stack(columns)

    def _information(self, point: _Point, slope: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The curvature and the negative gradient of the cost."""
        residual = self._measured - point.replayed
        precision = self._noise(residual)[0]
        prior = _student_weight(point.x, self._widths, PRIOR_TAIL)
        curvature: FloatArray = slope.T @ precision @ slope + np.diag(prior)
        return curvature, slope.T @ (precision @ residual) - prior * point.x

    def _step(self, point: _Point, slope: FloatArray) -> FloatArray:
        """The Gauss-Newton step, at most `LONGEST`."""
        step = np.linalg.solve(*self._information(point, slope)).astype(np.float64)
        return step * min(1.0, LONGEST / max(float(np.abs(step).max()), 1e-12))

    def _shortened(
        self, point: _Point, step: FloatArray, slope: FloatArray
    ) -> tuple[_Point, FloatArray]:
        """Return the end of the step, or of a part of it that gains, and the updated slope."""
        for part in (1.0, 0.4, 0.15):
            change = part * step
            reached = self.point(point.x + change, point.limits)
            error = reached.replayed - point.replayed - slope @ change
            slope = slope + np.outer(error, change) / max(float(change @ change), 1e-12)
            if reached.cost < point.cost:
                return reached, slope
        return point, slope

    def _noise(self, residual: FloatArray) -> tuple[FloatArray, float]:
        """Return (K + diag v)^-1 with the most probable v, and the cost of the residuals."""
        noise = residual
        for _ in range(NOISE_ROUNDS):
            variance = 1 / _student_weight(noise, MISFIT.noise_sd, NOISE_TAIL)
            precision = np.linalg.inv(self._misfit + np.diag(variance)).astype(np.float64)
            weighted = precision @ residual
            noise = residual - self._misfit @ weighted
        cost = float(_student_cost(noise, MISFIT.noise_sd, NOISE_TAIL).sum())
        return precision, cost + 0.5 * float(weighted @ self._misfit @ weighted)


def _student_cost(x: FloatArray, width: FloatArray | float, tail: float) -> FloatArray:
    """Negative log density of Student's t, without constants."""
    cost: FloatArray = 0.5 * (tail + 1) * np.log1p((x / width) ** 2 / tail)
    return cost


def _student_weight(x: FloatArray, width: FloatArray | float, tail: float) -> FloatArray:
    """Precision of the normal distribution that touches Student's t at x."""
    weight: FloatArray = (tail + 1) / (tail * np.square(width) + x**2)
    return weight


def _timeline_row(extractor: Extractor, planned: PlannedStrategy) -> FloatArray:
    features = extractor.features(planned, with_shards=False)
    timeline = extractor.described(features, planned.plan).timeline
    assert timeline is not None, "described features have their timeline"
    return timeline.row
