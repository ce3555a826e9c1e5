"""What synchronization by a plan allocates on one rank, message by message, as the runtime does it.

Sizes follow runtime_rewriter/pytorch: `packing`, `exchange/transfer` (wire), `exchange/sums`, `exchange/compressed`, `exchange/residuals`
and torch's reducer (`native_buckets`). On a CPU some collectives of gloo copy what they are given into tensors of their own (measured
with a counting allocator, torch 2.13, 2 to 4 ranks): reduce-scatter its input, from its issue until the next step of the message;
all-gather its output; gather and scatter on the root once per rank; the others nothing.

| symbol | meaning |
|---|---|
| w | ranks of the plan |
| m | ranks among which a message is summed: w, or one per host where it is hierarchical |
| V | bytes of a message's wire: what is packed, in the dtype that travels, padded to a multiple of m elements |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from autotune.recordings.memory_profile import Replica
from autotune.strategy_space.backend import buckets_of
from autotune.strategy_space.plan import INT8_BLOCK, Message, Plan, TensorSlice
from autotune.strategy_space.strategy import (
    ERROR_FEEDBACK,
    ROOTED,
    Compressor,
    SparseHandling,
    Synchronizer,
)
from autotune.workload import DTYPE_BYTES, Workload

_HALF = (Compressor.FP16, Compressor.BF16)
_GLOO_THREADS = 2
"""Of a process group (torch: ProcessGroupGloo::Options)."""
_SCRATCH_ELEMENTS = 2**18
"""What a CPU quantises at a time (`exchange/quantise`)."""


class When(StrEnum):
    """When a buffer is there."""

    ALWAYS = "always"
    STEP_START = "step_start"
    READY = "ready"  # while the gradient of its variable is packed
    QUEUED = "queued"  # from the issue of its message until this has arrived
    FLIGHT = "flight"  # while its message has the channel
    END = "end"  # when the averages are written, after the backward pass


@dataclass(frozen=True)
class Buffer:
    """`message`: its number in the plan. `variable`: whose it is."""

    bytes: int
    what: str
    when: When = When.ALWAYS
    message: int | None = None
    variable: str | None = None


def plan_buffers(
    plan: Plan | None, workload: Workload, replica: Replica, world_size: int
) -> list[Buffer]:
    """Everything that this rank allocates for synchronization; `plan` None: torch's DDP with its own buckets."""
    sparse = replica.sparse_bytes or {}
    dense = {
        v.name: v.grad_bytes for v in workload.variables if v.name not in sparse and not v.sparse
    }
    found = (
        [Buffer(replica.buffer_bytes, "buffers that are sent from rank 0", When.STEP_START)]
        if replica.buffer_bytes
        else []
    )
    if world_size < 2 and plan is None:
        return found
    native = plan is not None and buckets_of(plan) is not None and not sparse
    if replica.ddp or plan is None:
        found.append(Buffer(sum(dense.values()), "buckets of the DDP's own reducer"))
    if plan is None:
        return [*found, *_ddp_rows(sparse, world_size)]
    if native:
        return [*found, Buffer(sum(dense.values()), "buckets of the plan")]
    residual_of: set[str] = set()
    for number, message in enumerate(plan.messages):
        if message.sparse is not SparseHandling.DENSE:
            found += _rows(
                number,
                message,
                sparse.get(message.slices[0].variable, message.grad_bytes),
                world_size,
            )
            continue
        found += _Exchange(number, message, plan, replica).buffers()
        found += _packing(number, message, sparse, workload, world_size)
        residual_of |= _fed(message, plan, replica)
    picked = _picked(plan, sparse, workload, world_size)
    if picked:
        found.append(Buffer(picked, "rows of an average while it is written", When.END))
    found += [
        Buffer(v.grad_bytes, "residual", variable=v.name)
        for v in workload.variables
        if v.name in residual_of
    ]
    return found


def multiplying_lanes(plan: Plan) -> frozenset[int]:
    """Lanes on which PowerSGD multiplies matrices (`exchange/compressed`): before its two sums and after them.

    On a GPU each has a stream of its own, for which cuBLAS keeps a workspace.
    """
    found: set[int] = set()
    for message in plan.messages:
        if message.compressor is Compressor.POWER_SGD:
            first, steps = (
                int(message.hierarchical),
                1 if message.synchronizer is Synchronizer.ALL_REDUCE else 2,
            )
            found |= {first, first + steps, first + 2 * steps}
    return frozenset(found)


