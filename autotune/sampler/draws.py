"""The random choices of one strategy as flat arrays: first the odds, then each variable and shard.

| symbol | meaning |
|---|---|
| V | number of variables, in gradient-ready order |
| S | number of shards, in gradient-ready order of their variables |
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.strategy_space.builders.partitions import even_partition
from autotune.strategy_space.constraints import balance_load, merge_adjacent, servers_of
from autotune.strategy_space.moves.changed_owners import drawn_owners
from autotune.strategy_space.moves.ring import random_ring
from autotune.strategy_space.shares import MOST_PIECES, Shares
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    ROOTED,
    SPARSE_COMPRESSORS,
    Compressor,
    Partition,
    SparseHandling,
    Synchronizer,
)
from autotune.workload import Workload

PURE = 0.5  # share of strategies with a single synchronizer, and with a single compressor
UNCOMPRESSED = 0.2  # share of strategies without compression
MIXING = 0.5  # Dirichlet concentration of the other weights: below 1, so one choice mostly wins
WHOLE = 0.5  # share of strategies without partitions; in the others their probability is uniform
REORDERED = 0.2  # share of strategies with random priorities instead of gradient-ready order
CROSS_STEP = 0.35  # share of strategies that synchronize across steps
PLANNED = 0.8  # share of those with a planned order: in gradient-ready order they gain little
PIECE_BYTES = (2**16, 2**23)
"""Bounds of the pieces of direct exchanges, log-uniform: below, sends cost more than they hide."""
IN_ONE_PIECE = 0.2  # share of strategies whose direct exchanges are not cut
RING = 0.25  # share of strategies with a ring order of their own, where one can matter


@dataclass(frozen=True)
class Context:
    """Data that all draws for one workload, cluster and space share."""

    workload: Workload
    cluster: Cluster
    space: SearchSpace
    axes: tuple[tuple[int, ...], ...]  # per variable, the ones along which it may be cut
    grad_bytes: IntArray  # shape (V,)
    can_compress: BoolArray  # shape (V,)
    ranks: IntArray  # servers, shape (D,)
    shares: FloatArray  # of all bytes that each should serve, shape (D,)

    @staticmethod
    def of(workload: Workload, cluster: Cluster, space: SearchSpace) -> Context:
        servers = servers_of(cluster)
        return Context(
            workload,
            cluster,
            space,
            tuple(space.axes_for(variable) for variable in workload.variables),
            np.array([variable.grad_bytes for variable in workload.variables], dtype=np.int64),
            np.array(
                [len(space.compressors_for(variable.dtype)) > 1 for variable in workload.variables]
            ),
            np.array(servers.ranks, dtype=np.int64),
            np.array(servers.shares),
        )


@dataclass(frozen=True)
class Drawn:
    """The fields of a strategy as arrays of shape (S,), -1 for none. `owner`: each shard's
    variable.

    `synchronizer` and `compressor` index the space's; `parameter` indexes the compressor's
    settings. `sparse` has one entry per variable. `pieces` (1 except for direct exchanges) and
    `shares`, which they all have.
    """

    partitions: tuple[Partition | None, ...]
    sparse: tuple[SparseHandling, ...]
    owner: IntArray
    shard_bytes: IntArray
    synchronizer: IntArray
    compressor: IntArray
    parameter: IntArray
    placement: IntArray
    group: IntArray
    hierarchical: IntArray
    cross_step: bool
    ring_order: tuple[int, ...] | None
    in_flight: int

    priority: IntArray
    pieces: IntArray
    shares: Shares | None

    @property
    def identity(self) -> Hashable:
        """Equal for equal strategies only."""
        return (
            self.table().tobytes(),
            self.partitions,
            self.sparse,
            self.cross_step,
            self.ring_order,
            self.in_flight,
            self.shares,
        )

    def table(self) -> IntArray:
        """The columns that distinguish shards, shape (S, 8)."""
        columns = (
            self.synchronizer,
            self.compressor,
            self.parameter,
            self.placement,
            self.group,
            self.priority,
            self.hierarchical,
            self.pieces,
        )
        return np.stack(columns, axis=1)


def draw(context: Context, rng: np.random.Generator) -> Drawn:
    """Draw all choices; the issue order is gradient-ready order."""
    space = context.space
    partitions = _draw_partitions(context, rng)
    counts = np.array(
        [len(partition.sizes) if partition else 1 for partition in partitions], dtype=np.int64
    )
    owner = np.repeat(np.arange(counts.size), counts)
    shard_bytes = shard_bytes_of(context, partitions, owner)
    synchronizer = _draw_choices(len(space.synchronizers), owner, rng)
    _redraw_for_rows(context, synchronizer, counts, rng)
    sparse = _draw_sparse(context, synchronizer, owner, counts, rng)
    dense = np.array([kind is SparseHandling.DENSE for kind in sparse])[owner]
    compressor, parameter = _draw_compressors(context, dense, owner, rng)
    rooted = np.array([kind in ROOTED for kind in space.synchronizers])[synchronizer]
    placement = placements(context, shard_bytes, rooted, rng)
    collective = int(owner.size - rooted.sum())
    wanted = int(rng.integers(1, min(space.max_groups, collective) + 1)) if collective else 0
    group = merge_groups(shard_bytes, ~rooted, wanted)
    hierarchical = np.zeros(owner.size, dtype=np.int64)
    if space.hierarchy_for(context.cluster):
        hierarchical[:] = _draw_choices(2, owner, rng) * dense
    ring = collective and space.ring_orders_for(context.cluster) and rng.random() < RING
    crossing = space.cross_step and bool(rng.random() < CROSS_STEP)
    ring_order = random_ring(context.cluster, rng) if ring else None
    direct = synchronizer == direct_index(space)
    in_flight = 1
    if crossing or direct.any():
        in_flight = int(rng.integers(1, space.in_flight_bound(crossing, bool(direct.any())) + 1))
    pieces, shares = np.ones(owner.size, dtype=np.int64), None
    if direct.any():
        shares = drawn_owners(context.cluster, rng)
        if rng.random() >= IN_ONE_PIECE:
            piece_bytes = float(np.exp(rng.uniform(*np.log(PIECE_BYTES))))
            cut = direct & dense & ~_fed_back(space)[compressor]
            pieces = pieces_of(shard_bytes, group, cut, piece_bytes)
    return Drawn(
        partitions,
        sparse,
        owner,
        shard_bytes,
        synchronizer,
        compressor,
        parameter,
        placement,
        group,
        hierarchical,
        crossing,
        ring_order,
        in_flight,
        np.zeros(owner.size, dtype=np.int64),
        pieces,
        shares,
    )


def direct_index(space: SearchSpace) -> int:
    """The number of the direct exchange among the space's synchronizers; -1 if it has none."""
    kinds = space.synchronizers
    return kinds.index(Synchronizer.DIRECT_EXCHANGE) if space.direct else -1


