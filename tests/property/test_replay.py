"""The compiled replay against its twin on random graphs."""

from __future__ import annotations

import pytest
from dfg_twin import Twin, graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples

from autotune.dfg.graph import NONE, Dfg
from autotune.dfg.replay import replay

MANY = settings(max_examples=examples(300), deadline=None)


@MANY
@given(st.one_of(graphs(), graphs(plain=True)))
def test_every_op_runs_as_in_the_twin(dfg: Dfg) -> None:
    twin = Twin(dfg)
    twin.run()
    timeline = replay(dfg)
    every = range(dfg.ops)
    assert timeline.start_s.tolist() == [twin.start[op] for op in every]
    assert timeline.end_s.tolist() == [twin.end[op] for op in every]
    assert timeline.cause.tolist() == [twin.cause.get(op, NONE) for op in every]


@MANY
@given(graphs(shared=True))
def test_ops_of_a_shared_queue_are_served_evenly(dfg: Dfg) -> None:
    """Up to rounding: the twin counts down what each op still needs."""
    twin = Twin(dfg)
    twin.run()
    timeline = replay(dfg)
    every = range(dfg.ops)
    assert timeline.start_s == pytest.approx([twin.start[op] for op in every])
    assert timeline.end_s == pytest.approx([twin.end[op] for op in every])
    assert timeline.cause.tolist() == [twin.cause.get(op, NONE) for op in every]
