"""From a strategy to the plan: the ordered list of messages that every rank sends.

The plan is the contract: it is lowered to the graph that we simulate, and enacted in the run that
we measure. It names tensors, ranks and synchronizers, and no framework.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from autotune.canonical import LATER, canonical_json, content_id, stored_as, to_data
from autotune.errors import InvalidInput, InvalidStrategy
from autotune.hashing import hash_once, state_without_hash
from autotune.parsing import parse, parse_json, refuse_newer, schema_of_stored
from autotune.strategy_space.result_order import result_order
from autotune.strategy_space.shares import Shares
from autotune.strategy_space.strategy import (
    MOST_IN_FLIGHT,
    Compressor,
    OpFusionSets,
    Partition,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.strategy_space.validation import check_partition, check_shard, check_sparse
from autotune.workload import DTYPE_BYTES, Variable, Workload

SCHEMA = 1


_OPERATIONS = {kind: kind.operation for kind in Synchronizer}


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Rows `start:stop` along `axis` of a variable's gradient; the whole tensor if `axis` is None.

    `rows`: extent of the slice's first axis if it has two or more axes, else 1. PowerSGD treats the
    slice as a matrix of this many rows.
    """

    __pydantic_config__ = {"extra": "forbid"}

    variable: str
    elements: int
    axis: int | None = None
    start: int = 0
    stop: int = 0
    rows: int = 1


@dataclass(frozen=True)
class Message:
    """Slices that are sent together. An empty `ranks` means every rank of the world.

    `group`: the label that the slices' shards shared; it only enters the id of the plan.
    `shares` and `pieces` belong to a direct exchange (see `Shard`).
    """

    __pydantic_config__ = {"extra": "forbid"}

    slices: tuple[TensorSlice, ...]
    synchronizer: Synchronizer = field(metadata=stored_as("primitive", _OPERATIONS))
    compressor: Compressor
    dtype: str
    owner: int | None = None
    group: int | None = None
    hierarchical: bool = False
    sparse: SparseHandling = SparseHandling.DENSE
    ratio: float | None = None
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    shares: Shares | None = field(default=None, metadata=LATER)
    pieces: int = field(default=1, metadata=LATER)

    __get_pydantic_core_schema__ = classmethod(schema_of_stored)

    def __post_init__(self) -> None:
        if self.ratio is not None:
            if not 0 < self.ratio <= 1:
                raise InvalidInput(
                    f"the ratio of a message must lie in (0, 1], but is {self.ratio}"
                )
            object.__setattr__(self, "ratio", float(self.ratio))  # 1 would have another id

    __hash__ = hash_once
    __getstate__ = state_without_hash

    @cached_property
    def _hash(self) -> int:
        """Computed once, since a search looks every plan up several times; never pickled.

        Equal for messages that differ only in slices between the first and the last, which are few.
        """
        first, last = self.slices[0], self.slices[-1]
        ends = first.variable, first.start, last.variable, last.start, len(self.slices)
        return hash((ends, self.elements, self.synchronizer, self.owner, self.group, self.pieces))

    @cached_property
    def elements(self) -> int:
        return sum(part.elements for part in self.slices)

    @property
    def grad_bytes(self) -> int:
        """Size before compression."""
        return self.elements * DTYPE_BYTES[self.dtype]

    @cached_property
    def wire_bytes(self) -> int:
        """c(m) of Eq. 2 and 3: size of the compressed message.

        A sparse gradient counts as if a step touched every row.
        """
        element_bytes = DTYPE_BYTES[self.dtype]
        payload_bytes = self.compressor.description.payload_bytes
        if payload_bytes is not None:
            return payload_bytes(self.elements, element_bytes)
        if self.compressor is Compressor.TOP_K:
            assert self.ratio is not None
            sent = math.ceil(self.elements * self.ratio)
            return sent * (element_bytes + 4)  # values and int32 indices
        assert self.rank is not None
        return element_bytes * sum(_factor_elements(part, self.rank) for part in self.slices)


def _factor_elements(part: TensorSlice, rank: int) -> int:
    """Elements of PowerSGD's two factors; those of the slice itself if that is smaller."""
    columns = part.elements // max(part.rows, 1)
    return min(part.elements, rank * (part.rows + columns))