def _fed_back(space: SearchSpace) -> BoolArray:
    """The compressors that need whole messages, shape (compressors,)."""
    return np.array([kind.error_feedback for kind in space.compressors])


def pieces_of(
    shard_bytes: IntArray, group: IntArray, cut: BoolArray, piece_bytes: float
) -> IntArray:
    """Pieces of each shard's message of about `piece_bytes`, shape (S,); 1 unless it is `cut`."""
    message = np.where(group >= 0, group, group.max(initial=-1) + 1 + np.arange(group.size))
    message_bytes = np.bincount(message, weights=shard_bytes)[message]
    pieces = np.clip(np.ceil(message_bytes / piece_bytes), 1, MOST_PIECES).astype(np.int64)
    return np.where(cut, pieces, 1)


def draw_priorities(drawn: Drawn, rng: np.random.Generator) -> IntArray:
    """A random one for each group, and for each variable on servers; shape (S,)."""
    groups, variables = int(drawn.group.max()) + 1, len(drawn.partitions)
    of_group = rng.permutation(max(groups, 1))
    of_variable = rng.integers(0, max(groups, variables), size=variables)
    return np.where(drawn.group >= 0, of_group[drawn.group], of_variable[drawn.owner])


def _draw_partitions(context: Context, rng: np.random.Generator) -> tuple[Partition | None, ...]:
    count = len(context.axes)
    if rng.random() < WHOLE:
        return (None,) * count
    probability, limit_exponent, uneven_probability = rng.random(3).tolist()
    limit = max(2, round(2 * (context.space.max_shards / 2) ** limit_exponent))
    if not context.space.allow_uneven or rng.random() < 0.5:
        uneven_probability = 0.0
    partitions: list[Partition | None] = []
    rows = zip(
        context.workload.variables, context.axes, rng.random((count, 4)).tolist(), strict=True
    )
    for variable, axes, (wanted, which, how_many, unevenly) in rows:
        if not axes or wanted >= probability:
            partitions.append(None)
            continue
        axis = axes[int(which * len(axes))]
        extent = variable.shape[axis]
        shards = 2 + int(how_many * (min(extent, limit) - 1))
        if unevenly < uneven_probability:
            partitions.append(Partition(axis, _uneven_sizes(extent, shards, rng)))
        else:
            partitions.append(even_partition(variable, axis, shards))
    return tuple(partitions)


