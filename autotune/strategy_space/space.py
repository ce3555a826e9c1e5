"""Which strategies may be proposed: what the runtime enacts, and the bounds of the random sampler.

Source of the bounds: the strategy generator of petuum/autodist, the code of AutoSync (NeurIPS 2020, supplement
sec. 6 and 8): variables below 100 kB stay whole, a partitioned one has 2 to 40 shards along one axis (sparse
variables: axis 0), collective shards are merged into at most 20 groups, and reduction is hierarchical only
where a host has more than one device.

The order of the ranks along the ring is varied by hosts, and only where it can matter: a ring visits every host, so between
equal hosts each order is like the others, and so it is with three hosts, which are neighbours in every ring.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.strategy_space.strategy import (
    MOST_IN_FLIGHT,
    SPARSE_SYNCHRONIZERS,
    Compressor,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

_COMPRESSIBLE = (
    "float32",
    "float64",
)  # half precision gains nothing from a cast, and complex numbers have none


class CompressorSetting(NamedTuple):
    """How a `Shard` is compressed."""

    compressor: Compressor
    ratio: float | None = None
    rank: int | None = None


@dataclass(frozen=True)
class SearchSpace:
    """Bounds of what the sampler and the mutations propose.

    `min_partition_bytes`, `max_shards`, `allow_uneven`: which partitions there are (`max_shards` 1: none).
    `max_groups`: the most merge groups that the sampler draws and that a split may reach; a hand-made strategy
    may have more, as DDP's buckets of a large model do. `top_k_ratios` (shares of the elements) and
    `power_sgd_ranks` (PowerSGD, NeurIPS 2019, sec. 5) belong to the compressors of those names.
    `most_in_flight` bounds `Strategy.in_flight`. `cross_step_refused`: why the script at hand cannot synchronize across steps.
    """

    __pydantic_config__ = {"extra": "forbid"}

    synchronizers: tuple[Synchronizer, ...]
    compressors: tuple[Compressor, ...] = (Compressor.NONE,)
    sparse: tuple[SparseHandling, ...] = (SparseHandling.DENSE,)
    min_partition_bytes: int = 100_000  # petuum/autodist: the lower bound of its runs
    max_shards: int = 40  # petuum/autodist: shards uniform in [2, min(extent, 40)]
    max_groups: int = 20  # petuum/autodist: at most 20 merge groups
    allow_uneven: bool = True
    hierarchical: bool = False
    cross_step: bool = False
    ring_orders: bool = False
    top_k_ratios: tuple[float, ...] = (0.001, 0.01, 0.1)
    power_sgd_ranks: tuple[int, ...] = (1, 2, 4, 8)
    cross_step_refused: str = ""
    most_in_flight: int = MOST_IN_FLIGHT

    def __post_init__(self) -> None:
        if not self.synchronizers:
            raise InvalidInput(
                "a search space needs at least one synchronizer, but has none; add all_reduce"
            )
        if Compressor.NONE not in self.compressors:
            raise InvalidInput(
                f"the compressors of a search space must contain 'none', which small-precision gradients need, but are {self.compressors}"
            )
        if SparseHandling.DENSE not in self.sparse:
            raise InvalidInput(
                f"the ways of sparse gradients in a search space must contain 'dense', but are {self.sparse}"
            )
        for kind, values in (
            ("synchronizers", self.synchronizers),
            ("compressors", self.compressors),
            ("sparse", self.sparse),
        ):
            if len(set(values)) != len(values):
                raise InvalidInput(
                    f"{kind} of a search space must differ from each other, but are {', '.join(values)}"
                )
        for name, most in (
            ("max_shards", None),
            ("max_groups", None),
            ("most_in_flight", MOST_IN_FLIGHT),
        ):
            value = getattr(self, name)
            if value < 1 or (most is not None and value > most):
                bounds = "at least 1" if most is None else f"from 1 to {most}"
                raise InvalidInput(f"{name} of a search space must be {bounds}, but is {value}")
        for name in ("top_k_ratios", "power_sgd_ranks"):
            if not getattr(self, name):
                raise InvalidInput(
                    f"{name} of a search space must have at least one value, but are empty; leave the compressor out"
                )
        if self.cross_step and self.cross_step_refused:
            raise InvalidInput(
                f"a search space cannot have cross_step where it is refused: {self.cross_step_refused}"
            )
        if self.min_partition_bytes < 0:
            raise InvalidInput(
                f"min_partition_bytes of a search space must be at least 0, but is {self.min_partition_bytes}"
            )

    @staticmethod
    def default(lossy: bool = False) -> SearchSpace:
        """What the PyTorch runtime enacts; `lossy` adds all compressors, also those of plugins."""
        compressors = Compressor.installed() if lossy else (Compressor.NONE,)
        return SearchSpace(
            tuple(Synchronizer),
            compressors,
            tuple(SparseHandling),
            hierarchical=True,
            cross_step=True,
            ring_orders=True,
        )

    def without_cross_step(self, reason: str) -> SearchSpace:
        """This space for a script that cannot synchronize across steps; `reason` says why not."""
        return replace(self, cross_step=False, cross_step_refused=reason)

    def compressors_for(self, dtype: str) -> tuple[Compressor, ...]:
        """The compressors that a gradient of this dtype can take."""
        return self.compressors if dtype in _COMPRESSIBLE else (Compressor.NONE,)

    def axes_for(self, variable: Variable) -> tuple[int, ...]:
        """The axes along which a variable may be cut; none for small variables."""
        if (
            self.max_shards < 2
            or variable.elements == 0
            or variable.grad_bytes < self.min_partition_bytes
        ):
            return ()
        candidates = variable.shape[:1] if variable.sparse else variable.shape
        return tuple(axis for axis, extent in enumerate(candidates) if extent >= 2)

    def hierarchy_for(self, cluster: Cluster) -> bool:
        """Whether hierarchical reduction is allowed and would differ from the flat one."""
        return self.hierarchical and 1 < len(cluster.hosts) < cluster.world_size

    def ring_orders_for(self, cluster: Cluster) -> bool:
        """Whether other orders of the hosts along the ring are allowed and could differ from theirs."""
        links = {(host.link_bytes_per_s, host.latency_s) for host in cluster.hosts}
        return (
            self.ring_orders
            and len(cluster.hosts) > 3
            and (len(links) > 1 or bool(cluster.pair_links))
        )

    def handlings_for(self, synchronizers: Iterable[Synchronizer]) -> tuple[SparseHandling, ...]:
        """The ways of a sparse gradient whose shards are all sent by `synchronizers`."""
        used = set(synchronizers)
        return tuple(
            kind
            for kind in self.sparse
            if kind is SparseHandling.DENSE or used <= set(SPARSE_SYNCHRONIZERS[kind])
        )

    def settings_of(self, compressor: Compressor) -> tuple[CompressorSetting, ...]:
        """The compressor with each of its parameters."""
        if compressor is Compressor.TOP_K:
            return tuple(CompressorSetting(compressor, ratio=ratio) for ratio in self.top_k_ratios)
        if compressor is Compressor.POWER_SGD:
            return tuple(CompressorSetting(compressor, rank=rank) for rank in self.power_sgd_ranks)
        return (CompressorSetting(compressor),)

    def violation(self, strategy: Strategy, workload: Workload, cluster: Cluster) -> str | None:
        """Why `strategy` lies outside this space, or None if it lies inside.

        The strategy must be plannable; `max_groups` bounds proposals and is no property of a strategy.
        """
        if strategy.cross_step and not self.cross_step:
            return (
                self.cross_step_refused
                or "the space has no synchronization across steps, but the strategy uses it"
            )
        if strategy.in_flight > self.most_in_flight:
            return f"the space has at most {self.most_in_flight} messages in flight, but the strategy {strategy.in_flight}"
        if strategy.ring_order is not None and not self.ring_orders:
            return "the space keeps the ranks of a ring in order, but the strategy has an order of its own"
        for choice in strategy.variables:
            variable = workload.variables[workload.index[choice.variable]]
            problem = self._partition_violation(choice, variable)
            if problem is None and choice.sparse not in self.sparse:
                problem = f"the space sends sparse gradients {', '.join(self.sparse)}, but the strategy {choice.sparse}"
            if problem is None:
                problem = next(
                    (
                        p
                        for p in (
                            self._shard_violation(s, variable, cluster) for s in set(choice.shards)
                        )
                        if p
                    ),
                    None,
                )
            if problem is not None:
                return f"{choice.variable!r}: {problem}"
        return None

    def contains(self, strategy: Strategy, workload: Workload, cluster: Cluster) -> bool:
        return self.violation(strategy, workload, cluster) is None

    def _shard_violation(self, shard: Shard, variable: Variable, cluster: Cluster) -> str | None:
        if shard.synchronizer not in self.synchronizers:
            return f"the space has the synchronizers {', '.join(self.synchronizers)}, but the strategy uses {shard.synchronizer}"
        allowed = self.compressors_for(variable.dtype)
        if shard.compressor not in allowed:
            return f"the space has the compressors {', '.join(allowed)} for {variable.dtype}, but the strategy uses {shard.compressor}"
        if shard.hierarchical and not self.hierarchy_for(cluster):
            return (
                "the space has no hierarchical reduction on this cluster, but the strategy uses it"
            )
        return None

    def _partition_violation(self, choice: VariableStrategy, variable: Variable) -> str | None:
        if choice.partition is None:
            return None
        axis, sizes = choice.partition.axis, choice.partition.sizes
        if axis not in self.axes_for(variable):
            return f"the space cuts it along the axes {self.axes_for(variable)}, but the strategy along {axis}"
        if len(sizes) > self.max_shards:
            return f"the space has at most {self.max_shards} shards, but the strategy {len(sizes)}"
        if not self.allow_uneven and max(sizes) - min(sizes) > 1:
            return f"the space has even partitions only, but the sizes are {sizes}"
        return None
