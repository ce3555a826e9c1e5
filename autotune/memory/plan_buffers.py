"""Buffers that synchronization by a plan allocates on one rank, message by message.

Sizes follow `runtime_rewriter/pytorch`: `packing`, `exchange/transfer` (the wire), `exchange/sums`,
`exchange/compressed`, `exchange/residuals` and torch's reducer (`native_buckets`). On a CPU some
collectives of gloo copy their tensors (measured with a counting allocator, torch 2.13, 2 to 4
ranks). Reduce-scatter copies its input until the message's next step. All-gather copies its output.
Gather and scatter hold one copy per rank on the root. The others copy nothing.

| symbol | meaning |
|---|---|
| w | ranks of the plan |
| m | ranks that sum a message: w, or one per host for a hierarchical message |
| V | bytes of a message's wire: packed, in the sent dtype, padded to a multiple of m elements |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from autotune.recordings.memory_profile import Replica
from autotune.strategy_space.backend import buckets_of
from autotune.strategy_space.compressors import INT8_BLOCK
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.shares import Shares, owned_bounds, piece_bounds, shares_of_hosts
from autotune.strategy_space.strategy import ROOTED, Compressor, SparseHandling, Synchronizer
from autotune.workload import DTYPE_BYTES, Workload

PLAN_BUCKETS = "buckets of the plan"
_HALF = (Compressor.FP16, Compressor.BF16)
_GLOO_THREADS = 2
"""Threads of a process group (torch: ProcessGroupGloo::Options)."""
_SCRATCH_ELEMENTS = 2**18
"""Elements that a CPU quantises at a time (`exchange/quantise`)."""


class When(StrEnum):
    """When a buffer is allocated."""

    ALWAYS = "always"
    STEP_START = "step_start"
    READY = "ready"  # while the gradient of its variable is packed
    QUEUED = "queued"  # from the issue of its message until the message arrives
    FLIGHT = "flight"  # while its message has the channel
    END = "end"  # while the averages are written, after the backward pass


@dataclass(frozen=True)
class Buffer:
    """One allocation. `what` describes it. `message`: its message's number in the plan."""

    bytes: int
    what: str
    when: When = When.ALWAYS
    message: int | None = None
    variable: str | None = None


def plan_buffers(
    plan: Plan | None, workload: Workload, replica: Replica, world_size: int
) -> list[Buffer]:
    """All buffers of this rank. Without a plan, torch's DDP synchronizes with its own buckets."""
    sparse = replica.sparse_bytes or {}
    dense_bytes = sum(
        variable.grad_bytes
        for variable in workload.variables
        if variable.name not in sparse and not variable.sparse
    )
    buffers: list[Buffer] = []
    if replica.buffer_bytes:
        what = "buffers that are sent from rank 0"
        buffers.append(Buffer(replica.buffer_bytes, what, When.STEP_START))
    if world_size < 2 and plan is None:
        return buffers
    if replica.ddp or plan is None:
        buffers.append(Buffer(dense_bytes, "buckets of the DDP's own reducer"))
    if plan is None:
        return [*buffers, *_ddp_rows(sparse, world_size)]
    if buckets_of(plan) is not None and not sparse:
        return [*buffers, Buffer(dense_bytes, PLAN_BUCKETS)]
    with_residual: set[str] = set()
    groups = ProcessGroups(plan, replica)
    for number, message in enumerate(plan.messages):
        if message.sparse is not SparseHandling.DENSE:
            row_bytes = sparse.get(message.slices[0].variable, message.grad_bytes)
            buffers += _rows(number, message, row_bytes, world_size)
            continue
        buffers += _Exchange(number, message, groups, replica).buffers()
        buffers += _packing(number, message, sparse, workload, world_size)
        with_residual |= _with_residual(message, groups.of(message))
    picked_bytes = _picked_bytes(plan, sparse, workload, world_size)
    if picked_bytes:
        buffers.append(Buffer(picked_bytes, "rows of an average while it is written", When.END))
    buffers += [
        Buffer(variable.grad_bytes, "residual", variable=variable.name)
        for variable in workload.variables
        if variable.name in with_residual
    ]
    return buffers


def multiplying_lanes(plan: Plan) -> frozenset[int]:
    """Lanes on which PowerSGD multiplies: before, between and after its sums.

    See `exchange/compressed`. On a GPU each lane has a stream, for which cuBLAS keeps a workspace.
    """
    lanes: set[int] = set()
    for message in plan.messages:
        if message.compressor is Compressor.POWER_SGD:
            first = int(message.hierarchical)
            steps = {Synchronizer.ALL_REDUCE: 1, Synchronizer.DIRECT_EXCHANGE: 3}.get(
                message.synchronizer, 2
            )
            lanes |= {first, first + steps, first + 2 * steps}
    return frozenset(lanes)


