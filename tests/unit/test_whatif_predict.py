"""What-ifs are registered by name, combined, and predicted with an interval."""

from __future__ import annotations

from dataclasses import replace

import pytest
from periodic_training import training

from autotune.errors import InvalidInput
from autotune.plugins import UnknownName
from autotune.whatif.answers.predict import predict
from autotune.whatif.base import Base
from autotune.whatif.primitives import scale, select
from autotune.whatif.question import Factor, Question
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.registry import WHAT_IFS, WhatIf, combined, what_if

HALF = Factor(0.5, 0.4, 0.8, "invented")


def faster(base: Base, question: Question) -> Base:
    """All kernels."""
    return scale(base, base.on_device, HALF.at(question.reading))


def less_host(base: Base, question: Question) -> Base:
    """All ops of the host."""
    return scale(base, ~base.on_device, 0.0)


FASTER = WhatIf("faster", "faster kernels", "invented", "-", faster)
LESS_HOST = WhatIf("less_host", "less host", "invented", "-", less_host)


def test_a_prediction_has_the_interval_of_its_amounts() -> None:
    base = recorded_base(training(5, 400), 0)
    found = predict(base, [FASTER], Question())
    assert found.speedup == pytest.approx(2, rel=0.01)
    assert found.speedup_low == pytest.approx(1.25, rel=0.01)
    assert found.speedup_high == pytest.approx(2.5, rel=0.01)
    assert found.after_s == pytest.approx(600e-6, rel=0.01)


def test_waits_without_a_cause_stay_or_vanish() -> None:
    base = recorded_base(training(5, 100, late_us=100.0), 0)
    assert base.unknown_s > 0
    sure = replace(FASTER, change=lambda base, question: scale(base, base.on_device, 0.5))
    found = predict(base, [sure], Question())
    assert found.speedup == found.speedup_low < found.speedup_high == pytest.approx(2, rel=0.02)


def test_what_ifs_combine_in_order() -> None:
    base = recorded_base(training(300, 400), 0)
    names = {"faster": FASTER, "less_host": LESS_HOST}
    both = predict(base, combined("faster+less_host", names), Question())
    assert both.after_s < predict(base, [FASTER], Question()).after_s
    with pytest.raises(UnknownName, match="there is no what-if 'nothing'"):
        combined("nothing")


def test_users_register_functions_with_a_docstring() -> None:
    with WHAT_IFS.separate():
        register = what_if("mine", title="mine", source="ours", enact="mine()")
        register(faster)
        assert WHAT_IFS["mine"].assumptions == "All kernels."
        with pytest.raises(InvalidInput, match="already registered"):
            register(faster)
        with pytest.raises(InvalidInput, match="needs a docstring"):
            what_if("other", title="", source="", enact="")(lambda base, question: base)
        with pytest.raises(InvalidInput, match=r"without '\+'"):
            what_if("a+b", title="", source="", enact="")(faster)
    assert "mine" not in WHAT_IFS


def test_selections_and_factors_are_checked() -> None:
    base = recorded_base(training(5, 100), 0)
    assert select(base, on_device=True).sum() == 3
    with pytest.raises(InvalidInput, match="optimistic <= expected <= pessimistic"):
        Factor(0.5, 0.6, 0.7, "invented")
    for missing in (Question().known_cluster, Question().known_gradients):
        with pytest.raises(InvalidInput, match="a distributed what-if needs"):
            missing()
