"""Randomness comes from explicit generators: same seed and labels, same numbers in any process."""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, *labels: str | int) -> np.random.Generator:
    """An independent stream for `labels` under `seed` (PYTHONHASHSEED plays no part)."""
    digest = hashlib.sha256(repr((seed, labels)).encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))
