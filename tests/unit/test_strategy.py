"""A strategy validates itself; its messages name the rule, the value and the fix."""

from __future__ import annotations

import json
import re
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from autotune.errors import InvalidInput, InvalidStrategy
from autotune.strategy_space.describe import whole_text
from autotune.strategy_space.strategy import (
    MOST_IN_FLIGHT,
    Compressor,
    Partition,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)

REDUCE = Synchronizer.ALL_REDUCE
DIRECT: dict[str, Any] = {"synchronizer": Synchronizer.DIRECT_EXCHANGE}
ALL_REDUCE = Shard(REDUCE)
ONE = VariableStrategy("w", (ALL_REDUCE,))
TWO = Strategy(
    (
        VariableStrategy("b", (ALL_REDUCE,)),
        VariableStrategy("a", (ALL_REDUCE, ALL_REDUCE), Partition(0, (3, 2))),
    )
)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            Shard,
            {"synchronizer": Synchronizer.PARAMETER_SERVER},
            r"needs a placement \(the rank of its server\), but placement is None",
        ),
        (Shard, {"placement": 1}, "all_reduce needs no placement, but placement is 1"),
        (
            Shard,
            {"synchronizer": Synchronizer.REDUCE_BROADCAST, "placement": -1},
            "must be a rank >= 0, but is -1",
        ),
        (Shard, {"compressor": Compressor.TOP_K}, "needs a ratio, but top_k has None"),
        (
            Shard,
            {"compressor": Compressor.FP16, "ratio": 0.1},
            "only it, needs a ratio, but fp16 has 0.1",
        ),
        (
            Shard,
            {"compressor": Compressor.TOP_K, "ratio": 1.5},
            r"must lie in \(0, 1\], but is 1.5",
        ),
        (Shard, {"compressor": Compressor.POWER_SGD}, "needs a rank, but power_sgd has None"),
        (Shard, {"compressor": Compressor.POWER_SGD, "rank": 0}, "must be at least 1, but is 0"),
        (Shard, {"shares": (1.0, 0.0)}, "direct_exchange, and only it, .* but all_reduce has"),
        (Shard, {"pieces": 2}, "direct_exchange, and only it, has shares and pieces"),
        (Shard, {**DIRECT, "pieces": 0}, "pieces must be from 1 to 64, but are 0"),
        (
            Shard,
            {**DIRECT, "pieces": 2, "compressor": Compressor.INT8},
            "int8 needs the whole message, but a direct exchange has 2 pieces; set pieces = 1",
        ),
        (Shard, {**DIRECT, "shares": (0.5, 0.4)}, r"sum to 1, but are \(0.5, 0.4\)"),
        (Shard, {**DIRECT, "shares": (1.5, -0.5)}, r"lie in \[0, 1\] and sum to 1, but are"),
        (Partition, {"axis": -1, "sizes": (1, 1)}, "axis must be at least 0, but is -1"),
        (
            Partition,
            {"axis": 0, "sizes": (4,)},
            r"two or more shards of at least 1 row each, but the sizes are \(4,\)",
        ),
        (
            Partition,
            {"axis": 0, "sizes": (4, 0)},
            r"at least 1 row each, but the sizes are \(4, 0\)",
        ),
        (
            VariableStrategy,
            {"variable": "w", "shards": (ALL_REDUCE,), "partition": Partition(0, (1, 1))},
            r"'w' is cut into 2 part\(s\) .* but has 1",
        ),
        (Strategy, {"variables": ()}, "at least one variable"),
        (Strategy, {"variables": (ONE, ONE)}, "names each variable once"),
        (Strategy, {"ring_order": (0, 2)}, r"permutation of the ranks, but is \(0, 2\)"),
        (Strategy, {"schema": 0}, "reads strategy schema 1, but the strategy has 0"),
    ],
)
def test_a_broken_rule_is_named_with_its_value(kind, fields, message):
    valid = {Shard: {"synchronizer": REDUCE}, Strategy: {"variables": TWO.variables}}.get(kind, {})
    with pytest.raises(InvalidStrategy, match=message):
        kind(**valid | fields)


