"""A search keeps its seconds for any number of variables, by a clock that counts its looks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, pairwise

import pytest
from small_worlds import cluster

from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.budget import Budget, Deadline, TimeUp
from autotune.optimizer.edits import merged
from autotune.optimizer.optimize import optimize
from autotune.optimizer.state import Problem, State
from autotune.optimizer.suggest import suggestions
from autotune.strategy_space.builders.collectives import per_variable
from autotune.strategy_space.space import SearchSpace
from autotune.workload import Variable, Workload

HOSTS = cluster(100, 100, 100, 100)
SLACK = 40
"""Looks after the deadline: each loop that the deadline ends looks once more, and so do the result
and its replay."""


def blocks(variables: int) -> Workload:
    """Blocks of a small matrix and a vector, as a transformer has them."""
    shapes = [((64, 64), "weight"), ((64,), "bias")]
    listed = tuple(
        Variable(f"b{n // 2}.{name}", shape, ready_s=n * 1e-5, needed_s=(variables - n) * 1e-5)
        for n in range(variables)
        for shape, name in [shapes[n % 2]]
    )
    return Workload("blocks", listed, (), variables * 1e-5, variables * 1e-5, 0.0)


def counting() -> tuple[Callable[[], float], Callable[[], int]]:
    """A clock that moves by 1 s at each look, and the looks so far."""
    looks = count()
    latest = [0]

    def clock() -> float:
        latest[0] = next(looks)
        return float(latest[0])

    return clock, lambda: latest[0]


@pytest.mark.parametrize(("variables", "seconds"), [(20_000, 4), (60, 60), (60, 250)])
def test_a_search_ends_at_its_seconds_and_returns_the_best_until_then(variables, seconds):
    clock, looks = counting()
    budget = Budget(replays=10**9, ops=10**15, seconds=seconds)
    found = optimize(blocks(variables), HOSTS, budget=budget, clock=clock)
    assert found.cut_short and seconds < looks() <= seconds + SLACK
    assert found.predicted_step_s <= found.before_step_s
    assert len(found.strategy.variables) == variables


def test_suggestions_for_trials_end_at_their_seconds():
    clock, looks = counting()
    steps = LoweredSteps(blocks(40), HOSTS)
    budget = Budget(replays=10**9, ops=10**15, seconds=200)
    found = suggestions(steps, SearchSpace.default(lossy=True), budget=budget, clock=clock)
    assert found.cut_short and found.best and looks() <= 200 + 3 * SLACK


def test_a_pass_that_never_ends_is_ended_and_what_it_proposed_counts():
    class Endless:
        name = "endless"

        def propose(self, state, path):
            yield State(per_variable(path.workload))
            while True:
                path.sync_s([path.plan.messages[0]])

    clock, looks = counting()
    budget = Budget(seconds=400)
    found = optimize(blocks(20), HOSTS, passes=[Endless()], budget=budget, clock=clock)
    assert found.cut_short and looks() <= 400 + SLACK
    assert "endless" in {step.by for step in found.log} or found.rounds > 0


def test_a_share_of_a_deadline_ends_before_it():
    clock, _ = counting()
    deadline = Deadline.after(10, clock)
    half = deadline.share(0.5)
    assert half.end_s == 5.5 and not half.passed()
    half.check()
    while not half.passed():
        pass
    with pytest.raises(TimeUp):
        half.check()
    assert not deadline.passed()


def test_merging_a_long_run_of_messages_is_one_message():
    workload = blocks(2_000)
    problem = Problem(workload, HOSTS, SearchSpace.default())
    state = State(per_variable(workload))
    strategy = merged(state, problem, list(pairwise(range(2_000))))
    groups = {shard.group for choice in strategy.variables for shard in choice.shards}
    assert len(groups) == 1 and None not in groups
