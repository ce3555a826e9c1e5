"""Strategies that are proposed to a script which must get the rows of a sparse gradient as rows."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from proposed_rounds import two_rounds
from small_worlds import FOUR

from autotune.canonical import to_data
from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.jobs.exports import build_export
from autotune.optimizer.budget import Budget
from autotune.parsing import parse
from autotune.records import CURRENT_SETUP, Decision
from autotune.rng import generator
from autotune.sampler.job_space import JobSpace
from autotune.sampler.random import sample_many
from autotune.strategy_space.builders.collectives import single_bucket
from autotune.strategy_space.builders.registry import seed_strategies
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.mirrored import mirrored_space
from autotune.strategy_space.moves.neighbours import mutate
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    SPARSE_SYNCHRONIZERS,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.tuning.events import Profiled
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec, Search
from autotune.workload import Variable, Workload
from runtime_rewriter.protocol import ProfileAnswer
from runtime_rewriter.world.world import as_answered

HOSTS = Cluster("h", tuple(Host(f"h{i}", 2, 12.5e6 * (i + 1), 1e-4, 1e9, 1e-5) for i in range(4)))
DENSE = tuple(Variable(f"v{i}", (300, 200), ready_s=0.01 * i) for i in range(8))
TABLE = Variable("table", (5000, 64), sparse=True, ready_s=0.1, touched_rows=200.0, rows_only=True)
FREE = Variable("free", (900, 64), sparse=True, ready_s=0.05)
MODEL = Workload("m", (*DENSE, TABLE), (), 0.1, 0.2)
MIXED = Workload("m", (*DENSE[:3], FREE, TABLE), (), 0.1, 0.2)
SPACE = SearchSpace.default(lossy=True)
SHORT = Budget(60), Budget(60)
PROFILED = Profiled(MODEL, HOSTS, 1.0, {}, "a step ends", direct_refused="no sends")


def assert_rows(strategy: Strategy, workload: Workload = MODEL) -> None:
    assert strategy.by_name["table"].sparse is not SparseHandling.DENSE
    plan(strategy, workload, 8)


@pytest.mark.parametrize("search", [Search.AUTOSYNC, Search.RANDOM, Search.BAYES, Search.FUSION])
def test_no_search_proposes_to_send_the_rows_dense(search: Search) -> None:
    spec = JobSpec(("python", "t.py"), 8, HOSTS, search=search, samples_per_round=40, lossy=True)
    for round_ in two_rounds(spec, PROFILED, 40, SHORT):
        assert round_.proposals and "left out" not in round_.reason
        for one in round_.proposals:
            assert_rows(one.strategy)


def test_random_strategies_reach_every_way_to_send_the_rows() -> None:
    drawn = sample_many(MIXED, HOSTS, SPACE, 300, seed=0)
    assert len(drawn) == 300
    for strategy in drawn:
        assert_rows(strategy, MIXED)
        assert SPACE.violation(strategy, MIXED, HOSTS) is None
    tables = [strategy.by_name["table"] for strategy in drawn]
    carriers = {kind for kinds in SPARSE_SYNCHRONIZERS.values() for kind in kinds}
    assert {shard.synchronizer for one in tables for shard in one.shards} == carriers
    assert any(one.partition for one in tables)
    others = {strategy.by_name["free"].sparse for strategy in drawn}
    assert others == set(SparseHandling)  # another table may also be sent dense


@pytest.mark.parametrize("cut", [False, True])
def test_moves_keep_the_rows_and_change_who_carries_them(cut: bool) -> None:
    drawn = sample_many(MIXED, HOSTS, SPACE, 60, seed=1)
    start = next(one for one in drawn if bool(one.by_name["table"].partition) is cut)
    rng, seen = generator(0), set()
    for _ in range(300):
        neighbour = mutate(start, MIXED, HOSTS, SPACE, rng)
        assert_rows(neighbour, MIXED)
        assert SPACE.violation(neighbour, MIXED, HOSTS) is None
        seen |= {shard.synchronizer for shard in neighbour.by_name["table"].shards}
    assert len(seen) > 2


def test_hand_made_strategies_send_only_those_rows_that_must_be_rows() -> None:
    seeds = dict(seed_strategies(MIXED, HOSTS, SPACE))
    free = {name: seeds[name].by_name["free"].sparse for name in ("ddp_25mib", "ddp_25mib, rows")}
    assert list(free.values()) == [SparseHandling.DENSE, SparseHandling.ALL_GATHER]
    for strategy in seeds.values():
        assert_rows(strategy, MIXED)


def test_a_plan_with_dense_rows_is_outside_the_space_and_refused() -> None:
    dense = single_bucket(MODEL)
    spec = JobSpec(("python", "t.py"), 8, HOSTS)
    reason = JobSpace(spec).refusal_reason(plan(dense, MODEL, 8), MODEL)
    assert reason is not None and "must get rows of the sparse gradient" in reason
    assert "'table': the space sends its gradient as rows only" in str(
        SPACE.violation(dense, MODEL, HOSTS)
    )
    rows = with_rows(dense, MODEL, every=False)
    assert JobSpace(spec).refusal_reason(plan(rows, MODEL, 8), MODEL) is None
    assert JobSpace(spec).refusal_reason(plan(dense, MODEL, 8), as_answered(MODEL, [])) is None


def test_a_shard_that_dense_variables_share_does_not_hide_dense_rows() -> None:
    shard = Shard(Synchronizer.ALL_REDUCE)
    model = replace(MODEL, variables=(Variable("before", (300, 200)), TABLE))
    shared = Strategy(tuple(VariableStrategy(one.name, (shard,)) for one in model.variables))
    assert SPACE.violation(shared, model, FOUR) is not None
    no_dense = mirrored_space(SPACE)
    assert no_dense.violation(shared, as_answered(model, []), FOUR) is not None


def test_a_given_profile_takes_from_the_ranks_which_variables_need_rows() -> None:
    given = replace(MIXED, reads_norms=True)
    answers = [
        ProfileAnswer(None, (), {}, 2, "", rows_only=names) for names in (("free", "v0"), ())
    ]
    merged = as_answered(given, answers)
    assert [one.name for one in merged.variables if one.rows_only] == ["free"]  # v0 is dense
    assert merged.id == given.id and not merged.reads_norms


def test_only_a_sparse_variable_can_need_rows() -> None:
    with pytest.raises(InvalidInput, match="rows_only of 'bias' needs a sparse variable"):
        Variable("bias", (8,), rows_only=True)


def test_profiles_of_earlier_versions_and_exports_for_them_do_not_name_it() -> None:
    data = to_data(PROFILED)
    assert parse(Profiled, data, "profile") == PROFILED
    (*_, table) = data["workload"]["variables"]
    assert table.pop("rows_only") is True
    earlier = parse(Profiled, data, "profile")
    assert not any(one.rows_only for one in earlier.workload.variables)
    assert "rows_only" not in str(to_data(earlier))
    assert "1 of 9 variables travel as rows only" in PROFILED.limits
    assert "as rows only" not in earlier.limits
    spec = JobSpec(("python", "t.py"), 8, HOSTS)
    stays = Decision(CURRENT_SETUP, "the current setup stays", None, None)
    export = build_export("job", spec, History((PROFILED,), 0.1), stays, datetime.now(UTC))
    assert "rows_only" not in str(to_data(export))
