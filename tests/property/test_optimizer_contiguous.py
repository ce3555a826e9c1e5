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
        end = max(end, max(ready[:behind])) + float(cost_s(np.array([sum(sizes[first:behind])]))[0])
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
    found = best_cuts(np.array(ready), np.array(sizes), np.array(alone), cost_s)
    everything = []
    for choice in product((False, True), repeat=len(ready) - 1):
        cuts = [0, *(at + 1 for at, cut in enumerate(choice) if cut)]
        bounds = {*cuts, len(ready)}
        if all(not own or {at, at + 1} <= bounds for at, own in enumerate(alone)):
            everything.append((end_of(cuts, ready, sizes), cuts))
    assert found in [cuts for _, cuts in everything]
    assert end_of(found, ready, sizes) <= min(everything)[0] * (1 + 1e-8)


def test_variables_of_one_group_share_a_message_and_dtypes_do_not() -> None:
    kinds = ("float32", "float32", "float16", "float32", "float32")
    workload = Workload(
        "m", tuple(Variable(f"v{i}", (8,), dtype) for i, dtype in enumerate(kinds)), (), 1.0, 500.0
    )
    strategy = contiguous_strategy(
        workload, [[0, 1], [2], [3], [4]], Shard(Synchronizer.ALL_REDUCE), lambda sizes: sizes * 1.0
    )
    messages = [
        sorted(part.variable for part in message.slices)
        for message in plan(strategy, workload, 2).messages
    ]
    assert sorted(messages) == [
        ["v0", "v1"],
        ["v2"],
        ["v3"],
        ["v4"],
    ]  # each is sent before the next is ready
