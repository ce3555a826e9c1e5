"""The search space: which strategies may be proposed.

Source of the bounds: the strategy generator of petuum/autodist, AutoSync's code (NeurIPS 2020,
supplement sec. 6 and 8). Variables below 100 kB stay whole. A partitioned one has 2 to 40 shards
along one axis (sparse variables: axis 0). Collective shards are merged into at most 20 groups.
Reduction is hierarchical only if a host has more than one device.

Ring orders are permutations of hosts, tried only if they can matter. A ring visits every host, so
between equal hosts all orders cost the same; so they do with three hosts, which are always
neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.strategy_space.strategy import (
    MOST_DIRECT_IN_FLIGHT,
    MOST_IN_FLIGHT,
    SPARSE_SYNCHRONIZERS,
    Compressor,
    OpFusionSets,
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable, Workload

_COMPRESSIBLE = ("float32", "float64")
"""Half precision gains nothing from a cast, and complex numbers have none."""


SHOWN_TOP_K_RATIOS, SHOWN_POWER_SGD_RANKS = (0.1,), (4,)
"""Settings whose training ends near the uncompressed loss in a test of this repository.

`tests/integration/test_compressed_training.py`. Casts and int8 have no settings and are in it.
"""


ShardKind = tuple[Synchronizer, bool, tuple[Compressor, float | None, int | None], str]
"""All of a shard, and its variable's dtype, that a space bounds."""


class CompressorSetting(NamedTuple):
    """A compressor with its parameter."""

    compressor: Compressor
    ratio: float | None = None
    rank: int | None = None


