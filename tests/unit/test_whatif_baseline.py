"""Ranks without a base are counted, and only those of one step are expected."""

from __future__ import annotations

from dataclasses import replace

from periodic_training import training

from autotune.errors import InvalidInput
from benchmarks.whatif_baseline import Refused, status_of


def test_only_a_rank_of_less_than_two_consecutive_steps_may_be_refused(capsys) -> None:
    trace = training(host_us=100, kernel_us=1).ranks[0]
    error = InvalidInput("a what-if needs the device's work")
    whole = Refused.of("whole", trace, error)
    short = Refused.of("short", replace(trace, steps=trace.steps[:1]), error)
    apart = Refused.of("apart", replace(trace, steps=trace.steps[::2]), error)
    assert (whole.too_short, short.too_short, apart.too_short) == (False, True, True)
    assert [status_of(each) for each in ([], [short, apart], [short, whole])] == [0, 0, 1]
    assert capsys.readouterr().err.splitlines()[0] == "whole: a what-if needs the device's work"
