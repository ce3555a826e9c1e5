"""Weigh the constants that trials fit against the stated ones.

Two forecasts err less together if each is weighted by the inverse of its mean squared error (Bates
and Granger, The combination of forecasts, 1969, without correlation). The trials to which constants
were fitted show less error than new ones would. Generalized cross-validation estimates the latter
(Golub, Heath and Wahba, 1979).
"""

from __future__ import annotations

import numpy as np

from autotune.arrays import FloatArray

OUTLIER = 2.5
"""Standard deviations beyond which a larger error counts no more (Leys and others, Detecting
outliers, 2013)."""
TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution around 0 over the median of its absolute values."""
EXACT = 1e-3
"""Error that counts as none, assumed: replays that both agree with the trials weigh the same."""


def fitted_weight(stated: FloatArray, fitted: FloatArray, parameters: float) -> float:
    """Return the weight of fitted constants, 0 to 1, next to stated ones.

    `stated`, `fitted`: ln(measured / replayed) of the same n trials, shape (n,); `parameters`:
    how many the fit has effectively, below n.
    """
    count = len(stated)
    optimism = (count / (count - parameters)) ** 2
    of_stated, of_fitted = _squared_error(stated), optimism * _squared_error(fitted)
    return of_stated / (of_stated + of_fitted)


def _squared_error(errors: FloatArray) -> float:
    """The mean squared error, in which outliers count as errors at the limit."""
    sizes = np.abs(errors)
    limit = OUTLIER * TO_DEVIATION * float(np.median(sizes))
    return float(np.mean(np.minimum(sizes, limit) ** 2)) + EXACT**2
