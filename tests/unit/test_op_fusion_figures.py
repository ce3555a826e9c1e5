"""A case of the fusion benchmark is compared with the faster unfused side."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.op_fusion.figures import Figures, figures_of, line_of
from benchmarks.op_fusion.sides import APART, FUSED, GRAPPLER, SideTimes

SETS = [SimpleNamespace(ops=("a", "b"))]


def times(apart_s: float, grappler_s: float, fused_s: float, exact: bool = True) -> SideTimes:
    taken_s = {APART: apart_s, GRAPPLER: grappler_s, FUSED: fused_s}
    return SideTimes({side: (one_s,) * 3 for side, one_s in taken_s.items()}, exact)


def figures(paying: list[SimpleNamespace], together: SideTimes | None) -> Figures:
    return figures_of("GELU", 4096, SETS, times(4.0, 2.0, 1.0), paying, together)


def test_the_rival_is_the_faster_unfused_side() -> None:
    figure = figures(SETS, times(4.0, 3.0, 1.0))
    assert figure.rival == GRAPPLER and set(figure.ratios) == {2.0}
    assert figure.chosen_ratio == 3.0 and figure.exact
    assert times(1.0, 2.0, 1.0).rival == APART


def test_a_case_without_a_paying_set_counts_as_the_ops_in_the_session_of_the_ranks() -> None:
    figure = figures([], None)
    assert figure.chosen_ratio == 0.5
    assert figure.exact and not figure.uncompiled


def test_sets_that_do_not_compile_together_are_counted_and_not_exact() -> None:
    figure = figures(SETS, None)
    assert figure.uncompiled and not figure.exact
    assert figure.chosen_ratio == 0.5
    assert "DO NOT COMPILE TOGETHER" in line_of(figure)


def test_other_clusters_of_the_paying_sets_are_not_exact() -> None:
    figure = figures(SETS, times(4.0, 3.0, 1.0, exact=False))
    assert not figure.exact and not figure.uncompiled
    assert "OTHER CLUSTERS" in line_of(figure)
