"""A strategy: pure data that says, for every gradient variable, how it is synchronized.

Source: AutoSync, supplement sec. 6 and 8; the remaining fields are REQUIREMENTS row A1.
A strategy validates itself on its own; that it fits a workload and a world is checked by `plan()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from autotune.canonical import LATER, canonical_json, content_id, to_data
from autotune.errors import InvalidStrategy
from autotune.parsing import parse, parse_json, refuse_newer
from autotune.strategy_space.compressors import (
    BUILT_IN,
    COMPRESSORS,
    CompressorDescription,
    plugin_description,
)

SCHEMA = 1
MOST_IN_FLIGHT = 2
"""Of one process group, gloo has no more collectives under way, and NCCL one."""


class Synchronizer(StrEnum):
    """What the ranks do together to sum a message."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER_ALL_GATHER = "reduce_scatter_all_gather"
    PARAMETER_SERVER = "parameter_server"  # every rank sends to the server and receives the sum
    REDUCE_BROADCAST = "reduce_broadcast"

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
    """How the gradient of a sparse variable (an embedding's rows) travels."""

    DENSE = "dense"
    ALL_GATHER = "all_gather"  # indices and values
    GATHER_SCATTER = "gather_scatter"  # through a parameter server


SPARSE_SYNCHRONIZERS = {
    SparseHandling.ALL_GATHER: (Synchronizer.ALL_REDUCE, Synchronizer.REDUCE_SCATTER_ALL_GATHER),
    SparseHandling.GATHER_SCATTER: (Synchronizer.PARAMETER_SERVER,),
}
"""The synchronizers that indices and values travel by."""
SPARSE_COMPRESSORS = frozenset({Compressor.NONE, *CASTS})


@dataclass(frozen=True, slots=True)
class Partition:
    """Cut along `axis` into shards of `sizes` (extents along that axis, even or uneven)."""

    __pydantic_config__ = {"extra": "forbid"}

    axis: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.axis < 0:
            raise InvalidStrategy(f"partition axis must be at least 0, but is {self.axis}")
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise InvalidStrategy(
                f"a partition needs two or more shards of at least 1 row each, but the sizes are {self.sizes}"
            )


@dataclass(frozen=True, slots=True)
class Shard:
    """How one shard is sent.

    `placement`: rank of the server (parameter server) or root (reduce + broadcast); None for collectives.
    `group`: shards of one group that agree in everything else are sent as one message; None: alone.
    `priority`: messages are issued by ascending priority, then in gradient-ready order.
    `ratio` (top-k: share of elements kept) and `rank` (PowerSGD) belong to the compressor.
    """

    __pydantic_config__ = {"extra": "forbid"}

    synchronizer: Synchronizer
    compressor: Compressor = Compressor.NONE
    placement: int | None = None
    group: int | None = None
    priority: int = 0
    hierarchical: bool = False
    ratio: float | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
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
                f"compressor top_k, and only it, needs a ratio, but {self.compressor} has {self.ratio}"
            )
        if self.ratio is not None and not 0 < self.ratio <= 1:
            raise InvalidStrategy(f"top_k ratio must lie in (0, 1], but is {self.ratio}")
        if (self.compressor is Compressor.POWER_SGD) != (self.rank is not None):
            raise InvalidStrategy(
                f"compressor power_sgd, and only it, needs a rank, but {self.compressor} has {self.rank}"
            )
        if self.rank is not None and self.rank < 1:
            raise InvalidStrategy(f"power_sgd rank must be at least 1, but is {self.rank}")


@dataclass(frozen=True, slots=True)
class VariableStrategy:
    """One variable: its shards, in order along the partition axis (one shard if not partitioned)."""

    __pydantic_config__ = {"extra": "forbid"}

    variable: str
    shards: tuple[Shard, ...]
    partition: Partition | None = None
    sparse: SparseHandling = SparseHandling.DENSE

    def __post_init__(self) -> None:
        expected = len(self.partition.sizes) if self.partition else 1
        if len(self.shards) != expected:
            raise InvalidStrategy(
                f"{self.variable!r} is cut into {expected} part(s) and needs as many shards, but has {len(self.shards)}"
            )


@dataclass(frozen=True)
class Strategy:
    """All variables of a workload. The order of `variables` carries no meaning and is kept sorted by name.

    `cross_step`: synchronization and update may run into the next forward pass.
    `ring_order`: the ranks along the ring; None for rank order. `in_flight`: with `cross_step`, how many messages are under way at once
    on each lane, that is with the same step (ByteScheduler's credit, counted in messages); within the step it is the library's choice.
    """

    __pydantic_config__ = {"extra": "forbid"}

    variables: tuple[VariableStrategy, ...]
    cross_step: bool = False
    ring_order: tuple[int, ...] | None = None
    schema: int = SCHEMA
    in_flight: int = field(default=1, metadata=LATER)

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise InvalidStrategy(
                f"this version reads strategy schema {SCHEMA}, but the strategy has {self.schema}; update autotune"
            )
        names = [choice.variable for choice in self.variables]
        if not names:
            raise InvalidStrategy("a strategy needs at least one variable")
        if len(set(names)) != len(names):
            raise InvalidStrategy(
                "a strategy names each variable once, but some occur more than once"
            )
        if names != sorted(names):
            object.__setattr__(
                self, "variables", tuple(sorted(self.variables, key=lambda choice: choice.variable))
            )
        if self.ring_order is not None and sorted(self.ring_order) != list(
            range(len(self.ring_order))
        ):
            raise InvalidStrategy(
                f"ring_order must be a permutation of the ranks, but is {self.ring_order}"
            )
        reason = in_flight_error(self.in_flight, self.cross_step)
        if reason is not None:
            raise InvalidStrategy(reason)

    @cached_property
    def id(self) -> str:
        return content_id("strategy", self)

    @cached_property
    def by_name(self) -> dict[str, VariableStrategy]:
        return {choice.variable: choice for choice in self.variables}

    @property
    def limit(self) -> int | None:
        """How many messages a lane has under way at most; None within the step, where the library decides."""
        return self.in_flight if self.cross_step else None

    @property
    def lossless(self) -> bool:
        """True if no shard is compressed."""
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


def in_flight_error(in_flight: int, cross_step: bool) -> str | None:
    """The rule that so many messages in flight break, of a strategy or a plan; None where they break none."""
    if 1 <= in_flight <= (MOST_IN_FLIGHT if cross_step else 1):
        return None
    return f"in_flight must be from 1 to {MOST_IN_FLIGHT} across steps and 1 within the step, but is {in_flight}, cross_step: {cross_step}"
