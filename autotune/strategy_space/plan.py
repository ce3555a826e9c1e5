"""From a strategy to the plan: the ordered list of messages that every rank sends.

The plan is the contract (ARCHITECTURE): it is lowered to what is simulated and enacted by what is
measured. It names tensors, ranks and primitives, and no framework.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from autotune.canonical import canonical_json, content_id, to_data
from autotune.errors import InvalidStrategy
from autotune.parsing import parse, parse_json, refuse_newer
from autotune.strategy_space.strategy import Compressor, Partition, Shard, SparseHandling, Strategy, Synchronizer, VariableStrategy
from autotune.workload import DTYPE_BYTES, Variable, Workload

SCHEMA = 1


class Primitive(StrEnum):
    """What the ranks of a message do together."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER_ALL_GATHER = "reduce_scatter_all_gather"
    PUSH_PULL = "push_pull"  # every rank sends to the owner, the owner sums and sends back to every rank
    REDUCE_BROADCAST = "reduce_broadcast"


_PRIMITIVE = {
    Synchronizer.ALL_REDUCE: Primitive.ALL_REDUCE,
    Synchronizer.REDUCE_SCATTER_ALL_GATHER: Primitive.REDUCE_SCATTER_ALL_GATHER,
    Synchronizer.PARAMETER_SERVER: Primitive.PUSH_PULL,
    Synchronizer.REDUCE_BROADCAST: Primitive.REDUCE_BROADCAST,
}

_WIRE_BYTES = {Compressor.FP16: 2, Compressor.BF16: 2, Compressor.INT8: 1}


@dataclass(frozen=True)
class TensorSlice:
    """Rows `start:stop` along `axis` of a variable's gradient; axis None is the whole tensor."""

    __pydantic_config__ = {"extra": "forbid"}

    variable: str
    elements: int
    axis: int | None = None
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Message:
    """Slices that travel together. `ranks` is empty where every rank of the world takes part."""

    __pydantic_config__ = {"extra": "forbid"}

    slices: tuple[TensorSlice, ...]
    primitive: Primitive
    compressor: Compressor
    dtype: str
    owner: int | None = None
    group: int | None = None
    hierarchical: bool = False
    sparse: SparseHandling = SparseHandling.DENSE
    ratio: float | None = None
    rank: int | None = None
    ranks: tuple[int, ...] = ()

    @cached_property
    def elements(self) -> int:
        return sum(part.elements for part in self.slices)

    @property
    def grad_bytes(self) -> int:
        """Size before compression."""
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def wire_bytes(self) -> int:
        """c(m) of Eq. 2 and 3: size of the compressed message."""
        if self.compressor is Compressor.TOP_K:
            assert self.ratio is not None
            return math.ceil(self.elements * self.ratio) * (DTYPE_BYTES[self.dtype] + 4)  # values and int32 indices
        if self.compressor is Compressor.POWER_SGD:
            assert self.rank is not None
            side = math.isqrt(max(self.elements, 1))  # P and Q of the most nearly square matrix
            return min(self.grad_bytes, 2 * side * self.rank * DTYPE_BYTES[self.dtype])
        return self.elements * min(_WIRE_BYTES.get(self.compressor, 8), DTYPE_BYTES[self.dtype])


@dataclass(frozen=True)
class Plan:
    """`messages` stand in issue order: every rank starts them in exactly this order."""

    __pydantic_config__ = {"extra": "forbid"}

    workload_id: str
    world_size: int
    messages: tuple[Message, ...]
    cross_step: bool = False
    ring_order: tuple[int, ...] | None = None
    schema: int = SCHEMA

    @cached_property
    def id(self) -> str:
        """The hash that the ranks compare."""
        return content_id("plan", self)

    @cached_property
    def wire_bytes(self) -> int:
        return sum(message.wire_bytes for message in self.messages)

    def to_json(self) -> str:
        return canonical_json(self)

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = to_data(self)
        return data

    @staticmethod
    def from_json(text: str, where: str = "plan") -> Plan:
        data = parse_json(text, where)
        refuse_newer(data, SCHEMA, "plan", where)
        return parse(Plan, data, where)