@dataclass(frozen=True)
class Plan:
    """The `messages` in issue order: every rank starts them in exactly this order.

    `op_fusion`: sets of ops of the model's graph; each set is one kernel on every rank.
    `local_copies`: replicas read a copy of a parameter server's variable; else they read it there.
    `results`: messages, by number, in the order in which their owners send the sums once the norms
    of all gradients are known; None: no sum waits for norms.
    """

    __pydantic_config__ = {"extra": "forbid"}

    workload_id: str
    world_size: int
    messages: tuple[Message, ...]
    cross_step: bool = False
    ring_order: tuple[int, ...] | None = None
    schema: int = SCHEMA
    in_flight: int = field(default=1, metadata=LATER)
    op_fusion: OpFusionSets = field(default=(), metadata=LATER)
    local_copies: bool = field(default=True, metadata=LATER)
    results: tuple[int, ...] | None = field(default=None, metadata=LATER)

    @cached_property
    def direct(self) -> bool:
        """Whether a message is exchanged directly."""
        return any(
            message.synchronizer is Synchronizer.DIRECT_EXCHANGE for message in self.messages
        )

    @property
    def limit(self) -> int | None:
        """Most collectives in flight per lane; None within the step, where the library decides.

        Direct exchanges have at most `in_flight` pieces in each of their two rounds instead.
        """
        return min(self.in_flight, MOST_IN_FLIGHT) if self.cross_step else None

    @cached_property
    def id(self) -> str:
        """The hash that all ranks compare."""
        return content_id("plan", self)

    @cached_property
    def enacted_id(self) -> str:
        """The hash of what the ranks do: plans that differ only in the labels of groups share it.

        Nothing reads the label once the shards of a group are one message.
        """
        if all(message.group is None for message in self.messages):
            return self.id
        unlabelled = (
            message if message.group is None else replace(message, group=None)
            for message in self.messages
        )
        return replace(self, messages=tuple(unlabelled)).id

    @cached_property
    def wire_bytes(self) -> int:
        return sum(message.wire_bytes for message in self.messages)

    @property
    def slice_count(self) -> int:
        return sum(len(message.slices) for message in self.messages)

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
    """Plan the messages of `strategy` for this workload and number of ranks.

    Shards that share a group and agree in everything but the priority become one message, per
    dtype. Rows of a sparse gradient are a message per shard. Messages are sorted by (lowest
    priority of their shards, backward position of the last gradient, first slice), which gives the
    same order on every rank. If the strategy crosses the step and the script reads norms,
    priorities have no effect: all sums are needed before the norms, and `results` has the order
    after them. Raises `InvalidStrategy`.
    """
    choices = _choices(strategy, workload)
    if strategy.ring_order is not None and len(strategy.ring_order) != world_size:
        raise InvalidStrategy(
            f"ring_order must name all {world_size} ranks, but names {len(strategy.ring_order)}"
        )
    in_rank_order = strategy.ring_order == tuple(range(world_size))
    issued: list[tuple[int, int, int, int, Message]] = []  # each with its sort key
    groups = _Groups(world_size)
    dense = SparseHandling.DENSE  # looking up a member of an enumeration takes as long as a call
    known, known_for = groups.known("", dense), ("", dense)
    for position, (variable, choice) in enumerate(zip(workload.variables, choices, strict=True)):
        dtype, sparse = variable.dtype, choice.sparse
        if sparse is not known_for[1] or dtype != known_for[0]:
            known, known_for = groups.known(dtype, sparse), (dtype, sparse)
        if sparse is not dense:
            check_sparse(variable, choice)
        elif choice.partition is None:  # most variables join a known message
            members = known.get(id(choice.shards[0]))
            if members is not None:
                shape = variable.shape
                rows = shape[0] if len(shape) > 1 else 1
                members.slices += _whole(variable.name, variable.elements, rows)
                members.last_ready = position
                continue
        for shard, part in zip(choice.shards, cut(variable, choice.partition), strict=True):
            if id(shard) not in known:
                known[id(shard)] = groups.members(shard, variable, sparse, position)
            members = known[id(shard)]
            if members is None:
                message = message_of(shard, (part,), dtype, sparse)
                issued.append((shard.priority, position, position, part.start, message))
            else:
                members.slices.append(part)
                members.last_ready = position
    issued.extend(members.issued() for members in groups.of_kind.values())
    reads_norms = strategy.cross_step and workload.reads_norms
    issued.sort(key=(lambda entry: entry[1:4]) if reads_norms else None)
    messages = tuple([entry[4] for entry in issued])
    return Plan(
        workload.id,
        world_size,
        messages,
        strategy.cross_step,
        None if in_rank_order else strategy.ring_order,
        in_flight=strategy.in_flight,
        op_fusion=strategy.op_fusion,
        local_copies=strategy.local_copies,
        results=_results(messages, workload) if reads_norms else None,
    )


def with_messages(base: Plan, messages: tuple[Message, ...], workload: Workload) -> Plan:
    """Return `base` with these messages instead of its own, in their order."""
    results = None if base.results is None else _results(messages, workload)
    return replace(base, messages=messages, results=results)


def _results(messages: Sequence[Message], workload: Workload) -> tuple[int, ...]:
    names = [[part.variable for part in message.slices] for message in messages]
    return result_order(names, workload)


