"""A strategy: pure data that specifies how each gradient variable is synchronized.

Source: AutoSync, supplement sec. 6 and 8. A strategy validates itself; `plan()` checks that it fits
a workload and a world size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from autotune.canonical import LATER, canonical_json, content_id, to_data
from autotune.errors import InvalidStrategy
from autotune.hashing import hash_once, state_without_hash
from autotune.parsing import StrictBool, StrictFloat, StrictInt, parse, parse_json, refuse_newer
from autotune.strategy_space.compressors import (
    BUILT_IN,
    COMPRESSORS,
    CompressorDescription,
    plugin_description,
)
from autotune.strategy_space.shares import Shares, normal_shares, pieces_error, shares_error

SCHEMA = 1
MOST_IN_FLIGHT = 2
"""Collectives that gloo runs at once in one process group; NCCL runs one."""
MOST_DIRECT_IN_FLIGHT = 8
"""Pieces of direct exchanges under way at once: their sends bypass gloo's threads."""


class Synchronizer(StrEnum):
    """How the ranks sum a message."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER_ALL_GATHER = "reduce_scatter_all_gather"
    PARAMETER_SERVER = "parameter_server"  # every rank sends to the server and receives the sum
    REDUCE_BROADCAST = "reduce_broadcast"
    DIRECT_EXCHANGE = "direct_exchange"  # each rank sums the share that it owns, by plain sends

    @property
    def operation(self) -> str:
        """Its name in stored plans and as a probed operation."""
        return "push_pull" if self is Synchronizer.PARAMETER_SERVER else self.value


ROOTED = frozenset({Synchronizer.PARAMETER_SERVER, Synchronizer.REDUCE_BROADCAST})
"""Synchronizers whose shards live on one rank; the others are collectives without a root."""


class Compressor(StrEnum):
    """How a message is compressed: a built-in compressor, or `Compressor(name)` of a plugin.

    Members compare by identity, also those of plugins. Iteration yields the built-in ones.
    """

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    TOP_K = "top_k"
    POWER_SGD = "power_sgd"

    @classmethod
    def _missing_(cls, value: object) -> Compressor | None:
        if not isinstance(value, str):
            return None
        description = plugin_description(value)
        member = str.__new__(cls, value)
        member._name_, member._value_ = value.upper(), value
        _DESCRIPTIONS[value] = description
        known = cls._value2member_map_.setdefault(value, member)
        assert isinstance(known, Compressor)
        return known

    @classmethod
    def installed(cls) -> tuple[Compressor, ...]:
        """The built-in compressors, then those of plugins."""
        return (*cls, *(cls(name) for name in COMPRESSORS if name not in tuple(cls)))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Look names up first, so that the error for an unknown one is that of the registry."""
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(
            lambda value: cls(value) if isinstance(value, str) else value, handler(source)
        )

    @property
    def description(self) -> CompressorDescription:
        return _DESCRIPTIONS[self._value_]

    @property
    def error_feedback(self) -> bool:
        """Ranks keep what it loses and add it to the next step's gradient; casts lose it."""
        return self.description.error_feedback

    @property
    def is_quantiser(self) -> bool:
        """int8 or a plugin: payloads are runs of encoded elements."""
        return self.error_feedback and self.description.payload_bytes is not None


_DESCRIPTIONS = {description.name: description for description in BUILT_IN}
CASTS = frozenset({Compressor.FP16, Compressor.BF16})


class SparseHandling(StrEnum):
    """How the gradient of a sparse variable (the rows of an embedding) is sent."""

    DENSE = "dense"
    ALL_GATHER = "all_gather"  # indices and values
    GATHER_SCATTER = "gather_scatter"  # through a parameter server, or the owners of the rows


SPARSE_SYNCHRONIZERS = {
    SparseHandling.ALL_GATHER: (Synchronizer.ALL_REDUCE, Synchronizer.REDUCE_SCATTER_ALL_GATHER),
    SparseHandling.GATHER_SCATTER: (Synchronizer.PARAMETER_SERVER, Synchronizer.DIRECT_EXCHANGE),
}
"""The synchronizers that send rows as indices and values."""
SPARSE_COMPRESSORS = frozenset({Compressor.NONE, *CASTS})


@dataclass(frozen=True, slots=True)
class Partition:
    """A cut along `axis` into shards of `sizes`: extents along that axis, even or uneven."""

    __pydantic_config__ = {"extra": "forbid"}

    axis: StrictInt
    sizes: tuple[StrictInt, ...]

    def __post_init__(self) -> None:
        if self.axis < 0:
            raise InvalidStrategy(f"partition axis must be at least 0, but is {self.axis}")
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise InvalidStrategy(
                "a partition needs two or more shards of at least 1 row each, "
                f"but the sizes are {self.sizes}"
            )