def test_identity_is_content_and_the_order_of_variables_carries_no_meaning():
    again = Strategy(TWO.variables[::-1])
    assert again == TWO and again.id == TWO.id
    assert Strategy(TWO.variables, cross_step=True).id != TWO.id
    assert TWO.id.startswith("strategy-")


def test_equal_strategies_are_found_by_their_hash_and_copies_are_hashed_anew():
    again = Strategy(
        (
            VariableStrategy("b", (Shard(REDUCE),)),
            VariableStrategy("a", (Shard(REDUCE), Shard(REDUCE)), Partition(0, (3, 2))),
        )
    )
    assert {TWO: "known"}[again] == "known"
    assert {TWO: "known"}[copy(TWO)] == "known"
    assert {TWO, replace(TWO, cross_step=True), again} == {TWO, replace(again, cross_step=True)}


def test_a_strategy_stored_before_messages_in_flight_keeps_its_identity():
    one, two = (Strategy(TWO.variables, cross_step=True, in_flight=count) for count in (1, 2))
    assert "in_flight" not in one.to_json() and one.id != two.id
    assert json.loads(two.to_json()) == json.loads(one.to_json()) | {"in_flight": 2}
    assert whole_text(two).endswith("2 messages are under way at once on each lane.")
    assert "under way" not in whole_text(one)
    assert [Strategy.from_json(each.to_json()) for each in (one, two)] == [one, two]


@pytest.mark.parametrize(
    ("cross_step", "in_flight"), [(True, 0), (True, MOST_IN_FLIGHT + 1), (False, 2)]
)
def test_more_messages_are_in_flight_than_one_only_across_steps(cross_step, in_flight):
    rule = f"in_flight must be .* but is {in_flight}, cross_step: {cross_step}"
    with pytest.raises(InvalidStrategy, match=rule):
        Strategy(TWO.variables, cross_step=cross_step, in_flight=in_flight)


def direct(**fields):
    return Strategy((VariableStrategy("w", (Shard(**DIRECT, **fields),)),))


@pytest.mark.parametrize(("cross_step", "in_flight"), [(False, 8), (True, 8), (False, 1)])
def test_pieces_of_direct_exchanges_are_in_flight_also_within_the_step(cross_step, in_flight):
    several = replace(direct(), cross_step=cross_step, in_flight=in_flight)
    assert several.limit == (2 if cross_step else None)  # of collectives
    assert ("8 pieces are under way" in whole_text(several)) is (in_flight == 8)
    with pytest.raises(InvalidStrategy, match=r"from 1 to 8 with direct exchanges, .* but is 9"):
        replace(several, in_flight=9)


def test_a_strategy_stored_before_direct_exchanges_keeps_its_identity():
    assert "shares" not in TWO.to_json() and "pieces" not in TWO.to_json()
    served = direct(shares=(0.0, 1.0, 0.0), pieces=4)
    assert Strategy.from_json(served.to_json()) == served
    assert len({direct().id, direct(pieces=4).id, served.id}) == 3


def test_equal_shares_are_one_strategy_however_they_are_written():
    assert direct(shares=(0.25,) * 4) == direct() and direct(shares=(0.25,) * 4).id == direct().id


def test_json_round_trip_is_loss_free_for_every_field():
    rooted = Shard(Synchronizer.REDUCE_BROADCAST, Compressor.TOP_K, 2, 4, -3, ratio=0.125)
    two_level = Shard(REDUCE, Compressor.POWER_SGD, hierarchical=True, rank=4)
    choice = VariableStrategy('größe.\n"w"', (rooted, two_level), Partition(1, (7, 2)))
    strategy = Strategy((choice,), True, (1, 0, 2))
    again = Strategy.from_json(strategy.to_json())
    assert again == strategy and again.id == strategy.id
    assert again.to_json() == strategy.to_json()


def test_whole_numbers_have_the_same_identity_as_fractions():
    whole = Shard(REDUCE, Compressor.TOP_K, ratio=1)
    served = Shard(**DIRECT, shares=(0, 1, 0))
    choices = VariableStrategy("a", (whole,)), VariableStrategy("b", (served,))
    strategy = Strategy(choices)
    assert Strategy.from_json(strategy.to_json()).id == strategy.id
    assert Shard(REDUCE, Compressor.TOP_K, ratio=1.0).ratio.hex() == whole.ratio.hex()


