"""A strategy in words: the rows of the report and of `autotune strategies`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.strategy_space.compressors import ASSUMED
from autotune.strategy_space.plan import Message, Plan, PlannedStrategy
from autotune.strategy_space.shares import shares_text
from autotune.strategy_space.strategy import (
    Compressor,
    Shard,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

SHOWN = 4
"""Entries shown of a longer list; the rest is counted or omitted."""


@dataclass(frozen=True)
class VariableRow:
    """One variable; empty fields mean "nothing".

    `messages`: numbers of the messages that carry it, in issue order from 1.
    """

    variable: Variable
    synchronizers: str
    partition: str
    compressors: str
    servers: str
    messages: str


def variable_rows(workload: Workload, planned: PlannedStrategy) -> list[VariableRow]:
    """A row per variable of the workload that the strategy is planned for, in backward order."""
    strategy = planned.strategy
    numbers = messages_of(planned.plan)
    rows = []
    for variable in workload.variables:
        choice = strategy.by_name[variable.name]
        rows.append(
            VariableRow(
                variable,
                _distinct(synchronizer_text(shard) for shard in choice.shards)
                + (f", sparse: {choice.sparse}" if variable.sparse else ""),
                _partition(choice),
                _distinct(compressor_text(shard) for shard in choice.shards),
                numbers_text(
                    list(
                        dict.fromkeys(
                            shard.placement
                            for shard in choice.shards
                            if shard.placement is not None
                        )
                    )
                ),
                numbers_text(numbers[variable.name]),
            )
        )
    return rows


def whole_text(strategy: Strategy) -> str:
    """Describe the settings for all variables, in sentences; empty if there are none."""
    crossing = (
        "Synchronization and update run into the next forward pass." if strategy.cross_step else ""
    )
    if strategy.in_flight > 1:
        what = "pieces" if strategy.direct else "messages"
        crossing += f" {strategy.in_flight} {what} are under way at once on each lane."
    ring = (
        ""
        if strategy.ring_order is None
        else f"Ring order {', '.join(map(str, strategy.ring_order))}."
    )
    sets = len(strategy.op_fusion)
    ops = sum(len(names) for names in strategy.op_fusion)
    fusion = f"{ops} ops run as {sets} fused kernel{'s' * (sets > 1)}." if sets else ""
    remote = "" if strategy.local_copies else "Replicas read variables at their servers."
    return " ".join(sentence for sentence in (crossing.lstrip(), ring, fusion, remote) if sentence)


_SENT = {
    Synchronizer.ALL_REDUCE: "all-reduced",
    Synchronizer.REDUCE_SCATTER_ALL_GATHER: "reduce-scattered and gathered",
    Synchronizer.PARAMETER_SERVER: "pushed to servers",
    Synchronizer.REDUCE_BROADCAST: "reduced to one rank and broadcast",
    Synchronizer.DIRECT_EXCHANGE: "exchanged directly with their owners",
}


def plan_text(planned: Plan, current_messages: int = 0) -> str:
    """Say what the plan does in a phrase: "8 messages instead of 2, pushed to servers".

    `current_messages`: messages of the current setup; 0: not known.
    """
    total = sum(message.grad_bytes for message in planned.messages) or 1
    parts = []
    for synchronizer, words in _SENT.items():
        sent = [m.grad_bytes for m in planned.messages if m.synchronizer is synchronizer]
        share = sum(sent) / total
        if sent:
            parts.append((share, words if share > 0.995 else f"{max(share, 0.01):.0%} {words}"))
    count = len(planned.messages)
    phrases = [
        f"{count} message{'s' if count > 1 else ''}"
        + (f" instead of {current_messages}" if current_messages not in (0, count) else ""),
        ", ".join(words for _, words in sorted(parts, key=lambda part: -part[0])),
    ]
    cut = {part.variable for m in planned.messages for part in m.slices}
    slices = sum(len(message.slices) for message in planned.messages)
    if slices > len(cut):
        phrases.append("large variables in pieces")
    if any(message.hierarchical for message in planned.messages):
        phrases.append("first within each host")
    compressors = _distinct(
        message.compressor.value
        for message in planned.messages
        if message.compressor is not Compressor.NONE
    )
    if compressors:
        phrases.append(f"compressed by {compressors}")
    if planned.cross_step:
        half = "half of the exchange " if planned.results is not None else ""
        phrases.append(f"{half}running into the next forward pass")
    return ", ".join(phrases)


def messages_of(planned: Plan) -> dict[str, list[int]]:
    """Map each variable to the numbers of its messages, in issue order from 1."""
    numbers: dict[str, dict[int, None]] = {}
    for number, message in enumerate(planned.messages, start=1):
        for part in message.slices:
            numbers.setdefault(part.variable, {})[number] = None
    return {variable: list(held) for variable, held in numbers.items()}


@dataclass(frozen=True)
class MessageRow:
    """One message of a plan; number 1 is issued first."""

    number: int
    synchronizer: str
    compressor: str
    grad_bytes: int
    wire_bytes: int
    names: tuple[str, ...]
    owner: int | None


def message_rows(planned: Plan) -> list[MessageRow]:
    """Return the plan's messages in issue order."""
    return [
        MessageRow(
            number,
            synchronizer_text(message),
            compressor_text(message),
            message.grad_bytes,
            message.wire_bytes,
            tuple(dict.fromkeys(part.variable for part in message.slices)),
            message.owner,
        )
        for number, message in enumerate(planned.messages, start=1)
    ]


def compressor_text(one: Shard | Message) -> str:
    """Name the compressor and its parameter; empty if nothing is compressed."""
    if one.compressor is Compressor.NONE:
        return ""
    ratio, rank = (
        f" {one.ratio:g}" if one.ratio is not None else "",
        f" rank {one.rank}" if one.rank is not None else "",
    )
    costs = one.compressor.description.costs
    assumed = " (cost assumed)" if costs is not None and costs.source == ASSUMED else ""
    return one.compressor.value + ratio + rank + assumed


def numbers_text(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + (
        f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    )


def synchronizer_text(one: Shard | Message) -> str:
    """Name the synchronizer and its settings: "direct_exchange, shares 0.5, 0.5, 0, 2 pieces"."""
    shares = "" if one.shares is None else f", shares {shares_text(one.shares, SHOWN)}"
    pieces = "" if one.pieces == 1 else f", {one.pieces} pieces"
    return one.synchronizer.value + (", hierarchical" if one.hierarchical else "") + shares + pieces


def _partition(choice: VariableStrategy) -> str:
    if choice.partition is None:
        return ""
    sizes = choice.partition.sizes
    shown = (
        str(sizes[0])
        if len(set(sizes)) == 1
        else ", ".join(map(str, sizes[:SHOWN])) + (", ..." if len(sizes) > SHOWN else "")
    )
    return f"{len(sizes)} along axis {choice.partition.axis} ({shown})"


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value))
