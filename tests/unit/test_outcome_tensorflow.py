"""TensorFlow's MultiWorkerMirroredStrategy as a rival of the outcome benchmark: the ratios."""

from __future__ import annotations

import pytest

from autotune.records import Measured
from benchmarks.outcome.tensorflow import (
    DEFAULT,
    SWEEP,
    MirroredRivals,
    MirroredSide,
    ratios_of,
    tensorflow_keys,
)

ROUNDS = 6


def side(name: str, step_s: float) -> MirroredSide:
    return MirroredSide(name, SWEEP.get(name, 0), ((step_s, step_s),) * ROUNDS)


def test_the_best_size_of_the_sweep_is_compared_with_ours() -> None:
    best, *others = SWEEP
    sides = (side(DEFAULT, 0.3), side(best, 0.24), *(side(name, 0.26) for name in others))
    ours = [Measured(step_s=((0.2, 0.2),))] * ROUNDS
    found = ratios_of(MirroredRivals("vgg.x", sides), ours)
    assert found.rival == best
    assert (found.best, found.default) == pytest.approx((1.2, 1.5))
    assert found.low <= found.best <= found.high
    keys = tensorflow_keys([found, found])
    assert keys["ratio_geomean_to_tensorflow"] == pytest.approx(1.2)
    assert keys["ratio_min_to_tensorflow"] == pytest.approx(1.2)
    assert keys["ratio_geomean_to_tensorflow_default"] == pytest.approx(1.5)
    assert tensorflow_keys([]) == {}
