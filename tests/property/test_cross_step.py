"""The period of a cross-step plan against an event-by-event twin, and its issue order against all
orders.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from known_examples import examples

from autotune.costs.issue_order import channel_ends_s, cross_step_period_s, planned_order
from autotune.costs.timing import needed_times_s
from autotune.features.compute_cost import overlap_step_s
from autotune.features.flat import FlatPlan
from autotune.workload import Variable, Workload

STEPS = 4


@st.composite
def schedules(draw: st.DrawFn) -> tuple[FlatPlan, np.ndarray, Workload]:
    """Up to 8 variables, some with measured times, in messages that stand in any order; a variable
    may be in several.
    """
    count = draw(st.integers(1, 8))
    times = st.floats(0, 1)
    forward_s, backward_s, update_s = draw(times), draw(times), draw(times)
    script_read_s = st.none() | st.floats(0, 1.5).map(lambda share: share * update_s)
    ready = sorted(draw(st.lists(st.floats(0, 1), min_size=count, max_size=count)))
    measured = draw(st.booleans())
    variables = tuple(
        Variable(
            f"v{i}",
            (3,),
            ready_s=r * backward_s,
            needed_s=forward_s * draw(times) if measured else None,
            script_read_s=draw(script_read_s),
        )
        for i, r in enumerate(ready)
    )
    slices = draw(
        st.permutations([*range(count), *draw(st.lists(st.integers(0, count - 1), max_size=4))])
    )
    sizes: list[int] = []
    while sum(sizes) < len(slices):
        sizes.append(draw(st.integers(1, len(slices) - sum(sizes))))
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    flat = FlatPlan(
        np.array(slices),
        np.repeat(np.arange(len(sizes)), sizes),
        np.full(len(slices), 3),
        np.zeros(len(slices), dtype=np.int64),
        first,
    )
    costs = np.array(draw(st.lists(times, min_size=len(sizes), max_size=len(sizes))))
    return flat, costs, Workload("m", variables, (), forward_s, backward_s, update_s)


def twin_period_s(flat: FlatPlan, cost_s: np.ndarray, workload: Workload) -> float:
    """A few steps, walked one event after the other: the time between the starts of the last two
    backward passes.
    """
    needed = needed_times_s(workload).tolist()
    reads = sorted(range(len(needed)), key=lambda position: needed[position])
    backward_at_s, starts_s = 0.0, []
    for _ in range(STEPS):
        starts_s.append(backward_at_s)
        channel_s, arrived_s = backward_at_s, [0.0] * len(needed)
        for number, cost in enumerate(cost_s.tolist()):
            members = [
                int(flat.variable[i])
                for i in range(len(flat.variable))
                if flat.message[i] == number
            ]
            for (
                member
            ) in members:  # the channel waits for the gradients, and what follows waits behind it
                channel_s = max(
                    channel_s, backward_at_s + (workload.variables[member].ready_s or 0.0)
                )
            channel_s += cost
            for member in members:
                arrived_s[member] = max(arrived_s[member], channel_s)
        now_s = backward_at_s + workload.backward_s
        computed_s = -workload.update_s  # the script may read before the forward pass
        for position in reads:
            now_s += needed[position] - computed_s
            computed_s = needed[position]
            now_s = max(now_s, arrived_s[position])
        backward_at_s = max(now_s + workload.forward_s - computed_s, channel_s)
    return backward_at_s - starts_s[-1]


@settings(max_examples=examples(150), deadline=None)
@given(schedules())
def test_the_period_equals_its_twin_event_by_event(
    case: tuple[FlatPlan, np.ndarray, Workload],
) -> None:
    flat, cost_s, workload = case
    assert np.isclose(
        overlap_step_s(flat, cost_s, workload, cross_step=True),
        twin_period_s(flat, cost_s, workload),
    )


@st.composite
def messages(
    draw: st.DrawFn, most: int = 6
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, float]:
    """ready, cost and needed of up to `most` messages, the start of the forward pass and its
    length.
    """
    count = draw(st.integers(1, most))
    shares = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0])
    ready, cost, needed = (
        np.array(draw(st.lists(shares, min_size=count, max_size=count))) for _ in range(3)
    )
    forward_s = draw(shares)
    return ready, cost, needed * forward_s, 1.0 + draw(shares), forward_s


@settings(max_examples=examples(150), deadline=None)
@given(messages())
def test_the_planned_order_is_as_good_as_the_best_of_all_orders(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, float, float],
) -> None:
    ready, cost, needed, start_s, forward_s = case
    order = planned_order(ready, cost, needed, start_s, forward_s)
    assert sorted(order.order) == list(range(len(ready)))
    periods = [
        cross_step_period_s(ready[list(o)], cost[list(o)], needed[list(o)], start_s, forward_s)
        for o in permutations(range(len(ready)))
    ]
    assert np.isclose(
        order.period_s,
        cross_step_period_s(
            ready[order.order], cost[order.order], needed[order.order], start_s, forward_s
        ),
    )
    assert order.bound_s <= min(periods) + 1e-9
    assert order.period_s <= min(periods) * 1.002


@settings(max_examples=examples(30), deadline=None)
@given(messages(most=60), st.integers(1, 20))
def test_more_tries_never_give_a_worse_order_and_periods_keep_within_their_bounds(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, float, float], nodes: int
) -> None:
    few, more = (planned_order(*case, nodes=tries) for tries in (nodes, 2 * nodes))
    ready, cost, needed, start_s, forward_s = case
    at = np.argsort(ready, kind="stable")
    natural_s = cross_step_period_s(ready[at], cost[at], needed[at], start_s, forward_s)
    least_s = max(start_s + forward_s, float(channel_ends_s(ready[at], cost[at])[-1]))
    assert (
        least_s - 1e-9 <= more.period_s <= few.period_s <= 2 * natural_s
    )  # Schrage's rule is within twice the optimum
    assert few.bound_s <= more.period_s + 1e-9
