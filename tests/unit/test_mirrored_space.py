"""Strategies that are proposed to a script of MultiWorkerMirroredStrategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from proposed_rounds import two_rounds

from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.optimizer.budget import Budget
from autotune.strategy_space.mirrored import MIRRORED_LIMITS, mirrored_refusal, mirrored_space
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Synchronizer
from autotune.tuning.events import Profiled
from autotune.tuning.job import JobSpec, Search
from autotune.workload import Variable, Workload

HOSTS = Cluster("h", tuple(Host(f"h{i}", 2, 12.5e6 * (i + 1), 1e-4, 1e9, 1e-5) for i in range(4)))
DENSE = tuple(Variable(f"v{i}", (300, 200), ready_s=0.01 * i) for i in range(8))
TABLE = Variable("table", (5000, 64), sparse=True, ready_s=0.1, touched_rows=200.0)
MODEL = Workload("m", (*DENSE, TABLE), (), 0.1, 0.2)
SHORT = Budget(60), Budget(60)


@pytest.mark.parametrize("search", [Search.AUTOSYNC, Search.RANDOM, Search.BAYES, Search.FUSION])
def test_every_proposed_plan_can_be_enacted_by_the_workers(search: Search) -> None:
    spec = JobSpec(("python", "t.py"), 8, HOSTS, search=search, samples_per_round=80, lossy=True)
    profiled = Profiled(MODEL, HOSTS, 1.0, {}, "a step ends", mirrored=True)
    for proposed in two_rounds(spec, profiled, 60, SHORT):
        assert proposed.proposals and "left out" not in proposed.reason
        for one in proposed.proposals:
            assert mirrored_refusal(plan(one.strategy, MODEL, 8), {"table"}) is None, one.origin


def test_the_limits_are_told() -> None:
    assert Profiled(MODEL, HOSTS, 1.0, {}, "", mirrored=True).limits == MIRRORED_LIMITS


def test_a_space_without_dense_rows_needs_synchronizers_that_carry_rows() -> None:
    space = mirrored_space(SearchSpace.default())
    with pytest.raises(InvalidInput, match="that all carry rows as all_gather, but has all_reduce"):
        replace(space, synchronizers=(Synchronizer.ALL_REDUCE, Synchronizer.PARAMETER_SERVER))