def plan(strategy: Strategy, workload: Workload, world_size: int) -> Plan:
    """The messages that `strategy` means for this workload and number of ranks.

    Shards that share a group and agree in synchronizer, compressor, placement, hierarchy and dtype become
    one message. Messages are ordered by (lowest priority of their shards, backward position at which their
    last gradient is ready, first slice), which is the same on every rank. Raises `InvalidStrategy`.
    """
    _check_names(strategy, workload)
    if strategy.ring_order is not None and len(strategy.ring_order) != world_size:
        raise InvalidStrategy(f"ring_order must name all {world_size} ranks, but names {len(strategy.ring_order)}")
    collected: dict[tuple[Any, ...], list[tuple[int, Shard, TensorSlice]]] = {}
    for position, variable in enumerate(workload.variables):
        choice = strategy.by_name[variable.name]
        for number, (shard, part) in enumerate(zip(choice.shards, slices_of(variable, choice), strict=True)):
            if shard.placement is not None and shard.placement >= world_size:
                raise InvalidStrategy(
                    f"placement of {variable.name!r} must be a rank below the world size {world_size}, but is {shard.placement}"
                )
            own = (-1, position, number) if shard.group is None else (shard.group, -1, -1)
            key = (
                own,
                shard.synchronizer,
                shard.compressor,
                shard.placement,
                shard.hierarchical,
                shard.ratio,
                shard.rank,
                variable.dtype,
                choice.sparse,
            )
            collected.setdefault(key, []).append((position, shard, part))
    ordered = sorted(collected.items(), key=lambda item: _issue_key(item[1]))
    messages = tuple(_message(workload, strategy, members) for _, members in ordered)
    return Plan(workload.id, world_size, messages, strategy.cross_step, strategy.ring_order)


def slices_of(variable: Variable, choice: VariableStrategy) -> list[TensorSlice]:
    """The slices of one variable, in shard order; they cover every element once."""
    partition = choice.partition
    if partition is None:
        return [TensorSlice(variable.name, variable.elements)]
    _check_partition(variable, partition)
    row_elements = variable.elements // variable.shape[partition.axis]
    slices, start = [], 0
    for size in partition.sizes:
        slices.append(TensorSlice(variable.name, size * row_elements, partition.axis, start, start + size))
        start += size
    return slices


def _issue_key(members: list[tuple[int, Shard, TensorSlice]]) -> tuple[int, int, int, int]:
    priority = min(shard.priority for _, shard, _ in members)
    last_ready = max(position for position, _, _ in members)
    return priority, last_ready, members[0][0], members[0][2].start


def _message(workload: Workload, strategy: Strategy, members: list[tuple[int, Shard, TensorSlice]]) -> Message:
    position, shard, _ = members[0]
    variable = workload.variables[position]
    return Message(
        slices=tuple(part for _, _, part in members),
        primitive=_PRIMITIVE[shard.synchronizer],
        compressor=shard.compressor,
        dtype=variable.dtype,
        owner=shard.placement,
        group=shard.group,
        hierarchical=shard.hierarchical,
        sparse=strategy.by_name[variable.name].sparse,
        ratio=shard.ratio,
        rank=shard.rank,
    )


def _check_names(strategy: Strategy, workload: Workload) -> None:
    missing = sorted(set(workload.index) - set(strategy.by_name))
    unknown = sorted(set(strategy.by_name) - set(workload.index))
    if missing or unknown:
        parts = [f"lacks {', '.join(missing[:3])}" if missing else "", f"has the unknown {', '.join(unknown[:3])}" if unknown else ""]
        raise InvalidStrategy(
            f"a strategy must name exactly the {len(workload.variables)} variables of model {workload.model!r}, but it "
            + " and ".join(part for part in parts if part)
        )


def _check_partition(variable: Variable, partition: Partition) -> None:
    if partition.axis >= len(variable.shape):
        raise InvalidStrategy(
            f"partition axis {partition.axis} needs a tensor of more dimensions, but {variable.name!r} has shape {variable.shape}"
        )
    extent = variable.shape[partition.axis]
    if sum(partition.sizes) != extent:
        raise InvalidStrategy(
            f"partition sizes along axis {partition.axis} must sum to {extent}, but those of {variable.name!r} with shape "
            f"{variable.shape} sum to {sum(partition.sizes)}"
        )
    if variable.sparse and partition.axis != 0:
        raise InvalidStrategy(
            f"the sparse variable {variable.name!r} can be cut along axis 0 only, but the partition axis is {partition.axis}"
        )