def _packing(
    number: int, message: Message, sparse: Mapping[str, int], workload: Workload, world_size: int
) -> Iterator[Buffer]:
    """Copies between a gradient and the wire: a cast is scaled in the gradient's dtype first, a sparse gradient is made dense."""
    size = DTYPE_BYTES[message.dtype]
    for part in message.slices:
        if message.compressor in _HALF and size > 2:
            yield Buffer(
                part.elements * size, "gradient before its cast", When.READY, number, part.variable
            )
        if part.variable in sparse:
            whole = workload.variables[workload.index[part.variable]].grad_bytes
            yield Buffer(whole, "sparse gradient made dense", When.READY, number, part.variable)
            if part.start == 0:
                grown = (
                    _average_bytes(sparse[part.variable], whole, world_size) - sparse[part.variable]
                )
                yield Buffer(
                    whole + grown,
                    "average before it is sparse again",
                    When.END,
                    number,
                    part.variable,
                )


def _picked(plan: Plan, sparse: Mapping[str, int], workload: Workload, world_size: int) -> int:
    """Averages become sparse again one after the other: of the largest, the rows that are picked, and their copy into the gradient."""
    parts = [
        part
        for message in plan.messages
        if message.sparse is SparseHandling.DENSE
        for part in message.slices
    ]
    names = {part.variable for part in parts if part.variable in sparse}
    whole = {name: workload.variables[workload.index[name]].grad_bytes for name in names}
    return max(
        (sparse[name] + _average_bytes(sparse[name], whole[name], world_size) for name in names),
        default=0,
    )


def _average_bytes(own_bytes: int, whole_bytes: int, world_size: int) -> int:
    """Rows of all ranks, of which at most all are different ones."""
    return min(world_size * own_bytes, max(whole_bytes, own_bytes))


def _ddp_rows(sparse: Mapping[str, int], world_size: int) -> Iterator[Buffer]:
    """torch's reducer sums sparse gradients over gloo: every rank gets the rows of all and adds them, as many variables at once as gloo has
    threads. What has been summed has left the rows of all ranks in the gradient."""
    for number, (name, size) in enumerate(sorted(sparse.items(), key=lambda item: -item[1])):
        if number < _GLOO_THREADS:
            yield Buffer((2 * world_size + 1) * size, "rows of all ranks", When.END, variable=name)
        else:
            yield Buffer((world_size - 1) * size, "rows of other ranks", When.END, variable=name)


def _rows(number: int, message: Message, size: int, world_size: int) -> Iterator[Buffer]:
    """Rows that travel: this rank's, packed, and those of all; at most their sum is written."""
    yield Buffer(2 * size, "rows of this rank", When.QUEUED, number, message.slices[0].variable)
    yield Buffer(
        (2 * world_size + 1) * size,
        "rows of all ranks",
        When.FLIGHT,
        number,
        message.slices[0].variable,
    )


def _fed(message: Message, plan: Plan, replica: Replica) -> set[str]:
    """Variables of which this rank may keep back something."""
    if message.compressor not in ERROR_FEEDBACK or len(_members(message, plan, replica)) < 2:
        return set()
    if message.compressor is not Compressor.POWER_SGD:
        return {part.variable for part in message.slices}
    assert message.rank is not None
    return {part.variable for part in message.slices if _gains(part, message.rank)}


def _circle(message: Message, plan: Plan, replica: Replica) -> tuple[int, ...]:
    """The ranks among which the message is summed: all, or one of each host where hierarchy means something."""
    hosts = replica.host_of_rank
    world = tuple(range(plan.world_size))
    names = sorted(set(hosts))
    if not message.hierarchical or len(names) < 2 or len(names) == len(hosts):
        return world
    leaders = [min(rank for rank in world if hosts[rank] == host) for host in names]
    if message.owner is not None:
        leaders[names.index(hosts[message.owner])] = message.owner
    return tuple(leaders)


def _members(message: Message, plan: Plan, replica: Replica) -> tuple[int, ...]:
    """Those of `_circle`, or none where this rank leaves the sum to its host's leader."""
    circle = _circle(message, plan, replica)
    return circle if replica.rank in circle else ()


