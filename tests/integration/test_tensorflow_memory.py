"""The predicted peak memory of a TensorFlow step under plans that were not recorded."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

MOST_ERROR = 0.06


@pytest.mark.slow
def test_the_replay_predicts_the_allocated_memory_of_other_plans() -> None:
    from benchmarks.replay_accuracy.tensorflow_memory import cases, summary

    found = list(cases("transformer"))
    assert len({case.setting for case in found}) == 4
    assert min(case.measured_bytes for case in found) > 2**20
    assert summary(found)["memory_error_max_tensorflow"] < MOST_ERROR
