"""The steps of a message: a sequence of collectives and the computation before each.

The runtime executes plans the same way (`runtime_rewriter/pytorch/exchange`). Step k runs on lane
k. The thread that computes gradients issues the messages of lane 0; every other lane has a thread.
A hierarchical message is a reduce within each host, the message's own steps among one leader per
host, and a broadcast within each host. A direct exchange is a push, a pull and its arrival. Each of
its pieces takes all steps by itself.

| symbol | meaning |
|---|---|
| n | ranks of the process group that sums the message |
| K | messages of one kind: the shape of every array here |

Sizes and computation are those of one piece; only direct exchanges have several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from autotune.arrays import FloatArray
from autotune.costs.row_traffic import RowTraffic
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.traffic import DIRECT, Collective
from autotune.strategy_space.plan import Message
from autotune.strategy_space.shares import Shares, piece_count
from autotune.strategy_space.strategy import CASTS, ROOTED, Compressor, SparseHandling, Synchronizer
from autotune.workload import DTYPE_BYTES

COUNT_BYTES = 16.0
"""Two 64-bit numbers per rank: the count of the rows that follow."""
INT8_ROWS = 4
"""Rows of the call whose time is `int8_encode_s`, and `int8_decode_s`: `int8` in
`autotune.jobs.campaign.message_costs`."""
_ROOTED = (Collective.GATHER, Collective.SCATTER, Collective.REDUCE, Collective.BROADCAST)


class Scope(StrEnum):
    """The process groups that run a step."""

    WORLD = "world"
    HOSTS = "hosts"  # one group per host
    LEADERS = "leaders"  # one rank per host


@dataclass(frozen=True, eq=False)
class Step:
    """One step of K messages. A step without a collective only computes.

    `size_bytes`: the size that the collective's fit takes. `prepare_s`: computation of each rank
    before the step. `prepare_root_s`: computation of its `root`. `fit`: the probed operation of
    which the collective is one part of two; "" if the collective itself was probed. `shares`: those
    of all ranks in a direct exchange. `served`: one rank owns this one and all others with one
    owner.
    """

    collective: Collective | None
    size_bytes: FloatArray
    prepare_s: FloatArray
    prepare_root_s: FloatArray
    fit: str = ""
    scope: Scope = Scope.WORLD
    root: int | None = None
    shares: Shares | None = None
    served: bool = False


def steps_of(
    messages: Sequence[Message],
    traffic: RowTraffic,
    world_size: int,
    members: int,
    two_level: bool,
    costs: RuntimeCosts,
    shares: Shares | None = None,
) -> tuple[Step, ...]:
    """The steps of messages of one kind. `members`: ranks that sum, the leaders if `two_level`.

    `shares` of a direct exchange: those of all ranks, by which the members own the sums.
    """
    kind = _MessageKind(messages, traffic, world_size, members, costs, shares)
    if kind.first.sparse is not SparseHandling.DENSE:
        return kind.rows()
    if kind.first.compressor is Compressor.POWER_SGD:
        steps = kind.low_rank()
    elif kind.first.compressor.error_feedback:
        steps = kind.compressed()
    else:
        steps = kind.sum(kind.wire_bytes)
    if not two_level:
        return steps
    reduce = kind.step(Collective.REDUCE, kind.dense_bytes, scope=Scope.HOSTS)
    spread = kind.step(Collective.BROADCAST, kind.dense_bytes, scope=Scope.HOSTS)
    return (reduce, *(replace(step, scope=Scope.LEADERS) for step in steps), spread)


class _MessageKind:
    """Messages of one compressor, dtype and synchronizer, with their sizes.

    `wire_bytes`: bytes that one rank sends. `summed_bytes`: bytes of the sum, larger only for rows
    of sparse gradients.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        traffic: RowTraffic,
        world_size: int,
        members: int,
        costs: RuntimeCosts,
        shares: Shares | None,
    ) -> None:
        self.first = messages[0]
        self.shares = shares
        self.members = members
        self.costs = costs
        self.messages = messages
        self.nothing = np.zeros(len(messages))
        pieces = pieces_of(self.first)
        self.elements = np.array([message.elements for message in messages]) / pieces
        self.wire_bytes = np.array([traffic.sent_bytes(message) for message in messages]) / pieces
        summed_bytes = [traffic.summed_bytes(message, world_size) for message in messages]
        self.summed_bytes = np.array(summed_bytes) / pieces
        self.element_bytes = DTYPE_BYTES[self.first.dtype]
        sent_element_bytes = self.element_bytes
        if self.first.compressor in CASTS:
            sent_element_bytes = min(sent_element_bytes, 2)
        self.dense_bytes = self.elements * sent_element_bytes

    def step(
        self,
        collective: Collective | None,
        size_bytes: FloatArray,
        prepare_s: FloatArray | None = None,
        prepare_root_s: FloatArray | None = None,
        fit: str = "",
        scope: Scope = Scope.WORLD,
    ) -> Step:
        return Step(
            collective=collective,
            size_bytes=size_bytes,
            prepare_s=self.nothing if prepare_s is None else prepare_s,
            prepare_root_s=self.nothing if prepare_root_s is None else prepare_root_s,
            fit=fit,
            scope=scope,
            root=self.first.owner if collective in _ROOTED and scope is Scope.WORLD else None,
            shares=self.shares if collective in DIRECT else None,
        )

    def compute(self, prepare_s: FloatArray) -> Step:
        return self.step(None, self.nothing, prepare_s)

    def sum(self, size_bytes: FloatArray, prepare_s: FloatArray | None = None) -> tuple[Step, ...]:
        """A sum by the messages' synchronizer, with computation before its first step."""
        synchronizer = self.first.synchronizer
        if synchronizer is Synchronizer.ALL_REDUCE:
            return (self.step(Collective.ALL_REDUCE, size_bytes, prepare_s),)
        if synchronizer is Synchronizer.DIRECT_EXCHANGE:
            return self._direct(size_bytes, prepare_s)
        first, second = {
            Synchronizer.REDUCE_SCATTER_ALL_GATHER: (
                Collective.REDUCE_SCATTER,
                Collective.ALL_GATHER,
            ),
            Synchronizer.PARAMETER_SERVER: (Collective.GATHER, Collective.SCATTER),
            Synchronizer.REDUCE_BROADCAST: (Collective.REDUCE, Collective.BROADCAST),
        }[synchronizer]
        separate = synchronizer is Synchronizer.REDUCE_BROADCAST
        fit = "" if separate else synchronizer.operation
        return (
            self.step(first, size_bytes, prepare_s, fit=fit),
            self.step(second, size_bytes, fit=fit),
        )

    def _direct(
        self, size_bytes: FloatArray, prepare_s: FloatArray | None
    ) -> tuple[Step, Step, Step]:
        """The rounds' times include the sum of an owner with an equal share."""
        more = max(self.most_owned * self.members - 1, 0.0)
        sum_s = self.costs["sum_s_per_byte"] * more * size_bytes
        fit = Synchronizer.DIRECT_EXCHANGE.operation
        return (
            self.step(Collective.PUSH, size_bytes, prepare_s, fit=fit),
            self.step(Collective.PULL, size_bytes, sum_s, fit=fit),
            self.compute(self.nothing),
        )

    @property
    def most_owned(self) -> float:
        """The largest share that a rank owns."""
        return 1 / self.members if self.shares is None else max(self.shares)

    def compressed(self) -> tuple[Step, ...]:
        """Quantisers and top-k: values are compressed, sent, summed, compressed again and read."""
        n = self.members
        wire_bytes = self.wire_bytes
        if self.first.synchronizer is Synchronizer.DIRECT_EXCHANGE:
            most, owners = self.most_owned, self._owners
            summed_s = self._add_s(n * most, n) + self._compress_s(most)
            return (
                self.step(Collective.PUSH, wire_bytes, self._compress_s(1.0, owners)),
                self.step(Collective.PULL, wire_bytes, summed_s),
                self.compute(self._add_s(1.0, owners)),
            )
        if self.first.synchronizer in ROOTED:
            pushed = self.first.synchronizer is Synchronizer.PARAMETER_SERVER
            back = Collective.SCATTER if pushed else Collective.BROADCAST
            return (
                self.step(Collective.GATHER, wire_bytes, self._compress_s(1.0)),
                self.step(
                    back, wire_bytes, prepare_root_s=self._add_s(n, n) + self._compress_s(1.0)
                ),
                self.compute(self._add_s(1.0)),
            )
        if self.first.compressor.is_quantiser:
            return (
                self.step(Collective.ALL_TO_ALL, wire_bytes, self._compress_s(1.0, n)),
                self.step(
                    Collective.ALL_GATHER, wire_bytes, self._add_s(1.0, n) + self._compress_s(1 / n)
                ),
                self.compute(self._add_s(1.0, n)),
            )
        return (
            self.step(Collective.ALL_GATHER, n * wire_bytes, self._compress_s(1.0)),
            self.compute(self._add_s(n, n)),
        )

    @property
    def _owners(self) -> int:
        """The ranks that own some of a direct exchange: every rank sends a payload to each."""
        if self.shares is None:
            return self.members
        return sum(share > 0 for share in self.shares)

    def _compress_s(self, share: float, payloads: int = 1) -> FloatArray:
        """Compress this share of the elements into this many payloads."""
        compressor, costs = self.first.compressor, self.costs
        elements = share * self.elements
        codec = compressor.description.costs
        if codec is not None:
            # Each payload is read again: what it lost is sent later.
            each_s = codec.encode_s + codec.decode_s
            per_element_s = codec.encode_s_per_element + codec.decode_s_per_element
            return payloads * each_s + per_element_s * elements
        if compressor.is_quantiser:
            fixed_s = _calls_of_int8(payloads) * costs["int8_encode_s"]
            return fixed_s + costs["int8_encode_s_per_element"] * elements
        return payloads * costs["top_k_find_s"] + costs["top_k_find_s_per_element"] * elements

    def _add_s(self, share: float, payloads: int = 1) -> FloatArray:
        """Read and add this many payloads, which together have `share` times the elements."""
        compressor, costs = self.first.compressor, self.costs
        elements = share * self.elements
        codec = compressor.description.costs
        if codec is not None:
            return payloads * codec.decode_s + codec.decode_s_per_element * elements
        if compressor.is_quantiser:
            fixed_s = _calls_of_int8(payloads) * costs["int8_decode_s"]
            return fixed_s + costs["int8_decode_s_per_element"] * elements
        sent_elements = share * self.wire_bytes / (self.element_bytes + 4)
        return payloads * costs["top_k_add_s"] + costs["top_k_add_s_per_element"] * sent_elements

    def low_rank(self) -> tuple[Step, ...]:
        """PowerSGD: two sums of factors, with a matrix product before, between and behind them."""
        factors = np.array([_factors(message) for message in self.messages], dtype=np.float64)
        left_bytes, right_bytes = factors[:, 0] * self.element_bytes, factors[:, 1]
        slices = np.array([len(message.slices) for message in self.messages], dtype=np.float64)
        product_s = (
            self.costs["low_rank_s"] * slices + self.costs["low_rank_s_per_flop"] * factors[:, 2]
        )
        steps = self.sum(left_bytes, product_s)
        if right_bytes[0]:
            steps += self.sum(right_bytes * self.element_bytes, product_s)
        return (*steps, self.compute(product_s))

    def rows(self) -> tuple[Step, ...]:
        """Rows of sparse gradients: their counts, then the rows.

        A server sends back the rows that any rank touched. Rows are packed before each send.
        """
        costs, n, wire_bytes = self.costs, self.members, self.wire_bytes
        packed_s = np.full(len(wire_bytes), costs["rows_take_s"])
        add_s = costs["rows_add_s"] + costs["rows_add_s_per_byte"] * n * wire_bytes
        write_s = costs["rows_write_s"] + costs["rows_write_s_per_byte"] * self.summed_bytes
        count_bytes = np.full(len(wire_bytes), COUNT_BYTES)
        take_s = packed_s + costs["rows_take_s_per_byte"] * wire_bytes
        counts = self.step(Collective.ALL_GATHER, count_bytes * n, take_s)
        if self.first.sparse is SparseHandling.ALL_GATHER:
            rows = self.step(Collective.ALL_GATHER, n * wire_bytes)
            return counts, rows, self.compute(add_s + write_s)
        if self.first.synchronizer is Synchronizer.DIRECT_EXCHANGE:
            # One number per owner and one for the form of the rows.
            rows_for = self.step(Collective.ALL_GATHER, (n + 1) / 2 * n * count_bytes, take_s)
            summed_s = costs["rows_add_s"] + self.most_owned * (add_s - costs["rows_add_s"])
            sums = self.step(Collective.ALL_GATHER, n * count_bytes, summed_s)
            return (
                rows_for,
                self.step(Collective.PUSH, wire_bytes, packed_s),
                sums,
                self.step(Collective.PULL, self.summed_bytes, packed_s),
                self.compute(packed_s + write_s),
            )
        return (
            counts,
            self.step(Collective.GATHER, wire_bytes, packed_s),
            self.step(Collective.BROADCAST, count_bytes, prepare_root_s=add_s),
            self.step(Collective.SCATTER, self.summed_bytes, prepare_root_s=packed_s),
            self.compute(write_s),
        )


def pieces_of(message: Message) -> int:
    """The pieces in which a direct exchange sends a message; none of them is empty."""
    return piece_count(message.elements, message.pieces)


def _calls_of_int8(payloads: int) -> float:
    """The cost of these payloads of int8, in one call or several, by that of the measured call.

    That has `INT8_ROWS`. Fewer cost no more, and each row has its own round of a loop.
    """
    return max(payloads / INT8_ROWS, 1.0)


def _factors(message: Message) -> tuple[int, int, int]:
    """(elements of PowerSGD's first sum, of its second sum, multiplications of one product).

    Slices that gain nothing are sent uncompressed with the first sum.
    """
    assert message.rank is not None
    left = right = flops = 0
    for part in message.slices:
        columns = part.elements // max(part.rows, 1)
        if part.rows > 1 and message.rank * (part.rows + columns) < part.elements:
            left += message.rank * part.rows
            right += message.rank * columns
            flops += message.rank * part.elements
        else:
            left += part.elements
    return left, right, flops