def _gains(part: TensorSlice, rank: int) -> bool:
    columns = part.elements // max(part.rows, 1)
    return rank * (part.rows + columns) < part.rows * columns


class _Exchange:
    """The buffers of one dense message on this rank."""

    def __init__(self, number: int, message: Message, plan: Plan, replica: Replica) -> None:
        self.number, self.message = number, message
        self._members = _members(message, plan, replica)
        self._m = max(1, len(self._members))
        self._owns = len(self._members) > 1 and replica.rank == message.owner
        self._copies = replica.device == "cpu"
        self._item = (
            min(DTYPE_BYTES[message.dtype], 2)
            if message.compressor in _HALF
            else DTYPE_BYTES[message.dtype]
        )
        multiple = len(_circle(message, plan, replica))
        self._elements = -(-message.elements // multiple) * multiple
        if message.compressor is Compressor.INT8:
            rows = 1 if message.synchronizer in ROOTED else multiple
            self._elements = max(self._elements, rows * self._int8_row(rows)[0])

    def buffers(self) -> Iterator[Buffer]:
        yield self._make(self._elements * self._item, "wire")
        if self.message.compressor not in ERROR_FEEDBACK:
            yield from self._sum(self._elements * self._item)
        elif self.message.compressor is Compressor.POWER_SGD:
            yield from self._low_rank()
        else:
            yield from self._payloads()

    def _make(self, size: int, what: str, when: When = When.ALWAYS) -> Buffer:
        return Buffer(size, what, when, self.number)

    def _sum(self, size: int) -> Iterator[Buffer]:
        """Of `size` bytes by the message's primitive."""
        if len(self._members) < 2:
            return
        if self.message.synchronizer is Synchronizer.REDUCE_SCATTER_ALL_GATHER:
            yield self._make(size // self._m, "shard")
            if self._copies:
                yield self._make(size, "copy by reduce-scatter", When.QUEUED)
                yield self._make(size, "copy by all-gather", When.FLIGHT)
        elif self.message.synchronizer is Synchronizer.PARAMETER_SERVER and self._owns:
            yield self._make(self._m * size, "parts of all ranks on their server")
            if self._item == 2:
                yield self._make(2 * size, "sum in float32 on its server")
            if self._copies:
                yield self._make(self._m * size, "copy by gather or scatter", When.FLIGHT)

    def _payloads(self) -> Iterator[Buffer]:
        """int8 and top-k: rows of bytes."""
        rooted = self.message.synchronizer in ROOTED
        int8 = self.message.compressor is Compressor.INT8
        rows = 1 if rooted or not int8 else self._m
        length, width = self._int8_row(rows) if int8 else (self.message.elements, self._top_k_row())
        if rooted:
            received, total = (self._m, length) if self._owns else (0, 0)
        else:
            received, total = self._m, length if int8 else 0
        yield self._make(rows * width, "what is sent")
        yield self._make(received * width, "what is received")
        yield self._make(total * self._item, "sum of what is received")
        if int8 and not rooted:
            yield self._make(width, "sum that is sent")
        if len(self._members) < 2:
            return
        if int8:
            yield self._make(min(_SCRATCH_ELEMENTS, length) * self._item, "scratch", When.FLIGHT)
        if self._copies:
            yield self._make(received * width, "copy by all-gather or gather", When.FLIGHT)

    def _top_k_row(self) -> int:
        assert self.message.ratio is not None
        k = math.ceil(self.message.elements * self.message.ratio)
        return -(-k * (self._item + 4) // self._item) * self._item

    def _int8_row(self, rows: int) -> tuple[int, int]:
        """(elements, bytes) of one of `rows` rows of int8 blocks, each with a scale, as `RowLayout` cuts them."""
        length = max(1, -(-self.message.elements // rows))
        blocks = -(-length // INT8_BLOCK)
        elements = blocks * -(-length // blocks)
        return elements, (blocks + -(-elements // self._item)) * self._item

    def _low_rank(self) -> Iterator[Buffer]:
        """PowerSGD: the factors P and Q and the start of the next step; what gains nothing lies behind P."""
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
        if len(self._members) > 1:
            yield self._make(right * self._item, "start of the next step")


def bytes_always(buffers: Sequence[Buffer]) -> int:
    """Of what is there between two steps, too."""
    return sum(one.bytes for one in buffers if one.when is When.ALWAYS)
