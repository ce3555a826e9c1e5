"""Random strategies under both knowledge constraints (AutoSync, supplement sec. 6).

AutoSync draws a partial strategy, shard by shard and independently, and leaves two fields open: the
placement of server shards, which c_lb then sets, and the merge group of collective shards, which c_am sets. We keep
that and draw the odds first, anew for each strategy. With fixed odds the law of large numbers makes all
strategies of a model with hundreds of variables the same mixture, half partitioned, a third all-reduce and so on, while
the best strategies known are pure or nearly so (all-reduce only, servers only, whole variables only), and would
never be drawn. Likewise for the number of shards: drawn uniformly up to 40 it has hardly ever a strategy with
few messages, so each strategy has its own limit, log-uniform between 2 and 40.

| symbol | meaning |
|---|---|
| V | number of variables, in gradient-ready order |
| S | number of shards, in gradient-ready order of their variables |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.rng import generator
from autotune.strategy_space.builders.partitions import even_partition
from autotune.strategy_space.constraints import balance_load, merge_adjacent, server_bandwidths, server_ranks
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import ROOTED, Compressor, Partition, Shard, Strategy, Synchronizer, VariableStrategy
from autotune.workload import DTYPE_BYTES, Variable, Workload

PURE = 0.5  # share of strategies with a single synchronizer; likewise of those with a single compressor
MIXING = 0.5  # Dirichlet concentration of the other weights: below 1, so that one choice mostly prevails
WHOLE = 0.5  # share of strategies without any partition; in the others its probability is uniform in [0, 1]
REORDERED = 0.2  # share of strategies with random priorities instead of gradient-ready order
MAX_REPEATS = 200  # draws in a row without a new strategy after which a space counts as exhausted

Ints = NDArray[np.int64]


def sample(workload: Workload, cluster: Cluster, space: SearchSpace, rng: np.random.Generator) -> Strategy:
    """One random strategy of `space`."""
    return _draw(_context(workload, cluster, space), rng)


def sample_many(workload: Workload, cluster: Cluster, space: SearchSpace, count: int, seed: int) -> list[Strategy]:
    """`count` different strategies; the same seed gives the same ones in any process, and fewer are a prefix of more.

    A space with fewer strategies than asked for yields fewer.
    """
    if count < 0:
        raise InvalidInput(f"the number of strategies to sample must be at least 0, but is {count}")
    context = _context(workload, cluster, space)
    rng = generator(seed, "sample_many")
    found: dict[Strategy, None] = {}
    repeats = 0
    while len(found) < count and repeats < MAX_REPEATS:
        before = len(found)
        found.setdefault(_draw(context, rng))
        repeats = repeats + 1 if len(found) == before else 0
    return list(found)


@dataclass(frozen=True)
class _Context:
    """What all draws for one workload, cluster and space share."""

    variables: tuple[Variable, ...]
    space: SearchSpace
    axes: tuple[tuple[int, ...], ...]  # per variable, those along which it may be cut
    can_compress: NDArray[np.bool_]  # shape (V,)
    ranks: Ints  # servers, shape (D,)
    bandwidths: NDArray[np.float64]  # bytes/s, shape (D,)
    hierarchy: bool


@dataclass(frozen=True)
class _Shards:
    """The fields of all shards as flat arrays, shape (S,); -1 stands for none."""

    synchronizer: Ints  # index into the space's
    compressor: Ints  # index into the space's
    placement: Ints
    group: Ints
    priority: Ints
    hierarchical: Ints

    def rows(self) -> list[tuple[int, ...]]:
        columns = (self.synchronizer, self.compressor, self.placement, self.group, self.priority, self.hierarchical)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def _context(workload: Workload, cluster: Cluster, space: SearchSpace) -> _Context:
    ranks = server_ranks(cluster)
    return _Context(
        workload.variables,
        space,
        tuple(space.axes_for(variable) for variable in workload.variables),
        np.array([len(space.compressors_for(variable.dtype)) > 1 for variable in workload.variables]),
        np.array(ranks, dtype=np.int64),
        server_bandwidths(cluster, ranks),
        space.hierarchy_for(cluster),
    )


def _draw(context: _Context, rng: np.random.Generator) -> Strategy:
    partitions = _draw_partitions(context, rng)
    counts = np.array([len(partition.sizes) if partition else 1 for partition in partitions], dtype=np.int64)
    owner = np.repeat(np.arange(counts.size), counts)  # the variable of each shard, shape (S,)
    shards = _draw_shards(context, _shard_bytes(context.variables, partitions), owner, rng)
    built: dict[tuple[int, ...], Shard] = {}  # thousands of shards share a few dozen values
    values = []
    for row in shards.rows():
        if row not in built:
            built[row] = _shard(context.space, row)
        values.append(built[row])
    choices, start = [], 0
    for variable, partition, shard_count in zip(context.variables, partitions, counts.tolist(), strict=True):
        choices.append(VariableStrategy(variable.name, tuple(values[start : start + shard_count]), partition))
        start += shard_count
    return Strategy(tuple(choices), cross_step=context.space.cross_step and bool(rng.random() < 0.5))


def _draw_partitions(context: _Context, rng: np.random.Generator) -> list[Partition | None]:
    if rng.random() < WHOLE:
        return [None] * len(context.variables)
    probability, limit_exponent, uneven_probability = rng.random(3).tolist()
    limit = max(2, round(2 * (context.space.max_shards / 2) ** limit_exponent))
    if not context.space.allow_uneven or rng.random() < 0.5:
        uneven_probability = 0.0
    cut = (rng.random(len(context.variables)) < probability).tolist()
    partitions: list[Partition | None] = []
    for variable, axes, wanted in zip(context.variables, context.axes, cut, strict=True):
        if not (wanted and axes):
            partitions.append(None)
            continue
        axis = axes[int(rng.integers(len(axes)))]
        shards = int(rng.integers(2, min(variable.shape[axis], limit) + 1))
        if rng.random() < uneven_probability:
            partitions.append(Partition(axis, _uneven_sizes(variable.shape[axis], shards, rng)))
        else:
            partitions.append(even_partition(variable, axis, shards))
    return partitions


def _uneven_sizes(extent: int, shards: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Random extents of at least one row: each has one, and uniform cuts share out the rest."""
    rest = extent - shards
    cuts = np.sort(rng.integers(0, rest + 1, size=shards - 1))
    return tuple((np.diff(cuts, prepend=0, append=rest) + 1).tolist())


