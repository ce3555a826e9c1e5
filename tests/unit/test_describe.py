"""Strategies in words."""

from __future__ import annotations

from dataclasses import replace

from autotune.commands.render.tables import plain_table
from autotune.strategy_space.describe import plan_text
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import (
    Compressor,
    Partition,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

WORKLOAD = Workload("Net", (Variable("a", (100, 3)), Variable("b", (100,))))
SERVER = Shard(Synchronizer.PARAMETER_SERVER, placement=0)
REDUCED = Shard(Synchronizer.ALL_REDUCE)


def text(a: VariableStrategy, b: VariableStrategy, current: int = 0, crossing: bool = False) -> str:
    planned = plan(Strategy((a, b)), WORKLOAD, 2)
    return plan_text(replace(planned, cross_step=crossing), current)


def test_a_plan_is_described_in_a_phrase() -> None:
    a, b = VariableStrategy("a", (SERVER,)), VariableStrategy("b", (SERVER,))
    assert text(a, b, current=1) == "2 messages instead of 1, pushed to servers"
    assert text(a, b, current=2) == text(a, b) == "2 messages, pushed to servers"
    b = VariableStrategy("b", (replace(REDUCED, compressor=Compressor.FP16),))
    assert text(a, b, crossing=True) == (
        "2 messages, 75% pushed to servers, 25% all-reduced, compressed by fp16, running into the "
        "next forward pass"
    )
    pieces = VariableStrategy("a", (SERVER, SERVER), Partition(0, (50, 50)))
    assert "large variables in pieces" in text(pieces, VariableStrategy("b", (SERVER,)))


def test_a_plain_table_has_one_line_per_row() -> None:
    table = plain_table(("a", "long name"), [("1", "x" * 200), ("22", "")])
    assert table.splitlines() == ["a   long name", "1   " + "x" * 200, "22"]