@dataclass(frozen=True, slots=True)
class Shard:
    """How one shard is sent.

    `placement`: rank of the server (parameter server) or root (reduce + broadcast); None for
    collectives. `group`: shards of one group that agree in everything else form one message; None:
    a message of its own. `priority`: messages are issued by ascending priority, then in
    gradient-ready order. `ratio` (top-k: share of the elements sent) and `rank` (PowerSGD) belong
    to the compressor.

    A direct exchange has `shares`, one per rank with sum 1: each rank owns that share of the
    message and sums it. None: equal shares; a single 1.0: a parameter server. It sends the message
    in `pieces`: the push of one overlaps the sum and the pull of another. A partition cuts one
    variable into messages; pieces cut a message of many.
    """

    __pydantic_config__ = {"extra": "forbid"}

    synchronizer: Synchronizer
    compressor: Compressor = Compressor.NONE
    placement: StrictInt | None = None
    group: StrictInt | None = None
    priority: StrictInt = 0
    hierarchical: StrictBool = False
    ratio: StrictFloat | None = None
    rank: StrictInt | None = None
    shares: tuple[StrictFloat, ...] | None = field(default=None, metadata=LATER)
    pieces: StrictInt = field(default=1, metadata=LATER)

    def __post_init__(self) -> None:
        self._check_direct()
        rooted = self.synchronizer in ROOTED
        if rooted != (self.placement is not None):
            need = "a placement (the rank of its server)" if rooted else "no placement"
            raise InvalidStrategy(
                f"synchronizer {self.synchronizer} needs {need}, but placement is {self.placement}"
            )
        if self.placement is not None and self.placement < 0:
            raise InvalidStrategy(f"placement must be a rank >= 0, but is {self.placement}")
        if (self.compressor is Compressor.TOP_K) != (self.ratio is not None):
            raise InvalidStrategy(
                "compressor top_k, and only it, needs a ratio, "
                f"but {self.compressor} has {self.ratio}"
            )
        if self.ratio is not None:
            if not 0 < self.ratio <= 1:
                raise InvalidStrategy(f"top_k ratio must lie in (0, 1], but is {self.ratio}")
            object.__setattr__(self, "ratio", float(self.ratio))  # 1 would have another id
        if (self.compressor is Compressor.POWER_SGD) != (self.rank is not None):
            raise InvalidStrategy(
                "compressor power_sgd, and only it, needs a rank, "
                f"but {self.compressor} has {self.rank}"
            )
        if self.rank is not None and self.rank < 1:
            raise InvalidStrategy(f"power_sgd rank must be at least 1, but is {self.rank}")

    def _check_direct(self) -> None:
        if self.synchronizer is not Synchronizer.DIRECT_EXCHANGE:
            if self.shares is not None or self.pieces != 1:
                raise InvalidStrategy(
                    "synchronizer direct_exchange, and only it, has shares and pieces, "
                    f"but {self.synchronizer} has {self.shares} and {self.pieces}"
                )
            return
        reason = direct_error(self.compressor, self.shares, self.pieces)
        if reason is not None:
            raise InvalidStrategy(reason)
        object.__setattr__(self, "shares", normal_shares(self.shares))


@dataclass(frozen=True, slots=True)
class VariableStrategy:
    """One variable and its shards, in order along the partition axis; one if it is not cut."""

    __pydantic_config__ = {"extra": "forbid"}

    variable: str
    shards: tuple[Shard, ...]
    partition: Partition | None = None
    sparse: SparseHandling = SparseHandling.DENSE

    def __post_init__(self) -> None:
        expected = len(self.partition.sizes) if self.partition else 1
        if len(self.shards) != expected:
            raise InvalidStrategy(
                f"{self.variable!r} is cut into {expected} part(s) and needs as many shards, "
                f"but has {len(self.shards)}"
            )


OpFusionSets = tuple[tuple[str, ...], ...]
"""Sets of ops that are one kernel each. Ops have the names of one replica's captured graph."""


