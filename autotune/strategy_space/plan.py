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
    one message; those of a sparse gradient that does not travel dense are a message each. Messages are ordered by
    (lowest priority of their shards, backward position at which their last gradient is ready, first slice), which is
    the same on every rank. Raises `InvalidStrategy`.
    """
    choices = _choices(strategy, workload)
    if strategy.ring_order is not None and len(strategy.ring_order) != world_size:
        raise InvalidStrategy(f"ring_order must name all {world_size} ranks, but names {len(strategy.ring_order)}")
    kinds: dict[tuple[Any, ...], int] = {}
    kind_of: dict[int, int] = {}  # by identity: the thousands of shards of a strategy share few values
    collected: list[_Members] = []
    of_group: dict[tuple[int, str], _Members] = {}
    for position, (variable, choice) in enumerate(zip(workload.variables, choices, strict=True)):
        dtype, sparse = variable.dtype, choice.sparse
        if sparse is not SparseHandling.DENSE:
            _check_sparse(variable, choice)
        for shard, part in zip(choice.shards, slices_of(variable, choice), strict=True):
            kind = kind_of.get(id(shard))
            if kind is None:
                kind_of[id(shard)] = kind = kinds.setdefault(_kind(shard, variable, world_size), len(kinds))
            shared = shard.group is not None and sparse is SparseHandling.DENSE
            members = of_group.get((kind, dtype)) if shared else None
            if members is None:
                members = _Members(shard, dtype, sparse, position, part.start)
                collected.append(members)
                if shared:
                    of_group[kind, dtype] = members
            members.slices.append(part)
            members.last_ready = position
            if shard.priority < members.priority:
                members.priority = shard.priority
    collected.sort(key=_Members.issue_key)
    return Plan(workload.id, world_size, tuple(members.message() for members in collected), strategy.cross_step, strategy.ring_order)


_SPARSE_SYNCHRONIZERS = {
    SparseHandling.ALL_GATHER: (Synchronizer.ALL_REDUCE, Synchronizer.REDUCE_SCATTER_ALL_GATHER),
    SparseHandling.GATHER_SCATTER: (Synchronizer.PARAMETER_SERVER,),
}


def _check_sparse(variable: Variable, choice: VariableStrategy) -> None:
    if not variable.sparse:
        raise InvalidStrategy(
            f"sparse handling {choice.sparse} needs a variable with sparse gradients, but those of {variable.name!r} are dense; set "
            "sparse = dense"
        )
    allowed = _SPARSE_SYNCHRONIZERS[choice.sparse]
    for shard in choice.shards:
        if shard.synchronizer not in allowed:
            raise InvalidStrategy(
                f"sparse handling {choice.sparse} needs the synchronizer {' or '.join(allowed)}, but {variable.name!r} has "
                f"{shard.synchronizer}; change one of them"
            )


class _Members:
    """The shards of one message; built in backward order, so that the last one added is ready last."""

    __slots__ = ("dtype", "first", "first_start", "last_ready", "priority", "shard", "slices", "sparse")

    def __init__(self, shard: Shard, dtype: str, sparse: SparseHandling, position: int, start: int) -> None:
        self.shard, self.dtype, self.sparse = shard, dtype, sparse
        self.first, self.first_start, self.last_ready, self.priority = position, start, position, shard.priority
        self.slices: list[TensorSlice] = []

    def issue_key(self) -> tuple[int, int, int, int]:
        return self.priority, self.last_ready, self.first, self.first_start

    def message(self) -> Message:
        shard = self.shard
        return Message(
            slices=tuple(self.slices),
            primitive=_PRIMITIVE[shard.synchronizer],
            compressor=shard.compressor,
            dtype=self.dtype,
            owner=shard.placement,
            group=shard.group,
            hierarchical=shard.hierarchical,
            sparse=self.sparse,
            ratio=shard.ratio,
            rank=shard.rank,
        )


def _kind(shard: Shard, variable: Variable, world_size: int) -> tuple[Any, ...]:
    """What shards of one message have in common; everything but the priority."""
    if shard.placement is not None and shard.placement >= world_size:
        raise InvalidStrategy(f"placement of {variable.name!r} must be a rank below the world size {world_size}, but is {shard.placement}")
    return shard.group, shard.synchronizer, shard.compressor, shard.placement, shard.hierarchical, shard.ratio, shard.rank


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


def _choices(strategy: Strategy, workload: Workload) -> list[VariableStrategy]:
    """The strategy of each variable of the workload, in its order; raises `InvalidStrategy` where the names differ."""
    by_name = strategy.by_name
    try:
        found = [by_name[variable.name] for variable in workload.variables]
    except KeyError:
        found = []
    if len(found) == len(by_name):
        return found
    missing = sorted(set(workload.index) - set(by_name))
    unknown = sorted(set(by_name) - set(workload.index))
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