def _packing(
    number: int, message: Message, sparse: Mapping[str, int], workload: Workload, world_size: int
) -> Iterator[Buffer]:
    """Copies between the gradients and the wire.

    A cast scales a copy in the gradient's dtype first; a sparse gradient becomes dense.
    """
    element_bytes = DTYPE_BYTES[message.dtype]
    for part in message.slices:
        name = part.variable
        if message.compressor in _HALF and element_bytes > 2:
            size = part.elements * element_bytes
            yield Buffer(size, "gradient before its cast", When.READY, number, name)
        if name in sparse:
            whole = workload.variables[workload.index[name]].grad_bytes
            yield Buffer(whole, "sparse gradient made dense", When.READY, number, name)
            if part.start == 0:
                added_rows = _average_bytes(sparse[name], whole, world_size) - sparse[name]
                what = "average before it is sparse again"
                yield Buffer(whole + added_rows, what, When.END, number, name)


def _picked_bytes(
    plan: Plan, sparse: Mapping[str, int], workload: Workload, world_size: int
) -> int:
    """Rows picked from the largest average, and their copy into the gradient.

    Averages become sparse again one after the other.
    """
    names = {
        part.variable
        for message in plan.messages
        if message.sparse is SparseHandling.DENSE
        for part in message.slices
        if part.variable in sparse
    }
    whole = {name: workload.variables[workload.index[name]].grad_bytes for name in names}
    return max(
        (sparse[name] + _average_bytes(sparse[name], whole[name], world_size) for name in names),
        default=0,
    )


def _average_bytes(own_bytes: int, whole_bytes: int, world_size: int) -> int:
    """Most bytes of an average: the rows of all ranks, if all rows are different."""
    return min(world_size * own_bytes, max(whole_bytes, own_bytes))


def _ddp_rows(sparse: Mapping[str, int], world_size: int) -> Iterator[Buffer]:
    """Buffers of torch's reducer, which sums sparse gradients over gloo.

    Every rank receives and adds the rows of all ranks, one variable per gloo thread at once. A
    summed gradient holds the rows of all ranks.
    """
    largest_first = sorted(sparse.items(), key=lambda item: -item[1])
    for number, (name, size) in enumerate(largest_first):
        if number < _GLOO_THREADS:
            yield Buffer((2 * world_size + 1) * size, "rows of all ranks", When.END, variable=name)
        else:
            yield Buffer((world_size - 1) * size, "rows of other ranks", When.END, variable=name)


def _rows(number: int, message: Message, size: int, world_size: int) -> Iterator[Buffer]:
    """Rows that are sent: this rank's, packed, and those of all ranks with at most their sum."""
    name = message.slices[0].variable
    yield Buffer(2 * size, "rows of this rank", When.QUEUED, number, name)
    yield Buffer((2 * world_size + 1) * size, "rows of all ranks", When.FLIGHT, number, name)


def _with_residual(message: Message, group: ProcessGroup) -> set[str]:
    """Variables for which this rank keeps a residual."""
    if not message.compressor.error_feedback or group.members < 2:
        return set()
    if message.compressor is not Compressor.POWER_SGD:
        return {part.variable for part in message.slices}
    assert message.rank is not None
    return {part.variable for part in message.slices if _gains(part, message.rank)}


def leader_of_rank(host_of_rank: Sequence[int]) -> list[int]:
    """Which rank sums hierarchical messages for each rank: the lowest one of its host.

    Each rank sums for itself if all are on one host.
    """
    if len(set(host_of_rank)) < 2:
        return list(range(len(host_of_rank)))
    lowest: dict[int, int] = {}
    return [lowest.setdefault(host, rank) for rank, host in enumerate(host_of_rank)]


@dataclass(frozen=True)
class ProcessGroup:
    """The ranks that sum a message, in the order of the ring.

    `place`: that of this rank among them; None if its host's leader sums for it.
    """

    ranks: tuple[int, ...]
    place: int | None

    @property
    def members(self) -> int:
        """m as this rank sees it: 0 without a place."""
        return 0 if self.place is None else len(self.ranks)