@dataclass(frozen=True)
class Strategy:
    """A choice for each variable of a workload, sorted by name: their order carries no meaning.

    `cross_step`: synchronization and update may continue into the next forward pass. `ring_order`:
    the ranks along the ring; None is rank order. `in_flight`: messages in flight per lane
    (ByteScheduler's credit, counted in messages), and pieces of direct exchanges in each of their
    two rounds. Within the step the library decides for all other messages. `op_fusion`: sets of ops
    of the model's graph, by name; each set is one kernel.
    `local_copies`: replicas read a copy of a parameter server's variable that each step refreshes
    (AutoDist's proxy); else they read it at the server.
    """

    __pydantic_config__ = {"extra": "forbid"}

    variables: tuple[VariableStrategy, ...]
    cross_step: StrictBool = False
    ring_order: tuple[StrictInt, ...] | None = None
    schema: StrictInt = SCHEMA
    in_flight: StrictInt = field(default=1, metadata=LATER)
    op_fusion: OpFusionSets = field(default=(), metadata=LATER)
    local_copies: StrictBool = field(default=True, metadata=LATER)

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise InvalidStrategy(
                f"this version reads strategy schema {SCHEMA}, "
                f"but the strategy has {self.schema}; update autotune"
            )
        names = [choice.variable for choice in self.variables]
        if not names:
            raise InvalidStrategy("a strategy needs at least one variable")
        if len(set(names)) != len(names):
            raise InvalidStrategy("a strategy names each variable once, but some occur twice")
        if names != sorted(names):
            by_name = sorted(self.variables, key=lambda choice: choice.variable)
            object.__setattr__(self, "variables", tuple(by_name))
        ring = self.ring_order
        if ring is not None and sorted(ring) != list(range(len(ring))):
            raise InvalidStrategy(f"ring_order must be a permutation of the ranks, but is {ring}")
        if self.in_flight != 1:
            reason = in_flight_error(self.in_flight, self.cross_step, self.direct)
            if reason is not None:
                raise InvalidStrategy(reason)
        if self.op_fusion:
            object.__setattr__(self, "op_fusion", checked_fusion(self.op_fusion))

    __hash__ = hash_once
    __getstate__ = state_without_hash

    @cached_property
    def _hash(self) -> int:
        """Computed once, with one hash for each distinct shard object; never pickled.

        Equal for strategies that differ only in partitions into as many shards.
        """
        known: dict[int, int] = {}
        hashes: list[int] = []
        for choice in self.variables:
            for shard in choice.shards:
                if id(shard) not in known:
                    known[id(shard)] = hash(shard)
                hashes.append(known[id(shard)])
        order = self.cross_step, self.ring_order, self.in_flight
        return hash((tuple(hashes), order, self.op_fusion))

    @cached_property
    def id(self) -> str:
        return content_id("strategy", self)

    @cached_property
    def by_name(self) -> dict[str, VariableStrategy]:
        return {choice.variable: choice for choice in self.variables}

    @cached_property
    def direct(self) -> bool:
        """Whether a shard is exchanged directly."""
        return any(
            shard.synchronizer is Synchronizer.DIRECT_EXCHANGE
            for choice in self.variables
            for shard in choice.shards
        )

    @property
    def limit(self) -> int | None:
        """Most collectives in flight per lane; None within the step, where the library decides."""
        return min(self.in_flight, MOST_IN_FLIGHT) if self.cross_step else None

    @property
    def lossless(self) -> bool:
        """Whether no shard is compressed."""
        return all(
            shard.compressor is Compressor.NONE
            for choice in self.variables
            for shard in choice.shards
        )

    def to_json(self) -> str:
        return canonical_json(self)

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = to_data(self)
        return data

    @staticmethod
    def from_data(data: Any, where: str = "strategy") -> Strategy:
        refuse_newer(data, SCHEMA, "strategy", where)
        return parse(Strategy, data, where)

    @staticmethod
    def from_json(text: str, where: str = "strategy") -> Strategy:
        return Strategy.from_data(parse_json(text, where), where)


def checked_fusion(op_fusion: OpFusionSets) -> OpFusionSets:
    """Sort the sets and their ops. Raises `InvalidStrategy` for an op in two sets, or alone."""
    in_order = tuple(sorted(tuple(sorted(names)) for names in op_fusion))
    total = Counter(name for names in in_order for name in names)
    twice = sorted(name for name, times in total.items() if times > 1)
    if twice:
        raise InvalidStrategy(
            f"an op belongs to one set of op_fusion, but {', '.join(twice[:3])} to several"
        )
    if any(len(names) < 2 for names in in_order):
        raise InvalidStrategy("a set of op_fusion needs at least 2 ops, but one has fewer")
    return in_order


def in_flight_error(in_flight: int, cross_step: bool, direct: bool) -> str | None:
    """Return the rule that this number of messages in flight breaks, or None.

    `direct`: whether the strategy has direct exchanges.
    """
    most = MOST_DIRECT_IN_FLIGHT if direct else MOST_IN_FLIGHT if cross_step else 1
    if 1 <= in_flight <= most:
        return None
    return (
        f"in_flight must be from 1 to {MOST_DIRECT_IN_FLIGHT} with direct exchanges, otherwise "
        f"from 1 to {MOST_IN_FLIGHT} across steps and 1 within the step, "
        f"but is {in_flight}, cross_step: {cross_step}, direct exchanges: {direct}"
    )


def direct_error(compressor: Compressor, shares: Shares | None, pieces: int) -> str | None:
    """Return the rule that a direct exchange breaks, or None."""
    if pieces > 1 and compressor.error_feedback:
        return (
            f"compressor {compressor} needs the whole message, but a direct exchange has {pieces} "
            "pieces; set pieces = 1, or cut its variables by a partition"
        )
    return pieces_error(pieces) or (None if shares is None else shares_error(tuple(shares)))
