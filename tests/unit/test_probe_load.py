"""The computation during a probe: its speed is measured, and no wait for it lasts forever."""

from __future__ import annotations

import time

import pytest
import torch

from autotune.errors import AutotuneError
from runtime_rewriter.probe.load import REST_S, Load

CPU = torch.device("cpu")


def test_the_time_of_a_product_is_the_mean_of_all_finished_products() -> None:
    with Load(CPU) as load:
        before, start_s = load.units, time.perf_counter()
        unit_s = load.unit_s()
        elapsed_s = time.perf_counter() - start_s
        assert unit_s >= REST_S / (load.units - before)
    assert unit_s <= elapsed_s


def test_a_wait_for_stuck_computation_raises_the_reason() -> None:
    class Stuck(Load):
        def _multiply(self, stream: torch.cuda.Stream | None) -> None:
            self._stop.wait()

    with (
        Stuck(CPU, unit_timeout_s=0.1) as load,
        pytest.raises(AutotuneError, match=r"finished nothing for \d+\.\d s on cpu"),
    ):
        load.unit_s()


def test_computation_that_ended_raises_instead_of_counting_as_slow() -> None:
    with Load(CPU) as load:
        pass
    with pytest.raises(AutotuneError, match="the computation during a probe must go on"):
        load.unit_s()