def _uneven_sizes(extent: int, shards: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Random extents of at least one row: uniform cuts divide the rows beyond one each."""
    rest = extent - shards
    cuts = [0, *sorted(rng.integers(0, rest + 1, size=shards - 1).tolist()), rest]
    return tuple(end - start + 1 for start, end in pairwise(cuts))


def placements(
    context: Context, shard_bytes: IntArray, rooted: BoolArray, rng: np.random.Generator
) -> IntArray:
    """c_lb over the rooted shards, shape (S,); -1 for the others."""
    placement = np.full(shard_bytes.size, -1, dtype=np.int64)
    placement[rooted] = context.ranks[balance_load(shard_bytes[rooted], context.shares, rng)]
    return placement


def merge_groups(shard_bytes: IntArray, collective: BoolArray, wanted: int) -> IntArray:
    """c_am over collective shards, in at most `wanted` groups, shape (S,); -1 for the others."""
    group = np.full(shard_bytes.size, -1, dtype=np.int64)
    if collective.any():
        from_input = merge_adjacent(shard_bytes[collective][::-1], wanted)
        group[collective] = from_input.max() - from_input[::-1]  # so that group 0 is complete first
    return group


def shard_bytes_of(
    context: Context, partitions: tuple[Partition | None, ...], owner: IntArray
) -> IntArray:
    """Size of each shard's gradient, shape (S,). `owner` (S,): its variable."""
    variables, grad_bytes = context.workload.variables, context.grad_bytes
    if owner.size == len(partitions):
        return grad_bytes
    pairs = zip(variables, partitions, strict=True)
    rows = np.array([v.shape[p.axis] if p else 1 for v, p in pairs], dtype=np.int64)
    extents = np.array([size for p in partitions for size in (p.sizes if p else (1,))])
    sizes: IntArray = (grad_bytes // rows)[owner] * extents.astype(np.int64)
    return sizes


def _redraw_for_rows(
    context: Context, synchronizer: IntArray, counts: IntArray, rng: np.random.Generator
) -> None:
    """Give a variable whose rows must stay rows one synchronizer, if its own do not carry them."""
    space, first = context.space, np.cumsum(counts) - counts
    for position, variable in enumerate(context.workload.variables):
        if not variable.rows_only:
            continue
        shards = slice(first[position], first[position] + counts[position])
        used = (space.synchronizers[index] for index in synchronizer[shards].tolist())
        carriers = space.carriers_for(variable)
        if carriers and not space.handlings_for(used, variable):
            drawn = carriers[int(rng.integers(len(carriers)))]
            synchronizer[shards] = space.synchronizers.index(drawn)


def _draw_sparse(
    context: Context,
    synchronizer: IntArray,
    owner: IntArray,
    counts: IntArray,
    rng: np.random.Generator,
) -> tuple[SparseHandling, ...]:
    """One of the handlings that the synchronizers of a sparse variable's shards allow."""
    handlings = [SparseHandling.DENSE] * counts.size
    space, variables = context.space, context.workload.variables
    positions = [i for i, variable in enumerate(variables) if variable.sparse]
    if not positions or len(space.sparse) == 1:
        return tuple(handlings)
    first = np.cumsum(counts) - counts
    probability = rng.random() if rng.random() >= PURE else 1.0
    if not space.dense_rows:
        probability = 1.0
    for position in positions:
        used = synchronizer[first[position] : first[position] + counts[position]].tolist()
        kinds = (space.synchronizers[index] for index in used)
        allowed = space.handlings_for(kinds, variables[position])
        others = [kind for kind in allowed if kind is not SparseHandling.DENSE]
        if others and rng.random() < (1.0 if variables[position].rows_only else probability):
            handlings[position] = others[int(rng.integers(len(others)))]
    return tuple(handlings)


def _draw_compressors(
    context: Context, dense: BoolArray, owner: IntArray, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """(compressor, parameter) of every shard."""
    kinds = context.space.compressors
    none = kinds.index(Compressor.NONE)
    parameter = np.zeros(owner.size, dtype=np.int64)
    if len(kinds) == 1 or rng.random() < UNCOMPRESSED:
        return np.full(owner.size, none, dtype=np.int64), parameter
    compressor = _draw_choices(len(kinds), owner, rng)
    compressor[~context.can_compress[owner]] = none
    rows = np.array([kind in SPARSE_COMPRESSORS for kind in kinds])
    compressor[~dense & ~rows[compressor]] = none
    for index, kind in enumerate(kinds):
        settings, chosen = len(context.space.settings_of(kind)), compressor == index
        if settings > 1 and chosen.any():
            parameter[chosen] = _draw_choices(settings, owner, rng)[chosen]
    return compressor, parameter


def _draw_choices(options: int, owner: IntArray, rng: np.random.Generator) -> IntArray:
    """One of `options` per shard, shape (S,), by odds of this strategy, per shard or variable."""
    if options == 1:
        return np.zeros(owner.size, dtype=np.int64)
    if rng.random() < PURE:
        return np.full(owner.size, int(rng.integers(options)), dtype=np.int64)
    weights = rng.dirichlet(np.full(options, MIXING))
    if rng.random() < 0.5:
        return rng.choice(options, size=owner.size, p=weights)
    return rng.choice(options, size=int(owner[-1]) + 1, p=weights)[owner]