@dataclass(frozen=True)
class PlannedStrategy:
    """A strategy with its plan for one workload and world size, planned once and handed on."""

    strategy: Strategy
    plan: Plan

    @staticmethod
    def of(strategy: Strategy, workload: Workload, world_size: int) -> PlannedStrategy:
        """Plan `strategy`. Raises `InvalidStrategy`."""
        return PlannedStrategy(strategy, plan(strategy, workload, world_size))


class _Members:
    """The shards of one message, added in backward order, so the last one is ready last."""

    __slots__ = ("dtype", "first", "last_ready", "priority", "shard", "slices", "sparse")

    def __init__(self, shard: Shard, dtype: str, sparse: SparseHandling, first: int) -> None:
        self.shard, self.dtype, self.sparse, self.priority = shard, dtype, sparse, shard.priority
        self.first = self.last_ready = first
        self.slices: list[TensorSlice] = []

    def issued(self) -> tuple[int, int, int, int, Message]:
        message = message_of(self.shard, self.slices, self.dtype, self.sparse)
        return self.priority, self.last_ready, self.first, self.slices[0].start, message


class _Groups:
    """Which shards form one message.

    A strategy's thousands of shards are few distinct objects, and each object is examined once.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.of_kind: dict[tuple[Any, ...], _Members] = {}
        self._known: dict[tuple[str, SparseHandling], dict[int, _Members | None]] = {}

    def known(self, dtype: str, sparse: SparseHandling) -> dict[int, _Members | None]:
        """Return the message of each examined shard with this dtype and handling, by `id`."""
        return self._known.setdefault((dtype, sparse), {})

    def members(
        self, shard: Shard, variable: Variable, sparse: SparseHandling, position: int
    ) -> _Members | None:
        """Return the message of a shard that was not examined yet; None if it is sent alone.

        `position`: that of the variable, in backward order.
        """
        check_shard(shard, variable, self.world_size)
        if shard.group is None or sparse is not SparseHandling.DENSE:
            return None
        # everything but the priority
        kind = (
            shard.group,
            shard.synchronizer,
            shard.compressor,
            shard.placement,
            shard.hierarchical,
            shard.ratio,
            shard.rank,
            shard.shares,
            shard.pieces,
        )
        key = (*kind, variable.dtype)
        members = self.of_kind.get(key)
        if members is None:
            members = self.of_kind[key] = _Members(shard, variable.dtype, sparse, position)
        members.priority = min(members.priority, shard.priority)
        return members


def message_of(
    shard: Shard, slices: Iterable[TensorSlice], dtype: str, sparse: SparseHandling
) -> Message:
    """Build the message that sends `slices` as `shard` specifies."""
    return Message(
        tuple(slices),
        shard.synchronizer,
        shard.compressor,
        dtype,
        shard.placement,
        shard.group,
        shard.hierarchical,
        sparse,
        shard.ratio,
        shard.rank,
        shares=shard.shares,
        pieces=shard.pieces,
    )


def slices_of(variable: Variable, choice: VariableStrategy) -> Sequence[TensorSlice]:
    """Return the slices of a variable, in shard order; they cover every element once."""
    return cut(variable, choice.partition)


def cut(variable: Variable, partition: Partition | None) -> Sequence[TensorSlice]:
    """Cut a variable into the slices of `partition`. Raises `InvalidStrategy` for a misfit."""
    shape = variable.shape
    if partition is None:
        return _whole(variable.name, variable.elements, shape[0] if len(shape) > 1 else 1)
    check_partition(variable, partition)
    axis = partition.axis
    row_elements = variable.elements // shape[axis]
    slices, start = [], 0
    for size in partition.sizes:
        rows = 1 if len(shape) == 1 else size if axis == 0 else shape[0]
        slices.append(
            TensorSlice(variable.name, size * row_elements, axis, start, start + size, rows)
        )
        start += size
    return slices


@lru_cache(maxsize=1 << 14)  # most variables of most strategies are whole
def _whole(name: str, elements: int, rows: int) -> tuple[TensorSlice]:
    return (TensorSlice(name, elements, rows=rows),)


def _choices(strategy: Strategy, workload: Workload) -> list[VariableStrategy]:
    """Return the choice of each variable of the workload, in its order.

    Raises `InvalidStrategy` if the names differ.
    """
    by_name = strategy.by_name
    choices = [by_name[v.name] for v in workload.variables if v.name in by_name]
    if len(choices) == len(by_name) == len(workload.variables):
        return choices
    missing = sorted(set(workload.index) - set(by_name))
    unknown = sorted(set(by_name) - set(workload.index))
    parts = [
        f"lacks {', '.join(missing[:3])}" if missing else "",
        f"has the unknown {', '.join(unknown[:3])}" if unknown else "",
    ]
    raise InvalidStrategy(
        f"a strategy must name exactly the {len(workload.variables)} variables "
        f"of model {workload.model!r}, but it {' and '.join(part for part in parts if part)}"
    )
