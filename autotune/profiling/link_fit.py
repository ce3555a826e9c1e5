"""Fit of measured transfer times to the alpha-beta model.

| symbol | meaning | unit |
|---|---|---|
| s_i | size of probe i, shape (P,) | bytes |
| t_i | measured duration, shape (P,) | s |
| alpha | cost per message | s |
| beta | cost per byte | s/byte |

Model: t = alpha + beta s (Hockney's; Eq. 2 and 3 of the AutoSync supplement use the same two terms).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from autotune.errors import InvalidInput


def fit_alpha_beta(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """(alpha_s, beta_s_per_byte, relative_error), both costs >= 0.

    Minimizes sum_i ((alpha + beta s_i - t_i) / t_i)^2: the error relative to each duration, for otherwise
    the largest messages alone decide and alpha is noise.  `relative_error` is the median of
    |fitted - measured| / measured.  Raises `InvalidInput` for fewer than two sizes or durations <= 0.
    """
    s, t = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if s.ndim != 1 or s.shape != t.shape:
        raise InvalidInput(f"a link fit needs as many durations as sizes, but the shapes are {t.shape} and {s.shape}")
    if len(np.unique(s)) < 2:
        raise InvalidInput(f"a link fit needs at least two different sizes, but got {sorted(set(s.tolist()))}; probe more sizes")
    if not (np.isfinite(s).all() and np.isfinite(t).all() and (s >= 0).all() and (t > 0).all()):
        raise InvalidInput("a link fit needs finite sizes of at least 0 bytes and finite durations above 0 s")
    scale = float(s.max())  # both columns of the same magnitude, else the fit is badly conditioned
    design = np.stack([1.0 / t, s / (scale * t)], axis=1)
    (alpha_s, beta_scaled), _ = nnls(design, np.ones_like(t))
    fitted = alpha_s + beta_scaled * s / scale
    return float(alpha_s), float(beta_scaled / scale), float(np.median(np.abs(fitted - t) / t))
