"""From strategies to plans: which gradients form a message, in which order, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_worlds import model, sent
from small_worlds import strategy as strategy_of

from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput, InvalidStrategy
from autotune.strategy_space.builders.registry import BUILDERS
from autotune.strategy_space.plan import Message, Plan, TensorSlice, plan
from autotune.strategy_space.strategy import (
    Compressor,
    Partition,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

MODEL = model(
    Variable("c", (4, 3)),
    Variable("b", (6,)),
    Variable("a", (2,), "float16"),
    Variable("t", (5, 2), sparse=True),
)
REDUCE = Synchronizer.ALL_REDUCE
SERVER = Synchronizer.PARAMETER_SERVER
GATHER = SparseHandling.ALL_GATHER
SCATTER = SparseHandling.GATHER_SCATTER


def shard(*compressor, **fields):
    return Shard(REDUCE, *compressor, **fields)


def served(rank, **fields):
    return Shard(SERVER, placement=rank, **fields)


def direct(**fields):
    return Shard(Synchronizer.DIRECT_EXCHANGE, **fields)


def strategy(default=None, **choices):
    """Every variable whole with `default` (all-reduce), except the named ones."""
    return strategy_of(MODEL, default or shard(), choices)


def cut(name, *sizes, axis=0, sparse=SparseHandling.DENSE, **fields):
    shards = (shard(**fields),) * len(sizes)
    return {name: VariableStrategy(name, shards, Partition(axis, sizes), sparse)}


def rows(*compressor, name="t", sparse=GATHER):
    return {name: VariableStrategy(name, (shard(*compressor),), sparse=sparse)}


def messages(chosen):
    return plan(chosen, MODEL, 2).messages


GROUP = shard(group=0)


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.5, float("inf"), float("nan")])
def test_a_stored_message_has_a_share_as_its_ratio(ratio):
    with pytest.raises(InvalidInput, match="ratio of a message must lie in"):
        Message((), Synchronizer.ALL_REDUCE, Compressor.TOP_K, "float32", ratio=ratio)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (strategy(), "c|b|a|t"),  # gradient-ready order
        # a group waits for its last gradient
        (strategy(c=shard(group=7), t=shard(group=7)), "b|a|c t"),
        # a lower priority is issued first, and a group has the lowest of its shards
        (strategy(t=shard(priority=-1)), "t|c|b|a"),
        (strategy(c=shard(group=0, priority=5), b=shard(group=0, priority=-5)), "c b|a|t"),
        # a group splits by dtype, placement and compressor
        (strategy(GROUP), "a|c b t"),
        (strategy(c=served(0, group=0), b=served(1, group=0), t=served(0, group=0)), "b|a|c t"),
        (strategy(c=GROUP, b=shard(Compressor.FP16, group=0)), "c|b|a|t"),
        (strategy(c=GROUP, b=served(0, group=0)), "c|b|a|t"),
        # and by shares and pieces of a direct exchange
        (strategy(c=direct(group=0), b=direct(group=0), t=direct(group=0)), "a|c b t"),
        (strategy(c=direct(group=0), b=direct(group=0, pieces=2)), "c|b|a|t"),
        (strategy(c=direct(group=0), b=direct(group=0, shares=(1.0, 0.0))), "c|b|a|t"),
        # rows of a sparse gradient travel alone
        (strategy(c=GROUP, b=GROUP, **cut("t", 2, 3, sparse=GATHER, group=0)), "c b|a|t|t"),
        (strategy(GROUP, **cut("t", 2, 3, sparse=GATHER, group=0)), "c b|a|t|t"),
    ],
)
def test_groups_and_priorities_make_the_messages(chosen, expected):
    assert sent(chosen, MODEL, 2) == expected
    gathered = [m.slices[0].variable for m in messages(chosen) if m.sparse is GATHER]
    assert gathered == (["t", "t"] if expected.endswith("t|t") else [])


def test_a_partition_becomes_slices_along_its_axis():
    chosen = VariableStrategy("c", (served(1), served(0)), Partition(1, (2, 1)))
    assert [(m.owner, m.slices) for m in messages(strategy(c=chosen))[:2]] == [
        (1, (TensorSlice("c", 8, 1, 0, 2, 4),)),
        (0, (TensorSlice("c", 4, 1, 2, 3, 4),)),
    ]


@pytest.mark.parametrize(
    ("elements", "compressor", "fields", "wire_bytes"),
    [
        (100, Compressor.NONE, {}, 400),
        (100, Compressor.FP16, {}, 200),
        (100, Compressor.INT8, {}, 100 + 4),  # one float32 scale
        (1025, Compressor.INT8, {}, 1025 + 2 * 4),
        (100, Compressor.TOP_K, {"ratio": 0.015}, 2 * 8),  # two values, each with its index
        (100, Compressor.POWER_SGD, {"rank": 2}, 400),  # one axis: uncompressed
    ],
)
def test_bytes_on_the_wire_follow_the_compressor(elements, compressor, fields, wire_bytes):
    message = Message((TensorSlice("w", elements),), REDUCE, compressor, "float32", **fields)
    assert message.wire_bytes == wire_bytes and message.grad_bytes == 4 * elements


@pytest.mark.parametrize(
    ("shape", "sizes", "axis", "wire_elements"),
    [
        ((10, 6, 5), (), 0, 2 * (10 + 30)),
        ((10, 6, 5), (7, 3), 0, 2 * (7 + 30 + 3 + 30)),
        ((10, 6, 5), (2, 4), 1, 2 * (10 + 10 + 10 + 20)),
        ((10, 30), (9, 1), 0, 2 * (9 + 30) + 30),  # one row is its own factor
        ((3, 4), (), 0, 12),
        ((300,), (), 0, 300),
        ((300,), (100, 200), 0, 300),
        ((0, 5), (), 0, 0),
    ],
)
def test_power_sgd_sends_both_factors_of_a_slice_but_never_more(shape, sizes, axis, wire_elements):
    compressed = shard(Compressor.POWER_SGD, group=0, rank=2)
    partition = Partition(axis, sizes) if sizes else None
    chosen = Strategy((VariableStrategy("w", (compressed,) * max(len(sizes), 1), partition),))
    for dtype, element_bytes in (("float32", 4), ("float64", 8)):
        (message,) = plan(chosen, model(Variable("w", shape, dtype)), 2).messages
        assert message.wire_bytes == element_bytes * wire_elements


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Strategy(strategy().variables[1:]), "the 4 variables of model 'm', but it lacks a"),
        (
            Strategy((*strategy().variables, VariableStrategy("z", (shard(),)))),
            "exactly the 4 variables .* has the unknown z",
        ),
        (
            strategy(c=direct(shares=(0.5, 0.3, 0.2))),
            "shares of 'c' must be one for each of the 2 ranks, but are 3",
        ),
        (
            strategy(t=VariableStrategy("t", (direct(pieces=2),), sparse=SCATTER)),
            "travel in one piece, but 't' has 2; set pieces = 1 or sparse = dense",
        ),
        (strategy(c=served(2)), "'c' must be a rank below the world size 2, but is 2"),
        (
            Strategy(strategy().variables, ring_order=(1, 0, 2)),
            "ring_order must name all 2 ranks, but names 3",
        ),
        (strategy(**cut("b", 1, 1, axis=1)), r"axis 1 needs .* 'b' has shape \(6,\)"),
        (strategy(**cut("b", 3, 4)), r"sum to 6, but those of 'b' .* sum to 7"),
        (strategy(**cut("t", 1, 1, axis=1)), "sparse variable 't' can be cut along axis 0 only"),
        (
            strategy(**rows(name="b")),
            "all_gather needs .* sparse gradients, but those of 'b' are dense; set sparse = dense",
        ),
        (
            strategy(**rows(sparse=SCATTER)),
            "gather_scatter needs the synchronizer parameter_server or direct_exchange, "
            "but 't' has all_reduce",
        ),
        (
            strategy(**rows(Compressor.INT8)),
            "rows of a sparse gradient are sent as they are or as fp16 or bf16, but 't' has int8",
        ),
        (
            strategy(a=shard(Compressor.INT8)),
            "int8 keeps its rounding errors .* needs float32 or float64, but 'a' is float16",
        ),
        (strategy(c=GROUP, a=shard(Compressor.TOP_K, ratio=0.1)), "top_k .* send it with none"),
    ],
)
def test_a_strategy_that_does_not_fit_the_model_or_the_world_is_refused(bad, message):
    with pytest.raises(InvalidStrategy, match=message):
        plan(bad, MODEL, 2)


def test_complex_gradients_are_not_cast():
    one = model(Variable("z", (4,), "complex64"))
    rule = "complex gradients are sent uncompressed, but 'z' is complex64 and has fp16"
    with pytest.raises(InvalidStrategy, match=rule):
        plan(strategy_of(one, shard(Compressor.FP16)), one, 2)


def test_the_plan_is_hashed_with_all_that_ranks_must_agree_on():
    cast = strategy(b=shard(Compressor.BF16))
    across = Strategy(strategy().variables, cross_step=True)
    cases = [(strategy(), 2), (strategy(), 3), (cast, 2), (across, 2)]
    assert len({plan(chosen, MODEL, ranks).id for chosen, ranks in cases}) == 4


def test_a_message_has_the_shares_and_pieces_of_its_shards():
    first, *others = messages(strategy(c=direct(shares=(0.75, 0.25), pieces=3)))
    assert (first.shares, first.pieces) == ((0.75, 0.25), 3)
    assert {(other.shares, other.pieces) for other in others} == {(None, 1)}


def test_a_message_that_sends_all_elements_has_one_identity():
    slices = (TensorSlice("b", 6),)
    of_ratio = [Message(slices, REDUCE, Compressor.TOP_K, "float32", ratio=r) for r in (1, 1.0)]
    assert len({Plan(MODEL.id, 2, (message,)).id for message in of_ratio}) == 1


def test_a_plan_survives_json_and_a_bad_one_is_refused():
    owned = strategy(c=direct(shares=(0.75, 0.25), pieces=3)).variables
    planned = plan(Strategy(owned, True, (1, 0)), MODEL, 2)
    assert Plan.from_json(planned.to_json()) == planned
    data = json.loads(planned.to_json())
    newer = "this version reads plan schema 1, but the file has 2; update autotune"
    with pytest.raises(InvalidInput, match=newer):
        Plan.from_json(json.dumps({**data, "schema": 2, "novelty": 0}))
    with pytest.raises(InvalidInput, match="'world_sizes'; did you mean 'world_size'"):
        Plan.from_json(json.dumps({**data, "world_sizes": 2}))


def variable_data(*shape: int, dtype: str = "float32") -> list[dict[str, Any]]:
    return [{"name": "w", "shape": list(shape), "dtype": dtype}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 9, "novelty": 1}, "reads workload schema 1, but the file has 9"),
        ({"variables": []}, "at least one variable"),
        (
            {"variables": MODEL.to_data()["variables"] * 2},
            "must be unique, but a, b, c occur more than once",
        ),
        ({"source": "guessed"}, "'measured' or 'assumed', but is 'guessed'"),
        ({"edges": [[2, 1]]}, r"pairs i < j < 4, but one is \(2, 1\)"),
        (
            {"variables": variable_data(2, dtype="int8")},
            "dtype of 'w' must be one of float64, .* but is 'int8'",
        ),
        ({"variables": variable_data(-2)}, r"extents from 0 to 70368744177664, but is \(-2,\)"),
    ],
)
def test_a_workload_names_the_rule_that_its_data_breaks(change, message):
    data = MODEL.to_data()
    assert Workload.from_data(json.loads(json.dumps(data))) == MODEL
    with pytest.raises(InvalidInput, match=message):
        Workload.from_data({**data, **change})


def test_a_workload_is_identified_by_its_tensors_and_not_by_order_or_times():
    reordered = Workload("other name", MODEL.variables[::-1], backward_s=1.0, source="measured")
    assert reordered.id == MODEL.id
    assert model(*MODEL.variables[1:]).id != MODEL.id


@pytest.mark.parametrize(
    ("name", "strategy_id", "plan_id"),
    [
        ("ddp_25mib", "strategy-daa0429f8b35684d", "plan-dfe02e40b0d3199c"),
        ("zero2_like", "strategy-414bc98ea39c92c3", "plan-e17834c54288f6b4"),
        ("partitioned_all_reduce", "strategy-894c6568338a771b", "plan-2e21c7a4dad8ce0a"),
        ("parameter_server", "strategy-0ce7b54bd2524baf", "plan-3489aed8cbf4d884"),
        ("uneven_partitioned_ps", "strategy-3250134233c9d764", "plan-914bdb6bada9e477"),
        ("parallax", "strategy-49d589b4700bcd94", "plan-d676aad36e5974ef"),
        ("byteps_across_steps", "strategy-d13e1e29af03f1d3", "plan-cf4fa7bf26001998"),
        ("cross_step_all_reduce", "strategy-66b110181f819c9b", "plan-9443b5c4efe027ef"),
    ],
)
def test_ids_are_those_of_the_first_release(name, strategy_id, plan_id):
    """The ids were recorded when strategies and plans had an enum each."""
    hosts = tuple(Host(host, 2, 1e9, 5e-5, 1e10, 5e-6) for host in "ab")
    built = BUILDERS[name](MODEL, Cluster("c", hosts))
    planned = plan(built, MODEL, 4)
    assert (built.id, planned.id) == (strategy_id, plan_id)
    assert Strategy.from_json(built.to_json()) == built
    assert Plan.from_json(planned.to_json()) == planned


def test_labels_of_groups_are_in_the_id_of_a_plan_and_not_in_what_it_enacts():
    def labelled(c, b):
        return plan(strategy(shard(group=2), c=shard(group=c), b=shard(group=b)), MODEL, 2)

    one, same, apart = labelled(0, 0), labelled(7, 7), labelled(0, 1)
    alone = plan(strategy(), MODEL, 2)
    assert one.id != same.id and one.enacted_id == same.enacted_id
    assert apart.id != alone.id and apart.enacted_id == alone.enacted_id == alone.id
    assert one.enacted_id != apart.enacted_id


def test_plans_spell_a_parameter_server_push_pull_and_strategies_do_not():
    chosen = strategy(c=served(1))
    message = json.loads(plan(chosen, MODEL, 2).to_json())["messages"][0]
    assert message["primitive"] == "push_pull" and "synchronizer" not in message
    assert '"synchronizer":"parameter_server"' in chosen.to_json()
    with pytest.raises(InvalidInput, match=r"synchronizer: .* but is 'push_pull'"):
        Strategy.from_json(chosen.to_json().replace("parameter_server", "push_pull"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"primitive": "parameter_server"}, "primitive must be one of .*push_pull, .*but is"),
        ({"primitive": ["push_pull"]}, "primitive must be one of"),
        ({"primitive": None}, "field 'primitive' is required, but missing"),
        ({"synchronizer": "all_reduce"}, "unknown field 'synchronizer'; did you mean"),
    ],
)
def test_a_stored_message_needs_the_stored_name_and_spelling(change, error):
    data = plan(strategy(), MODEL, 2).to_data()
    changed = {**data["messages"][0], **change}
    data["messages"][0] = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises(InvalidInput, match=error):
        Plan.from_json(json.dumps(data))
