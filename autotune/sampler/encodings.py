"""Encodings for scikit-optimize: a point of a few numbers and choices, and the strategy it means.

`FusionScalars`: the two scalars that `horovodrun --autotune` searches. `SpaceChoices`: the whole
search space. A strategy has a choice per shard, thousands, from which a Gaussian process learns
nothing. So a point chooses once for all large variables and once for all small ones. AutoSync's
constraints (c_lb, c_am) decide the rest, as for random strategies. Points reach every synchronizer,
compressor and setting, sparse handling, number of parts and of merge groups, hierarchy, the planned
order, synchronization across steps and rings of hosts. Direct exchanges have equal owners, those by
bandwidth, or one. Points do not reach mixtures of more than two kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from autotune.arrays import BoolArray, IntArray
from autotune.cluster import Cluster
from autotune.rng import generator
from autotune.sampler.draws import (
    Context,
    Drawn,
    direct_index,
    merge_groups,
    pieces_of,
    placements,
    shard_bytes_of,
)
from autotune.sampler.order import PlannedOrder
from autotune.sampler.writer import Writer
from autotune.strategy_space.builders.collectives import MIB, horovod_like
from autotune.strategy_space.builders.partitions import even_partition
from autotune.strategy_space.builders.rows import with_rows
from autotune.strategy_space.moves.ring import random_ring
from autotune.strategy_space.owners import by_bandwidth, one_owner
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    ROOTED,
    SPARSE_COMPRESSORS,
    Compressor,
    Partition,
    SparseHandling,
    Strategy,
)
from autotune.workload import Workload

THRESHOLD_BYTES = (0.0, 64.0 * MIB)
CYCLE_TIME_S = (1e-3, 100e-3)
"""Horovod, docs/autotune.rst: fusion threshold 0 to 64 MB, cycle time 1 to 100 ms."""
RINGS = 8
"""Random orders of the hosts that a point can choose from, besides their own."""

PIECE_BYTES = (None, 2**20, 2**18, 2**16)
"""Sizes of the pieces of direct exchanges; None: one piece."""

Point = Sequence[Any]
"""A value for each dimension."""


class Encoding(Protocol):
    """`initial`: random points before the Gaussian process proposes."""

    initial: int

    def dimensions(self) -> list[Any]:
        """Dimensions of scikit-optimize."""

    def strategy(self, point: Point) -> Strategy:
        """The strategy of a point, always the same."""


class FusionScalars:
    """Horovod's fusion threshold (bytes) and cycle time (s).

    Sparse gradients travel dense, or as rows: `every` one, or only those that must.
    """

    initial = 3  # Horovod's warm-up samples

    def __init__(self, workload: Workload, every: bool = False) -> None:
        self._workload, self._every = workload, every

    def dimensions(self) -> list[Any]:
        from skopt.space import Real

        return [
            Real(*THRESHOLD_BYTES, name="threshold_bytes"),
            Real(*CYCLE_TIME_S, name="cycle_time_s"),
        ]

    def strategy(self, point: Point) -> Strategy:
        fused = horovod_like(self._workload, int(point[0]), float(point[1]))
        return with_rows(fused, self._workload, self._every)


class SpaceChoices:
    """Choices for large and for small variables, and for the strategy as a whole."""

    initial = 10  # scikit-optimize's default

    def __init__(self, workload: Workload, cluster: Cluster, space: SearchSpace, seed: int) -> None:
        self._context = Context.of(workload, cluster, space)
        self._writer = Writer(self._context)
        self._planned = PlannedOrder(self._context)
        self._settings = [
            (kind, number)
            for kind, compressor in enumerate(space.compressors)
            for number in range(len(space.settings_of(compressor)))
        ]
        self._seed = seed
        self._carriers = {
            position: [space.synchronizers.index(kind) for kind in space.carriers_for(variable)]
            for position, variable in enumerate(workload.variables)
            if variable.rows_only
        }
        rng = generator(seed, "rings of bayes")
        count = RINGS if space.ring_orders_for(cluster) else 0
        orders = [random_ring(cluster, rng) for _ in range(count)]
        first = int(self._context.ranks[int(self._context.shares.argmax())])
        owners = [None, by_bandwidth(cluster), one_owner(cluster, first)] if space.direct else []
        self._owners = list(dict.fromkeys(owners))
        self._rings = list(dict.fromkeys([None, *orders]))
        self._options = self._choices(workload, cluster, space)

    def _choices(self, workload: Workload, cluster: Cluster, space: SearchSpace) -> dict[str, int]:
        """Name -> number of options, for each choice with more than one."""
        synchronizers, settings = len(space.synchronizers), len(self._settings)
        sparse = any(variable.sparse for variable in workload.variables)
        counts = {
            "synchronizer of large ones": synchronizers,
            "synchronizer of small ones": synchronizers,
            "compressor of large ones": settings,
            "compressor of small ones": settings,
            "sparse": len(space.sparse) if sparse else 1,
            "hierarchical": 1 + space.hierarchy_for(cluster),
            "cross_step": 1 + space.cross_step,
            "in flight": space.in_flight_bound(space.cross_step, space.direct),
            "owners": len(self._owners),
            "pieces": len(PIECE_BYTES) if space.direct else 1,
            "planned order": 2,
            "ring": len(self._rings),
        }
        return {name: count for name, count in counts.items() if count > 1}

    def dimensions(self) -> list[Any]:
        from skopt.space import Categorical, Real

        scalars = [Real(0.0, 1.0, name=name) for name in ("large", "parts", "groups")]
        return [
            *scalars,
            *(Categorical(range(count), name=name) for name, count in self._options.items()),
        ]

    def strategy(self, point: Point) -> Strategy:
        large_share, parts, groups = (float(value) for value in point[:3])
        chosen = {name: int(value) for name, value in zip(self._options, point[3:], strict=True)}
        return self._writer.written(self._drawn(self._large(large_share), parts, groups, chosen))

    def _large(self, share: float) -> BoolArray:
        """The largest variables, which hold `share` of all bytes, shape (V,)."""
        sizes = self._context.grad_bytes
        descending = np.argsort(-sizes, kind="stable")
        before = np.cumsum(sizes[descending]) - sizes[descending]
        large = np.zeros(sizes.size, dtype=np.bool_)
        large[descending] = before < share * sizes.sum()
        return large

    def _drawn(
        self, large: BoolArray, parts: float, groups: float, chosen: dict[str, int]
    ) -> Drawn:
        context = self._context
        space = context.space
        partitions = self._partitions(large, parts)
        counts = np.array([len(cut.sizes) if cut else 1 for cut in partitions], dtype=np.int64)
        owner = np.repeat(np.arange(counts.size), counts)
        shard_bytes = shard_bytes_of(context, partitions, owner)
        of_variable = self._synchronizers(large, chosen)
        synchronizer, sparse = of_variable[owner], self._sparse(of_variable, chosen)
        dense = np.array([kind is SparseHandling.DENSE for kind in sparse])[owner]
        compressor, parameter = self._compressors(
            self._by_size(large, chosen, "compressor")[owner], dense, owner
        )
        rooted = np.array([kind in ROOTED for kind in space.synchronizers])[synchronizer]
        wanted = min(round(space.max_groups**groups), int((~rooted).sum()))
        group = merge_groups(shard_bytes, ~rooted, wanted)
        crossing, direct = bool(chosen.get("cross_step", 0)), synchronizer == direct_index(space)
        piece_bytes = PIECE_BYTES[chosen.get("pieces", 0)]
        whole = np.array([kind.error_feedback for kind in space.compressors])[compressor]
        most = space.in_flight_bound(crossing, bool(direct.any()))
        drawn = Drawn(
            partitions,
            sparse,
            owner,
            shard_bytes,
            synchronizer,
            compressor,
            parameter,
            placements(context, shard_bytes, rooted, generator(self._seed, "servers of bayes")),
            group,
            np.full(owner.size, chosen.get("hierarchical", 0), dtype=np.int64) * dense,
            crossing,
            None if rooted.all() else self._rings[chosen.get("ring", 0)],
            min(1 + chosen.get("in flight", 0), most),
            np.zeros(owner.size, dtype=np.int64),
            pieces_of(shard_bytes, group, direct & dense & ~whole, piece_bytes or np.inf),
            self._owners[chosen.get("owners", 0)] if direct.any() else None,
        )
        if not chosen["planned order"]:
            return drawn
        return replace(drawn, priority=self._planned.priorities(drawn))

    def _partitions(self, large: BoolArray, parts: float) -> tuple[Partition | None, ...]:
        """Cut large variables along their longest allowed axis into 1 to `max_shards` parts.

        The number is log-uniform in `parts`.
        """
        most = round(self._context.space.max_shards**parts)
        cuts: list[Partition | None] = []
        for position, variable in enumerate(self._context.workload.variables):
            axes = self._context.axes[position] if large[position] else ()
            extents = [variable.shape[axis] for axis in axes]
            shards = min(most, max(extents, default=1))
            if shards < 2:
                cuts.append(None)
            else:
                cuts.append(even_partition(variable, axes[extents.index(max(extents))], shards))
        return tuple(cuts)

    @staticmethod
    def _by_size(large: BoolArray, chosen: dict[str, int], what: str) -> IntArray:
        """The choice of each variable, shape (V,)."""
        of_large = chosen.get(f"{what} of large ones", 0)
        of_small = chosen.get(f"{what} of small ones", 0)
        return np.where(large, of_large, of_small).astype(np.int64)

    def _synchronizers(self, large: BoolArray, chosen: dict[str, int]) -> IntArray:
        """The choice of each variable, or the first one that carries rows which must stay rows."""
        synchronizer = self._by_size(large, chosen, "synchronizer")
        for position, carriers in self._carriers.items():
            if carriers and synchronizer[position] not in carriers:
                synchronizer[position] = carriers[0]
        return synchronizer

    def _sparse(self, synchronizer: IntArray, chosen: dict[str, int]) -> tuple[SparseHandling, ...]:
        """The chosen handling, if the variable's synchronizer allows it."""
        space = self._context.space
        wanted = space.sparse[chosen.get("sparse", 0)]
        handlings: list[SparseHandling] = []
        kinds = synchronizer.tolist()
        for variable, kind in zip(self._context.workload.variables, kinds, strict=True):
            allowed = space.handlings_for([space.synchronizers[kind]], variable)
            rows = allowed and SparseHandling.DENSE not in allowed
            other = allowed[0] if rows else SparseHandling.DENSE
            handlings.append(wanted if wanted in allowed else other)
        return tuple(handlings)

    def _compressors(
        self, setting: IntArray, dense: BoolArray, owner: IntArray
    ) -> tuple[IntArray, IntArray]:
        """(compressor, parameter) of each shard; none if its gradient cannot take the choice."""
        kinds = self._context.space.compressors
        none = kinds.index(Compressor.NONE)
        rows = np.array([kind in SPARSE_COMPRESSORS for kind in kinds])
        compressor, parameter = np.array(self._settings, dtype=np.int64)[setting].T
        impossible = ~self._context.can_compress[owner] | (~dense & ~rows[compressor])
        return np.where(impossible, none, compressor), np.where(impossible, 0, parameter)