class ProcessGroups:
    """The groups of a plan's messages, seen from one rank.

    Each is computed once: a plan of thousands of messages has few of them.
    """

    def __init__(self, plan: Plan, replica: Replica) -> None:
        self._along = plan.ring_order or tuple(range(plan.world_size))
        self._hosts, self._rank = replica.host_of_rank, replica.rank
        self._leaders = leader_of_rank(self._hosts)
        self._has_levels = len(set(self._leaders)) < len(self._leaders)
        self._groups: dict[int | None, ProcessGroup] = {}
        self._shares: dict[tuple[int | None, Shares], Shares | None] = {}

    def of(self, message: Message) -> ProcessGroup:
        """The group of all ranks, or of one rank per host if the hierarchy has two levels."""
        key = self._key(message)
        if key not in self._groups:
            ranks = self._along
            if key is not None:
                leaders = self._leaders_with(key)
                ranks = tuple(rank for rank in self._along if rank in leaders)
            place = ranks.index(self._rank) if self._rank in ranks else None
            self._groups[key] = ProcessGroup(ranks, place)
        return self._groups[key]

    def shares(self, message: Message) -> Shares | None:
        """The shares of the ranks that exchange the message."""
        key = self._key(message)
        if message.shares is None or key is None:
            return message.shares
        if (key, message.shares) not in self._shares:
            on_hosts: dict[int, list[int]] = {}
            for rank, host in enumerate(self._hosts):
                on_hosts.setdefault(host, []).append(rank)
            self._shares[key, message.shares] = shares_of_hosts(
                message.shares, list(on_hosts.values()), sorted(self._leaders_with(key))
            )
        return self._shares[key, message.shares]

    def _key(self, message: Message) -> int | None:
        """None for the group of all ranks; else the owner, -1 without one."""
        if not (message.hierarchical and self._has_levels):
            return None
        return -1 if message.owner is None else message.owner

    def _leaders_with(self, owner: int) -> set[int]:
        """The leaders of hosts; the owner, unless it is -1, leads its own host."""
        leaders = set(self._leaders)
        if owner >= 0:
            leaders = leaders - {self._leaders[owner]} | {owner}
        return leaders


def _gains(part: TensorSlice, rank: int) -> bool:
    columns = part.elements // max(part.rows, 1)
    return rank * (part.rows + columns) < part.rows * columns