@dataclass(frozen=True)
class SearchSpace:
    """Bounds of the strategies that the sampler and the moves propose.

    `min_partition_bytes`, `max_shards` (1: no partitions) and `allow_uneven` bound partitions.
    `max_groups`: most merge groups that the sampler draws and a split may reach; a hand-made
    strategy may have more, as DDP's buckets of a large model do. `top_k_ratios` (shares of the
    elements) and `power_sgd_ranks` (PowerSGD, NeurIPS 2019, sec. 5) are compressor parameters. By
    default they are those whose convergence a test shows.
    `most_in_flight` bounds `Strategy.in_flight` without direct exchanges. `cross_step_refused`: why
    the script cannot synchronize across steps. `op_fusions`: sets of ops of which a strategy may
    have one choice. `dense_rows`: whether sparse gradients may be sent dense. If not, all
    synchronizers carry rows.
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
    top_k_ratios: tuple[float, ...] = SHOWN_TOP_K_RATIOS
    power_sgd_ranks: tuple[int, ...] = SHOWN_POWER_SGD_RANKS
    cross_step_refused: str = ""
    most_in_flight: int = MOST_IN_FLIGHT
    op_fusions: tuple[OpFusionSets, ...] = ()
    dense_rows: bool = True

    def __post_init__(self) -> None:
        if not self.synchronizers:
            raise InvalidInput(
                "a search space needs at least one synchronizer, but has none; add all_reduce"
            )
        if Compressor.NONE not in self.compressors:
            raise InvalidInput(
                "the compressors of a search space must contain 'none', which small-precision "
                f"gradients need, but are {self.compressors}"
            )
        if SparseHandling.DENSE not in self.sparse:
            raise InvalidInput(
                "the ways of sparse gradients in a search space must contain 'dense', "
                f"but are {self.sparse}"
            )
        for name in ("synchronizers", "compressors", "sparse"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise InvalidInput(
                    f"{name} of a search space must differ from each other, "
                    f"but are {', '.join(values)}"
                )
        for name in ("max_shards", "max_groups", "most_in_flight"):
            value = getattr(self, name)
            limited = name == "most_in_flight"
            if value < 1 or (limited and value > MOST_IN_FLIGHT):
                bounds = f"from 1 to {MOST_IN_FLIGHT}" if limited else "at least 1"
                raise InvalidInput(f"{name} of a search space must be {bounds}, but is {value}")
        for name in ("top_k_ratios", "power_sgd_ranks"):
            if not getattr(self, name):
                raise InvalidInput(
                    f"{name} of a search space must have at least one value, but are empty; "
                    "leave the compressor out"
                )
        self._check_rows()
        if self.cross_step and self.cross_step_refused:
            raise InvalidInput(
                "a search space cannot have cross_step where it is refused: "
                f"{self.cross_step_refused}"
            )
        if self.min_partition_bytes < 0:
            raise InvalidInput(
                "min_partition_bytes of a search space must be at least 0, "
                f"but is {self.min_partition_bytes}"
            )

    def _check_rows(self) -> None:
        kinds = [kind for kind in self.sparse if kind is not SparseHandling.DENSE]
        carry = [set(self.synchronizers) <= set(SPARSE_SYNCHRONIZERS[kind]) for kind in kinds]
        if not self.dense_rows and not (carry and all(carry)):
            raise InvalidInput(
                "a search space without dense_rows needs synchronizers that all carry rows as "
                f"{', '.join(kinds) or 'it has no other way'}, but has "
                f"{', '.join(self.synchronizers)}; leave some out"
            )

    @staticmethod
    def default(lossy: bool = False) -> SearchSpace:
        """Everything that the PyTorch runtime enacts and the replay predicts.

        `lossy` adds all compressors, also plugins'.
        """
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
        """Return this space for a script that cannot synchronize across steps, with the reason."""
        return replace(self, cross_step=False, cross_step_refused=reason)

    def without_direct(self) -> SearchSpace:
        """Return this space for a runtime whose ranks cannot send to each other."""
        others = (kind for kind in self.synchronizers if kind is not Synchronizer.DIRECT_EXCHANGE)
        return replace(self, synchronizers=tuple(others))

    def without_plugins(self) -> SearchSpace:
        """Return this space for a runtime that lacks the compressors of plugins."""
        return replace(
            self, compressors=tuple(k for k in self.compressors if k in tuple(Compressor))
        )

    def compressors_for(self, dtype: str) -> tuple[Compressor, ...]:
        """Compressors that a gradient of this dtype can take."""
        return self.compressors if dtype in _COMPRESSIBLE else (Compressor.NONE,)

    def axes_for(self, variable: Variable) -> tuple[int, ...]:
        """Axes along which a variable may be cut; none for small variables."""
        small = variable.elements == 0 or variable.grad_bytes < self.min_partition_bytes
        if small or self.max_shards < 2:
            return ()
        candidates = variable.shape[:1] if variable.sparse else variable.shape
        return tuple(axis for axis, extent in enumerate(candidates) if extent >= 2)

    def hierarchy_for(self, cluster: Cluster) -> bool:
        """Whether hierarchical reduction is allowed and differs from the flat one."""
        return self.hierarchical and 1 < len(cluster.hosts) < cluster.world_size

    def ring_orders_for(self, cluster: Cluster) -> bool:
        """Whether other orders of the hosts along the ring are allowed and can cost less."""
        links = {(host.link_bytes_per_s, host.latency_s) for host in cluster.hosts}
        unequal = len(links) > 1 or bool(cluster.pair_links)
        return self.ring_orders and len(cluster.hosts) > 3 and unequal

    def in_flight_bound(self, cross_step: bool, direct: bool) -> int:
        """Return the most messages in flight, or pieces of direct exchanges if there are any."""
        if direct:
            return MOST_DIRECT_IN_FLIGHT
        return self.most_in_flight if cross_step else 1

    @property
    def direct(self) -> bool:
        """Whether a strategy may exchange directly."""
        return Synchronizer.DIRECT_EXCHANGE in self.synchronizers

    def sends_dense(self, variable: Variable) -> bool:
        """Whether the gradient of a variable may be sent dense."""
        return not variable.sparse or (self.dense_rows and not variable.rows_only)

    def handlings_for(
        self, synchronizers: Iterable[Synchronizer], variable: Variable
    ) -> tuple[SparseHandling, ...]:
        """Ways to send the gradient of `variable`, whose shards all use `synchronizers`."""
        used, dense = set(synchronizers), self.sends_dense(variable)
        return tuple(
            kind
            for kind in self.sparse
            if (dense and kind is SparseHandling.DENSE)
            or (variable.sparse and used <= set(SPARSE_SYNCHRONIZERS.get(kind, ())))
        )

    def carriers_for(self, variable: Variable) -> tuple[Synchronizer, ...]:
        """Synchronizers that can send the gradient of `variable`."""
        return tuple(kind for kind in self.synchronizers if self.handlings_for([kind], variable))

    def settings_of(self, compressor: Compressor) -> tuple[CompressorSetting, ...]:
        """The compressor with each of its parameters."""
        if compressor is Compressor.TOP_K:
            return tuple(CompressorSetting(compressor, ratio=ratio) for ratio in self.top_k_ratios)
        if compressor is Compressor.POWER_SGD:
            return tuple(CompressorSetting(compressor, rank=rank) for rank in self.power_sgd_ranks)
        return (CompressorSetting(compressor),)

    def violation(self, strategy: Strategy, workload: Workload, cluster: Cluster) -> str | None:
        """Return why a plannable `strategy` lies outside this space, or None.

        `max_groups` bounds proposals only and is not checked.
        """
        if strategy.cross_step and not self.cross_step:
            return (
                self.cross_step_refused
                or "the space has no synchronization across steps, but the strategy uses it"
            )
        most = self.in_flight_bound(strategy.cross_step, strategy.direct)
        if strategy.in_flight > most:
            return (
                f"the space has at most {most} messages in flight, "
                f"but the strategy {strategy.in_flight}"
            )
        if strategy.ring_order is not None and not self.ring_orders:
            return "the space keeps ranks in order along a ring, but the strategy reorders them"
        if strategy.op_fusion and strategy.op_fusion not in self.op_fusions:
            return (
                f"the space has {len(self.op_fusions)} choices of op_fusion, but the strategy "
                f"fuses other sets, such as {', '.join(strategy.op_fusion[0][:3])}"
            )
        variables, index, dense = workload.variables, workload.index, SparseHandling.DENSE
        inside: dict[str, set[int]] = {}  # by dtype: shards of whole dense variables, by id
        verdicts: dict[ShardKind, str | None] = {}
        for choice in strategy.variables:
            variable = variables[index[choice.variable]]
            plain = choice.sparse is dense and not variable.sparse
            whole = choice.partition is None and plain
            if whole and id(choice.shards[0]) in inside.get(variable.dtype, ()):
                continue
            problem = self._choice_violation(choice, variable, cluster, verdicts)
            if problem is not None:
                return f"{choice.variable!r}: {problem}"
            if whole:
                inside.setdefault(variable.dtype, set()).add(id(choice.shards[0]))
        return None

    def _choice_violation(
        self,
        choice: VariableStrategy,
        variable: Variable,
        cluster: Cluster,
        verdicts: dict[ShardKind, str | None],
    ) -> str | None:
        """`verdicts`: those on shards before; a strategy's thousands of shards are of few kinds."""
        problem = self._partition_violation(choice, variable)
        if problem is not None:
            return problem
        if choice.sparse not in self.sparse:
            ways = ", ".join(self.sparse)
            return f"the space sends sparse gradients {ways}, but the strategy {choice.sparse}"
        if choice.sparse is SparseHandling.DENSE and not self.sends_dense(variable):
            return "the space sends its gradient as rows only, but the strategy sends it dense"
        dtype = variable.dtype
        for shard in choice.shards:
            setting = shard.compressor, shard.ratio, shard.rank
            kind = shard.synchronizer, shard.hierarchical, setting, dtype
            if kind not in verdicts:
                verdicts[kind] = self._shard_violation(shard, dtype, cluster)
            if verdicts[kind] is not None:
                return verdicts[kind]
        return None

    def contains(self, strategy: Strategy, workload: Workload, cluster: Cluster) -> bool:
        return self.violation(strategy, workload, cluster) is None

    def _shard_violation(self, shard: Shard, dtype: str, cluster: Cluster) -> str | None:
        if shard.synchronizer not in self.synchronizers:
            return (
                f"the space has the synchronizers {', '.join(self.synchronizers)}, "
                f"but the strategy uses {shard.synchronizer}"
            )
        allowed = self.compressors_for(dtype)
        if shard.compressor not in allowed:
            return (
                f"the space has the compressors {', '.join(allowed)} for {dtype}, "
                f"but the strategy uses {shard.compressor}"
            )
        setting = CompressorSetting(shard.compressor, shard.ratio, shard.rank)
        if setting not in self.settings_of(shard.compressor):
            values = self.top_k_ratios if shard.ratio is not None else self.power_sgd_ranks
            return (
                f"the space has {shard.compressor} with {', '.join(map(str, values))}, "
                f"but the strategy uses {shard.ratio if shard.ratio is not None else shard.rank}"
            )
        if shard.hierarchical and not self.hierarchy_for(cluster):
            return "the space has no hierarchical reduction here, but the strategy uses it"
        return None

    def _partition_violation(self, choice: VariableStrategy, variable: Variable) -> str | None:
        if choice.partition is None:
            return None
        axis, sizes = choice.partition.axis, choice.partition.sizes
        if axis not in self.axes_for(variable):
            return (
                f"the space cuts it along the axes {self.axes_for(variable)}, "
                f"but the strategy along {axis}"
            )
        if len(sizes) > self.max_shards:
            return f"the space has at most {self.max_shards} shards, but the strategy {len(sizes)}"
        if not self.allow_uneven and max(sizes) - min(sizes) > 1:
            return f"the space has even partitions only, but the sizes are {sizes}"
        return None
