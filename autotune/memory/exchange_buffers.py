"""Buffers that the exchange of one dense message allocates on one rank.

Sizes follow `runtime_rewriter/pytorch`: `exchange/transfer` (the wire), `exchange/sums`,
`exchange/compressed` and `exchange/residuals`. On a CPU some collectives of gloo copy their tensors
(measured with a counting allocator, torch 2.13, 2 to 4 ranks). Reduce-scatter copies its input
until the message's next step. If that step waits for norms, the copy lives until the result has
arrived: gloo's work owns it, and the message keeps its works (by reading, not measured). All-gather
copies its output. Gather and scatter hold one copy per rank on the root. The others copy nothing.

| symbol | meaning |
|---|---|
| m | ranks that sum a message: all, or one per host for a hierarchical message |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from autotune.memory.buffers import Buffer, When
from autotune.memory.process_groups import ProcessGroup, ProcessGroups
from autotune.recordings.memory_profile import Replica
from autotune.strategy_space.compressors import INT8_BLOCK
from autotune.strategy_space.plan import Message, TensorSlice
from autotune.strategy_space.shares import owned_bounds, piece_bounds
from autotune.strategy_space.strategy import CASTS, ROOTED, Compressor, Synchronizer
from autotune.workload import DTYPE_BYTES

_SCRATCH_ELEMENTS = 2**18
"""Elements that a CPU quantises at a time (`exchange/quantise`)."""


class ExchangeBuffers:
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
        if message.compressor in CASTS:
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
                yield self._make(size, "copy by all-gather", When.RESULT)
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


def variables_with_residual(message: Message, group: ProcessGroup) -> set[str]:
    """Variables for which this rank keeps a residual."""
    if not message.compressor.error_feedback or group.members < 2:
        return set()
    if message.compressor is not Compressor.POWER_SGD:
        return {part.variable for part in message.slices}
    assert message.rank is not None
    return {part.variable for part in message.slices if _gains(part, message.rank)}


def _gains(part: TensorSlice, rank: int) -> bool:
    columns = part.elements // max(part.rows, 1)
    return rank * (part.rows + columns) < part.rows * columns
