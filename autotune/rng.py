"""Explicit random generators: the same seed and labels give the same numbers in any process."""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, *labels: str | int) -> np.random.Generator:
    """An independent stream for `labels` under `seed`, whatever PYTHONHASHSEED is."""
    digest = hashlib.sha256(repr((seed, labels)).encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))
