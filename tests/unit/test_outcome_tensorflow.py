"""TensorFlow's MultiWorkerMirroredStrategy as a rival of the outcome benchmark: the ratios."""

from __future__ import annotations

import pytest

from benchmarks.outcome.tensorflow import (
    DEFAULT,
    OURS_BESIDE,
    SWEPT,
    MirroredRivals,
    MirroredSide,
    ratios_of,
    tensorflow_keys,
)

ROUNDS = 6


def side(name: str, size: int | None, step_s: float) -> MirroredSide:
    return MirroredSide(name, size, ((step_s, step_s),) * ROUNDS)


def test_the_best_size_of_the_sweep_is_compared_with_ours_of_the_same_rounds() -> None:
    sides = (side(DEFAULT, 0, 0.3), side(SWEPT, 2**20, 0.24), side(OURS_BESIDE, None, 0.2))
    found = ratios_of(MirroredRivals("vgg.x", sides))
    assert found.bytes_per_pack == 2**20
    assert (found.best, found.default) == pytest.approx((1.2, 1.5))
    assert found.low <= found.best <= found.high
    slower = (side(DEFAULT, 0, 0.23), *sides[1:])
    assert ratios_of(MirroredRivals("vgg.x", slower)).best == pytest.approx(1.15)
    keys = tensorflow_keys([found, found])
    assert keys["ratio_geomean_to_tensorflow"] == pytest.approx(1.2)
    assert keys["ratio_min_to_tensorflow"] == pytest.approx(1.2)
    assert keys["ratio_geomean_to_tensorflow_default"] == pytest.approx(1.5)
    assert tensorflow_keys([]) == {}
