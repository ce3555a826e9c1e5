"""The best cuts of a chain of messages against all ways of cutting it."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autotune.optimizer.contiguous import best_cuts, contiguous_strategy
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Shard, Synchronizer
from autotune.workload import Variable, Workload

LATENCY_S, BYTES_PER_S = 2.0, 4.0


def cost_s(sizes: np.ndarray) -> np.ndarray:
    """Not subadditive: large messages cost more per byte."""
    return LATENCY_S + sizes / BYTES_PER_S + 0.5 * np.maximum(sizes - 20.0, 0.0)


def end_of(cuts: list[int], ready: list[float], sizes: list[float]) -> float:
    end = 0.0
    for first, behind in zip(cuts, [*cuts[1:], len(ready)], strict=True):
        (message_s,) = cost_s(np.array([sum(sizes[first:behind])])).tolist()
        end = max(end, *ready[:behind]) + message_s
    return end


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[float], list[float], list[bool]]:
    count = draw(st.integers(1, 7))
    numbers = st.integers(0, 20).map(float)
    times, sizes = (draw(st.lists(numbers, min_size=count, max_size=count)) for _ in range(2))
    return sorted(times), sizes, draw(st.lists(st.booleans(), min_size=count, max_size=count))


@given(chains())
def test_no_other_cuts_end_earlier(chain: tuple[list[float], list[float], list[bool]]) -> None:
    ready, sizes, alone = chain
    best = best_cuts(np.array(ready), np.array(sizes), np.array(alone), cost_s)
    end_s = {}
    for choice in product((False, True), repeat=len(ready) - 1):
        cuts = [0, *(at + 1 for at, cut in enumerate(choice) if cut)]
        if all({at, at + 1} <= {*cuts, len(ready)} for at, apart in enumerate(alone) if apart):
            end_s[tuple(cuts)] = end_of(cuts, ready, sizes)
    assert end_s[tuple(best)] <= min(end_s.values()) * (1 + 1e-8)


def test_variables_of_one_group_share_a_message_and_dtypes_do_not() -> None:
    """Each of the last four is sent before the next is ready."""
    kinds = ("float32", "float32", "float16", "float32", "float32")
    variables = tuple(Variable(f"v{i}", (8,), dtype) for i, dtype in enumerate(kinds))
    workload = Workload("m", variables, (), 1.0, 500.0)
    groups, shard = [[0, 1], [2], [3], [4]], Shard(Synchronizer.ALL_REDUCE)
    strategy = contiguous_strategy(workload, groups, shard, lambda sizes: sizes * 1.0)
    messages = plan(strategy, workload, 2).messages
    sent = [sorted(part.variable for part in message.slices) for message in messages]
    assert sorted(sent) == [["v0", "v1"], ["v2"], ["v3"], ["v4"]]