class _Exchange:
    """The buffers of one dense message on this rank."""

    def __init__(
        self, number: int, message: Message, groups: ProcessGroups, replica: Replica
    ) -> None:
        self.number = number
        self.message = message
        self._group, self._shares = groups.of(message), groups.shares(message)
        self._m = max(1, self._group.members)
        self._owns = self._m > 1 and replica.rank == message.owner
        self._copies = replica.device == "cpu"
        self._item = DTYPE_BYTES[message.dtype]
        if message.compressor in _HALF:
            self._item = min(self._item, 2)
        self._direct = message.synchronizer is Synchronizer.DIRECT_EXCHANGE
        block = self._block if message.elements > self._block else 1
        multiple = block if self._direct else len(self._group.ranks)
        self._elements = -(-message.elements // multiple) * multiple
        if message.compressor.is_quantiser and not self._direct:
            rows = 1 if message.synchronizer in ROOTED else multiple
            self._elements = max(self._elements, rows * self._quantised_row(rows)[0])

    def buffers(self) -> Iterator[Buffer]:
        yield self._make(self._elements * self._item, "wire")
        if not self.message.compressor.error_feedback:
            yield from self._sum(self._elements * self._item)
        elif self.message.compressor is Compressor.POWER_SGD:
            yield from self._low_rank()
        elif self._direct:
            yield from self._owned_payloads()
        else:
            yield from self._payloads()

    def _make(self, size: int, what: str, when: When = When.ALWAYS) -> Buffer:
        return Buffer(size, what, when, self.number)

    def _sum(self, size: int) -> Iterator[Buffer]:
        """Buffers of a sum of `size` bytes by the message's synchronizer."""
        if self._m < 2:
            return
        if self.message.synchronizer is Synchronizer.REDUCE_SCATTER_ALL_GATHER:
            yield self._make(size // self._m, "shard")
            if self._copies:
                yield self._make(size, "copy by reduce-scatter", When.QUEUED)
                yield self._make(size, "copy by all-gather", When.FLIGHT)
        elif self._direct:
            pieces = piece_bounds(size // self._item, self.message.pieces)
            sizes = Counter(stop - start for start, stop in pieces)  # two at most
            owned = sum(count * self._own_elements(size) for size, count in sizes.items())
            yield self._make((self._m - 1) * owned * self._item, "this rank's share of all others")
            if self._item == 2:
                yield self._make(4 * owned, "sum in float32 of this rank's share")
        elif self.message.synchronizer is Synchronizer.PARAMETER_SERVER and self._owns:
            yield self._make(self._m * size, "parts of all ranks on their server")
            if self._item == 2:
                yield self._make(2 * size, "sum in float32 on its server")
            if self._copies:
                yield self._make(self._m * size, "copy by gather or scatter", When.FLIGHT)

    @property
    def _block(self) -> int:
        """Elements that one rank owns together: those of one scale."""
        return INT8_BLOCK if self.message.compressor is Compressor.INT8 else 1

    def _own_elements(self, elements: int) -> int:
        """How many of `elements` this rank owns."""
        place = self._group.place
        assert place is not None, "only a rank of the group sums the message"
        bounds = owned_bounds(elements, self._shares, self._group.ranks, self._block)
        return bounds[place + 1] - bounds[place]

    def _owned_payloads(self) -> Iterator[Buffer]:
        """Quantisers and top-k by direct exchange: a row of bytes for each owner's part."""
        if self._m < 2:
            return
        bounds = owned_bounds(self._elements, self._shares, self._group.ranks, self._block)
        parts = [stop - start for start, stop in pairwise(bounds)]
        own_elements = self._own_elements(self._elements)
        yield self._make(sum(map(self._row_bytes, parts)), "what is sent")
        yield self._make(self._m * self._row_bytes(own_elements), "what is received")
        yield self._make(own_elements * self._item, "sum of what is received")
        if self.message.compressor is Compressor.INT8:
            scratch = min(_SCRATCH_ELEMENTS, max(parts))
            yield self._make(scratch * self._item, "scratch", When.FLIGHT)
        elif self.message.compressor.is_quantiser:
            yield self._make(max(parts) * self._item, "scratch", When.FLIGHT)

    def _row_bytes(self, elements: int) -> int:
        if elements == 0:
            return 0
        if self.message.compressor.is_quantiser:
            return self._quantised(elements)[1]
        return self._top_k_row(elements)

    def _payloads(self) -> Iterator[Buffer]:
        """Quantisers and top-k: rows of bytes."""
        rooted = self.message.synchronizer in ROOTED
        quantised = self.message.compressor.is_quantiser
        rows = 1 if rooted or not quantised else self._m
        length, width = self.message.elements, 0
        if quantised:
            length, width = self._quantised_row(rows)
        else:
            width = self._top_k_row(self.message.elements)
        if rooted:
            received, total = (self._m, length) if self._owns else (0, 0)
        else:
            received, total = self._m, length if quantised else 0
        yield self._make(rows * width, "what is sent")
        yield self._make(received * width, "what is received")
        yield self._make(total * self._item, "sum of what is received")
        if quantised and not rooted:
            yield self._make(width, "sum that is sent")
        if self._m < 2:
            return
        if quantised:
            int8 = self.message.compressor is Compressor.INT8
            scratch = min(_SCRATCH_ELEMENTS, length) if int8 else length
            yield self._make(scratch * self._item, "scratch", When.FLIGHT)
        if self._copies:
            yield self._make(received * width, "copy by all-gather or gather", When.FLIGHT)

    def _top_k_row(self, elements: int) -> int:
        assert self.message.ratio is not None
        k = math.ceil(elements * self.message.ratio)
        return -(-k * (self._item + 4) // self._item) * self._item

    def _quantised_row(self, rows: int) -> tuple[int, int]:
        """(elements, bytes) of one of `rows` rows, as the runtime's `RowLayout` cuts them."""
        return self._quantised(max(1, -(-self.message.elements // rows)))

    def _quantised(self, length: int) -> tuple[int, int]:
        """(elements, bytes) of a row for `length` elements.

        int8 has blocks of one scale each. Allocations by a plugin's own code are unknown.
        """
        if self.message.compressor is not Compressor.INT8:
            payload_bytes = self.message.compressor.description.payload_bytes
            assert payload_bytes is not None
            return length, -(-payload_bytes(length, self._item) // 8) * 8
        blocks = -(-length // INT8_BLOCK)
        elements = blocks * -(-length // blocks)
        return elements, (blocks + -(-elements // self._item)) * self._item

    def _low_rank(self) -> Iterator[Buffer]:
        """PowerSGD: the factors P and Q, and the start of the next step.

        Slices that gain nothing are sent uncompressed behind P.
        """
        rank = self.message.rank
        assert rank is not None
        factored = [part for part in self.message.slices if _gains(part, rank)]
        left = sum(
            part.rows * rank if _gains(part, rank) else part.elements
            for part in self.message.slices
        )
        right = sum(part.elements // part.rows * rank for part in factored)
        sizes = [-(-count // self._m) * self._m * self._item for count in (left, right) if count]
        for size in sizes:
            yield self._make(size, "factor")
            yield from self._sum(size)
        if self._m > 1:
            yield self._make(right * self._item, "start of the next step")


def bytes_always(buffers: Sequence[Buffer]) -> int:
    """Bytes of the buffers that exist between two steps, too."""
    return sum(buffer.bytes for buffer in buffers if buffer.when is When.ALWAYS)
