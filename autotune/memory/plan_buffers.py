"""Buffers that synchronization by a plan allocates on one rank, message by message.

Sizes follow `runtime_rewriter/pytorch`: `packing` and torch's reducer (`native_buckets`). Those of
a dense message's exchange are in `exchange_buffers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autotune.memory.buffers import Buffer, When
from autotune.memory.exchange_buffers import ExchangeBuffers, variables_with_residual
from autotune.memory.process_groups import ProcessGroups
from autotune.recordings.memory_profile import Replica
from autotune.strategy_space.backend import buckets_of
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.strategy import CASTS, Compressor, SparseHandling, Synchronizer
from autotune.workload import DTYPE_BYTES, Workload

PLAN_BUCKETS = "buckets of the plan"
_GLOO_THREADS = 2
"""Threads of a process group (torch: ProcessGroupGloo::Options)."""


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
        buffers += ExchangeBuffers(number, message, groups, replica).buffers()
        buffers += _packing(number, message, sparse, workload, world_size)
        with_residual |= variables_with_residual(message, groups.of(message))
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
        if message.compressor in CASTS and element_bytes > 2:
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


def bytes_always(buffers: Sequence[Buffer]) -> int:
    """Bytes of the buffers that exist between two steps, too."""
    return sum(buffer.bytes for buffer in buffers if buffer.when is When.ALWAYS)
