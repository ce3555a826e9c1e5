"""From strategies to plans: what becomes one message, in which order, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

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

GATHER = SparseHandling.ALL_GATHER
MODEL = Workload(
    "m",
    (
        Variable("c", (4, 3)),
        Variable("b", (6,)),
        Variable("a", (2,), "float16"),
        Variable("t", (5, 2), sparse=True),
    ),
)
REDUCE = Synchronizer.ALL_REDUCE


def strategy(**shards):
    """One whole-variable shard each, `Shard(ALL_REDUCE)` where nothing is said."""
    return Strategy(
        tuple(
            VariableStrategy(v.name, (shards.get(v.name, Shard(REDUCE)),)) for v in MODEL.variables
        )
    )


def names(made):
    return [[part.variable for part in message.slices] for message in made.messages]


def test_messages_are_issued_in_gradient_ready_order_by_default():
    assert names(plan(strategy(), MODEL, 2)) == [["c"], ["b"], ["a"], ["t"]]


def test_a_group_is_one_message_that_waits_for_its_last_gradient():
    group = Shard(REDUCE, group=7)
    assert names(plan(strategy(c=group, t=group), MODEL, 2)) == [["b"], ["a"], ["c", "t"]]


def test_rows_of_sparse_gradients_are_messages_of_their_own():
    sparse = VariableStrategy(
        "t", (Shard(REDUCE, group=0),) * 2, Partition(0, (2, 3)), SparseHandling.ALL_GATHER
    )
    others = strategy(c=Shard(REDUCE, group=0), b=Shard(REDUCE, group=0)).variables
    made = plan(
        Strategy((sparse, *(choice for choice in others if choice.variable != "t"))), MODEL, 2
    )
    assert names(made) == [["c", "b"], ["a"], ["t"], ["t"]]


def test_a_lower_priority_is_issued_first_and_a_group_has_the_lowest_of_its_shards():
    assert names(plan(strategy(t=Shard(REDUCE, priority=-1)), MODEL, 2)) == [
        ["t"],
        ["c"],
        ["b"],
        ["a"],
    ]
    made = plan(
        strategy(c=Shard(REDUCE, group=0, priority=5), b=Shard(REDUCE, group=0, priority=-5)),
        MODEL,
        2,
    )
    assert names(made) == [["c", "b"], ["a"], ["t"]]


def test_a_group_splits_by_dtype_synchronizer_compressor_and_placement():
    def ps(rank):
        return Shard(Synchronizer.PARAMETER_SERVER, group=0, placement=rank)

    assert (
        len(plan(strategy(**dict.fromkeys("cbat", Shard(REDUCE, group=0))), MODEL, 2).messages) == 2
    )  # float16 apart
    assert len(plan(strategy(c=ps(0), b=ps(1), t=ps(0)), MODEL, 2).messages) == 3
    assert (
        len(
            plan(
                strategy(c=Shard(REDUCE, group=0), b=Shard(REDUCE, Compressor.FP16, group=0)),
                MODEL,
                2,
            ).messages
        )
        == 4
    )


def test_rows_of_a_sparse_gradient_travel_alone():
    group = Shard(REDUCE, group=0)
    dense = Strategy(tuple(VariableStrategy(v.name, (group,)) for v in MODEL.variables))
    assert names(plan(dense, MODEL, 2)) == [["a"], ["c", "b", "t"]]  # float16 apart
    cut = VariableStrategy("t", (group, group), Partition(0, (2, 3)), GATHER)
    made = plan(Strategy((cut, *(v for v in dense.variables if v.variable != "t"))), MODEL, 2)
    assert names(made) == [["c", "b"], ["a"], ["t"], ["t"]]
    assert [message.sparse for message in made.messages] == [SparseHandling.DENSE] * 2 + [
        GATHER
    ] * 2


def test_a_partition_becomes_slices_along_its_axis():
    shards = tuple(Shard(Synchronizer.PARAMETER_SERVER, placement=rank) for rank in (1, 0))
    cut = VariableStrategy("c", shards, Partition(1, (2, 1)))
    made = plan(Strategy((cut, *(v for v in strategy().variables if v.variable != "c"))), MODEL, 2)
    assert [(m.owner, m.slices) for m in made.messages[:2]] == [
        (1, (TensorSlice("c", 8, 1, 0, 2, 4),)),
        (0, (TensorSlice("c", 4, 1, 2, 3, 4),)),
    ]


def test_bytes_on_the_wire_follow_the_compressor():
    def message(compressor, **fields):
        return Message(
            (TensorSlice("w", 100),), Synchronizer.ALL_REDUCE, compressor, "float32", **fields
        )

    assert message(Compressor.NONE).wire_bytes == message(Compressor.NONE).grad_bytes == 400
    assert message(Compressor.FP16).wire_bytes == 200
    assert message(Compressor.INT8).wire_bytes == 100 + 4  # one float32 scale
    assert (
        Message(
            (TensorSlice("w", 1025),), Synchronizer.ALL_REDUCE, Compressor.INT8, "float32"
        ).wire_bytes
        == 1025 + 2 * 4
    )
    assert (
        message(Compressor.TOP_K, ratio=0.015).wire_bytes == 2 * 8
    )  # two values of 4 bytes with 4-byte indices
    assert message(Compressor.POWER_SGD, rank=2).wire_bytes == 400  # one axis: uncompressed


def test_power_sgd_sends_both_factors_of_every_slice_but_never_more_than_the_slice():
    def wire_bytes(variable, partition, rank=2, dtype="float32"):
        shards = (Shard(REDUCE, Compressor.POWER_SGD, group=0, rank=rank),) * (
            len(partition.sizes) if partition else 1
        )
        one = Workload("m", (Variable("w", variable, dtype),))
        return (
            plan(Strategy((VariableStrategy("w", shards, partition),)), one, 2)
            .messages[0]
            .wire_bytes
        )

    assert wire_bytes((10, 6, 5), None) == 4 * 2 * (10 + 30)
    assert wire_bytes((10, 6, 5), None, dtype="float64") == 8 * 2 * (10 + 30)
    assert wire_bytes((10, 6, 5), Partition(0, (7, 3))) == 4 * 2 * (7 + 30 + 3 + 30)
    assert wire_bytes((10, 6, 5), Partition(1, (2, 4))) == 4 * 2 * (10 + 10 + 10 + 20)
    assert wire_bytes((10, 30), Partition(0, (9, 1))) == 4 * (
        2 * (9 + 30) + 30
    )  # one row is its own factor
    assert wire_bytes((3, 4), None, rank=2) == 4 * 12
    assert wire_bytes((300,), None) == wire_bytes((300,), Partition(0, (100, 200))) == 4 * 300
    assert wire_bytes((0, 5), None) == 0


def with_choice(choice):
    return Strategy((choice, *(v for v in strategy().variables if v.variable != choice.variable)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            Strategy(strategy().variables[1:]),
            "exactly the 4 variables of model 'm', but it lacks a",
        ),
        (
            Strategy((*strategy().variables, VariableStrategy("z", (Shard(REDUCE),)))),
            "has the unknown z",
        ),
        (
            strategy(c=Shard(Synchronizer.PARAMETER_SERVER, placement=2)),
            "'c' must be a rank below the world size 2, but is 2",
        ),
        (
            Strategy(strategy().variables, ring_order=(1, 0, 2)),
            "ring_order must name all 2 ranks, but names 3",
        ),
        (
            with_choice(VariableStrategy("b", (Shard(REDUCE),) * 2, Partition(1, (1, 1)))),
            r"axis 1 needs .* 'b' has shape \(6,\)",
        ),
        (
            with_choice(VariableStrategy("b", (Shard(REDUCE),) * 2, Partition(0, (3, 4)))),
            r"sum to 6, but those of 'b' .* sum to 7",
        ),
        (
            with_choice(VariableStrategy("t", (Shard(REDUCE),) * 2, Partition(1, (1, 1)))),
            "sparse variable 't' can be cut along axis 0 only",
        ),
        (
            with_choice(VariableStrategy("b", (Shard(REDUCE),), sparse=SparseHandling.ALL_GATHER)),
            "all_gather needs a variable with sparse gradients, but those of 'b' are dense; set sparse = dense",
        ),
        (
            with_choice(
                VariableStrategy("t", (Shard(REDUCE),), sparse=SparseHandling.GATHER_SCATTER)
            ),
            "gather_scatter needs the synchronizer parameter_server, but 't' has all_reduce",
        ),
        (
            with_choice(
                VariableStrategy(
                    "t", (Shard(REDUCE, Compressor.INT8),), sparse=SparseHandling.ALL_GATHER
                )
            ),
            "rows of a sparse gradient are sent as they are or as fp16 or bf16, but 't' has int8",
        ),
        (
            strategy(a=Shard(REDUCE, Compressor.INT8)),
            "int8 keeps its rounding errors .* needs float32 or float64, but 'a' is float16",
        ),
        (
            strategy(c=Shard(REDUCE, group=0), a=Shard(REDUCE, Compressor.TOP_K, ratio=0.1)),
            "top_k .* send it with none",
        ),
    ],
)
def test_what_does_not_fit_the_model_or_the_world_is_refused(bad, message):
    with pytest.raises(InvalidStrategy, match=message):
        plan(bad, MODEL, 2)


def test_complex_gradients_are_not_cast():
    one = Workload("m", (Variable("z", (4,), "complex64"),))
    with pytest.raises(
        InvalidStrategy,
        match="complex gradients are sent uncompressed, but 'z' is complex64 and has fp16",
    ):
        plan(Strategy((VariableStrategy("z", (Shard(REDUCE, Compressor.FP16),)),)), one, 2)


def test_the_plan_is_hashed_with_all_that_ranks_must_agree_on():
    made = plan(strategy(), MODEL, 2)
    others = [
        plan(strategy(), MODEL, 3),
        plan(strategy(b=Shard(REDUCE, Compressor.BF16)), MODEL, 2),
    ]
    others.append(plan(Strategy(strategy().variables, cross_step=True), MODEL, 2))
    assert len({made.id, *(other.id for other in others)}) == 4


def test_json_round_trip_and_bad_plans():
    made = plan(Strategy(strategy().variables, True, (1, 0)), MODEL, 2)
    assert Plan.from_json(made.to_json()) == made
    data = json.loads(made.to_json())
    with pytest.raises(
        InvalidInput, match=r"this version reads plan schema 1, but the file has 2; update autotune"
    ):
        Plan.from_json(json.dumps({**data, "schema": 2, "novelty": 0}))
    with pytest.raises(
        InvalidInput, match="unknown field 'world_sizes'; did you mean 'world_size'"
    ):
        Plan.from_json(json.dumps({**data, "world_sizes": 2}))


def test_a_workload_names_the_rule_that_its_data_breaks():
    data = MODEL.to_data()
    assert Workload.from_data(json.loads(json.dumps(data))) == MODEL
    changes: list[tuple[dict[str, Any], str]] = [
        ({"schema": 9, "novelty": 1}, "reads workload schema 1, but the file has 9"),
        ({"variables": []}, "at least one variable"),
        ({"variables": data["variables"] * 2}, "must be unique, but a, b, c occur more than once"),
        ({"source": "guessed"}, "'measured' or 'assumed', but is 'guessed'"),
        ({"edges": [[2, 1]]}, r"pairs i < j < 4, but one is \(2, 1\)"),
        (
            {"variables": [{"name": "w", "shape": [2], "dtype": "int8"}]},
            "dtype of 'w' must be one of float64, .* but is 'int8'",
        ),
        ({"variables": [{"name": "w", "shape": [-2]}]}, r"no negative extent, but is \(-2,\)"),
    ]
    for change, message in changes:
        with pytest.raises(InvalidInput, match=message):
            Workload.from_data({**data, **change})


def test_a_workload_is_identified_by_its_tensors_and_not_by_order_or_times():
    reordered = Workload("other name", MODEL.variables[::-1], backward_s=1.0, source="measured")
    assert reordered.id == MODEL.id
    assert Workload("m", MODEL.variables[1:]).id != MODEL.id


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
    hosts = (Host("a", 2, 1e9, 5e-5, 1e10, 5e-6), Host("b", 2, 1e9, 5e-5, 1e10, 5e-6))
    built = BUILDERS[name](MODEL, Cluster("c", hosts))
    enacted = plan(built, MODEL, 4)
    assert (built.id, enacted.id) == (strategy_id, plan_id)
    assert Strategy.from_json(built.to_json()) == built
    assert Plan.from_json(enacted.to_json()) == enacted


def test_plans_spell_a_parameter_server_push_pull_and_strategies_do_not():
    served = strategy(c=Shard(Synchronizer.PARAMETER_SERVER, placement=1))
    message = json.loads(plan(served, MODEL, 2).to_json())["messages"][0]
    assert message["primitive"] == "push_pull" and "synchronizer" not in message
    assert '"synchronizer":"parameter_server"' in served.to_json()
    with pytest.raises(InvalidInput, match=r"synchronizer: .* but is 'push_pull'"):
        Strategy.from_json(served.to_json().replace("parameter_server", "push_pull"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            lambda m: m.update(primitive="parameter_server"),
            "primitive must be one of .*push_pull, .*but is",
        ),
        (lambda m: m.update(primitive=["push_pull"]), "primitive must be one of"),
        (lambda m: m.pop("primitive"), "field 'primitive' is required, but missing"),
        (
            lambda m: m.update(synchronizer="all_reduce"),
            "unknown field 'synchronizer'; did you mean",
        ),
    ],
)
def test_a_stored_message_needs_the_stored_name_and_spelling(change, error):
    data = plan(strategy(), MODEL, 2).to_data()
    change(data["messages"][0])
    with pytest.raises(InvalidInput, match=error):
        Plan.from_json(json.dumps(data))
