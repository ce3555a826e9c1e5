"""The traces of a step that are kept while a search tries many plans."""

from __future__ import annotations

import gc
from dataclasses import replace
from weakref import ref

from autotune.strategy_space.builders.collectives import per_variable
from autotune.strategy_space.plan import Plan, plan
from autotune.workload import Variable, Workload
from runtime_rewriter.mirrored.kept_traces import MOST_PLANS, KeptTraces


class Trace:
    """Stands for a graph."""


def orders(count: int) -> list[Plan]:
    """Plans whose messages have different orders."""
    workload = Workload("model", tuple(Variable(f"v{n}", (2,)) for n in range(count)))
    apart = plan(per_variable(workload), workload, 2)
    messages = apart.messages
    return [replace(apart, messages=messages[n:] + messages[:n]) for n in range(count)]


def test_only_the_traces_of_the_last_plans_and_of_the_current_setup_stay() -> None:
    plans = orders(2 * MOST_PLANS)
    assert len({one.id for one in plans}) == len(plans)
    traces = KeptTraces()
    current = traces.get(None, "plain", Trace)
    alive = [ref(traces.get(one, kind, Trace)) for one in plans for kind in ("gated", "plain")]
    gc.collect()
    kept = [one() is not None for one in alive]
    assert kept == [False] * (2 * MOST_PLANS) + [True] * (2 * MOST_PLANS)
    assert traces.get(None, "plain", Trace) is current


def test_a_plan_that_is_used_again_keeps_its_trace() -> None:
    plans = orders(2 * MOST_PLANS)
    traces = KeptTraces()
    first = Trace()
    traces.put(plans[0], "plain", first)
    for other in plans[1:]:
        traces.get(other, "plain", Trace)
        assert traces.get(plans[0], "plain", Trace) is first
    assert traces.get(plans[0], "gated", Trace) is not first