def _shard_bytes(variables: Sequence[Variable], partitions: Sequence[Partition | None]) -> Ints:
    sizes: list[int] = []
    for variable, partition in zip(variables, partitions, strict=True):
        if partition is None:
            sizes.append(variable.grad_bytes)
        else:
            row_bytes = variable.elements // variable.shape[partition.axis] * DTYPE_BYTES[variable.dtype]
            sizes.extend(extent * row_bytes for extent in partition.sizes)
    return np.array(sizes, dtype=np.int64)


def _draw_shards(context: _Context, shard_bytes: Ints, owner: Ints, rng: np.random.Generator) -> _Shards:
    space = context.space
    synchronizer = _draw_choices(len(space.synchronizers), owner, rng)
    compressor = _draw_choices(len(space.compressors), owner, rng)
    compressor[~context.can_compress[owner]] = space.compressors.index(Compressor.NONE)
    rooted = np.array([kind in ROOTED for kind in space.synchronizers])[synchronizer]
    placement = np.full(owner.size, -1, dtype=np.int64)
    placement[rooted] = context.ranks[balance_load(shard_bytes[rooted], context.bandwidths, rng)]
    group = np.full(owner.size, -1, dtype=np.int64)
    collective = int(owner.size - rooted.sum())
    if collective:
        wanted = int(rng.integers(1, min(space.max_groups, collective) + 1))
        from_input = merge_adjacent(shard_bytes[~rooted][::-1], wanted)
        group[~rooted] = from_input.max() - from_input[::-1]  # so that group 0 is complete first
    hierarchical = np.zeros(owner.size, dtype=np.int64)
    if context.hierarchy:
        hierarchical[:] = _draw_choices(2, owner, rng)
    return _Shards(synchronizer, compressor, placement, group, _draw_priorities(group, owner, rng), hierarchical)


def _draw_choices(options: int, owner: Ints, rng: np.random.Generator) -> Ints:
    """One of `options` for every shard, shape (S,): by odds of this strategy, per shard or per variable."""
    if options == 1:
        return np.zeros(owner.size, dtype=np.int64)
    if rng.random() < PURE:
        return np.full(owner.size, int(rng.integers(options)), dtype=np.int64)
    weights = rng.dirichlet(np.full(options, MIXING))
    if rng.random() < 0.5:
        return rng.choice(options, size=owner.size, p=weights)
    return rng.choice(options, size=int(owner[-1]) + 1, p=weights)[owner]


def _draw_priorities(group: Ints, owner: Ints, rng: np.random.Generator) -> Ints:
    """Mostly 0, which is gradient-ready order; else a random one for each group, and for each variable on servers."""
    if rng.random() >= REORDERED:
        return np.zeros(owner.size, dtype=np.int64)
    groups = int(group.max()) + 1
    of_group = rng.permutation(max(groups, 1))
    of_variable = rng.integers(0, max(groups, int(owner[-1]) + 1), size=int(owner[-1]) + 1)
    return np.where(group >= 0, of_group[group], of_variable[owner])


def _shard(space: SearchSpace, row: tuple[int, ...]) -> Shard:
    synchronizer, compressor, placement, group, priority, hierarchical = row
    kind: Synchronizer = space.synchronizers[synchronizer]
    return Shard(
        kind,
        placement=None if placement < 0 else placement,
        group=None if group < 0 else group,
        priority=priority,
        hierarchical=bool(hierarchical),
        **space.compressor_fields(space.compressors[compressor]),
    )