def test_lossless_means_no_compression_at_all():
    assert TWO.lossless
    cast = VariableStrategy("c", (Shard(Synchronizer.ALL_REDUCE, Compressor.BF16),))
    assert not Strategy((*TWO.variables, cast)).lossless


def changed(change):
    data = json.loads(TWO.to_json())
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d.update(crossstep=True),
            "x.json: unknown field 'crossstep'; did you mean 'cross_step'",
        ),
        (
            lambda d: d["variables"][0]["shards"][0].update(prioritty=1),
            "unknown field 'variables.0.shards.0.prioritty'; did you mean 'priority'",
        ),
        (
            lambda d: d["variables"][0].pop("shards"),
            "field 'variables.0.shards' is required, but missing",
        ),
        (
            lambda d: d["variables"][1]["shards"][0].update(synchronizer="mpi"),
            "'parameter_server'.*, but is 'mpi'",
        ),
        (
            lambda d: d["variables"][0]["partition"].update(sizes=[5]),
            r"two or more shards .* sizes are \(5,\)",
        ),
        (lambda d: d.update(variables=[]), "at least one variable"),
        (
            lambda d: d.update(schema=2, novelty=1),
            "x.json: this version reads strategy schema 1, but the file has 2; update autotune",
        ),
    ],
)
def test_bad_data_gets_one_message_with_place_rule_and_value(change, message):
    with pytest.raises(InvalidInput, match=message):
        Strategy.from_data(changed(change), "x.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "x.json must be JSON, but is not"),
        ('{"schema": NaN}', "must hold finite numbers, but has NaN"),
        ('{"schema": 1e999}', "must hold finite numbers, but has 1e999"),
        ("1" * 5000, "must hold integers of 64 bits, but one of 5000 characters is 111"),
        ("[" * 100_000, "must be JSON, but is not"),
        ("null", "x.json: the value: .*but is None"),
    ],
)
def test_bad_json_is_one_clear_error(text, message):
    with pytest.raises(InvalidInput, match=message):
        Strategy.from_json(text, "x.json")


@pytest.mark.parametrize(
    ("place", "value", "accepted"),
    [
        ("cross_step", "off", "boolean"),
        ("local_copies", 1, "boolean"),
        ("schema", True, "integer"),
        ("in_flight", "1", "integer"),
        ("ring_order", ["0x0"], "integer"),
        ("variables.0.partition.axis", False, "integer"),
        ("variables.0.partition.sizes", [3.0, 2], "integer"),
        ("variables.0.shards.0.hierarchical", "no", "boolean"),
        ("variables.0.shards.0.placement", "1", "integer"),
        ("variables.0.shards.0.group", "0x10", "integer"),
        ("variables.0.shards.1.priority", True, "integer"),
        ("variables.1.shards.0.rank", 4.0, "integer"),
        ("variables.1.shards.0.ratio", True, "number"),
        ("variables.1.shards.0.ratio", "0.1", "number"),
        ("variables.1.shards.0.shares", [True, 0.0], "number"),
        ("variables.1.shards.0.pieces", "2", "integer"),
    ],
)
def test_a_value_of_another_type_is_refused_and_not_converted(place, value, accepted):
    def change(at):
        *path, name = place.split(".")
        for part in path:
            at = at[int(part)] if part.isdigit() else at[part]
        at[name] = value

    wrong, where = (value[0], f"{place}.0") if isinstance(value, list) else (value, place)
    message = f"x.json: {where}: Input should be a valid {accepted}, but is {wrong!r}"
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        Strategy.from_data(changed(change), "x.json")


def test_an_integer_stands_for_a_fraction():
    part = {"synchronizer": "all_reduce", "compressor": "top_k", "ratio": 1}
    served = {"synchronizer": "direct_exchange", "shares": [0, 1, 0]}
    names = {"a": part, "b": served}
    data = {"variables": [{"variable": name, "shards": [names[name]]} for name in names]}
    parsed = Strategy.from_data(data)
    ratio, shares = parsed.by_name["a"].shards[0].ratio, parsed.by_name["b"].shards[0].shares
    assert (ratio, shares) == (1.0, (0.0, 1.0, 0.0))
    assert {type(value) for value in (ratio, *shares)} == {float}
