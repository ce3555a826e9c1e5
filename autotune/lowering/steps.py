"""The steps of a message: collectives that follow each other, each on its lane, and what is computed before them.

As the runtime carries plans out (`runtime_rewriter/pytorch/exchange`): step k runs on lane k, lane 0 is issued by the thread that
computes gradients, lane k > 0 by a thread of its own. A hierarchical message is a reduce inside each host, the message's own
steps among one leader per host, and a broadcast inside.

| symbol | meaning |
|---|---|
| n | members of the message's circle |
| K | messages of one kind, shape of every array here |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from autotune.arrays import FloatArray
from autotune.costs.row_traffic import RowTraffic
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.traffic import Collective
from autotune.strategy_space.compressors import CodecCosts
from autotune.strategy_space.plan import Message
from autotune.strategy_space.strategy import CASTS, Compressor, SparseHandling, Synchronizer
from autotune.workload import DTYPE_BYTES

COUNT_BYTES = 16.0
"""Two 64-bit numbers per rank say how many rows follow."""


class Circle(StrEnum):
    """Who takes part in a step."""

    WORLD = "world"
    HOSTS = "hosts"  # the ranks of every host among themselves
    LEADERS = "leaders"  # one rank per host


@dataclass(frozen=True, eq=False)
class Sizes:
    """Of K messages of one kind. `wire_bytes`: what one rank sends; `summed_bytes`: what the sum weighs, more only for rows of sparse
    gradients. `left_bytes` and `right_bytes` are PowerSGD's two sums, `flops` one of its products."""

    elements: FloatArray
    wire_bytes: FloatArray
    summed_bytes: FloatArray
    element_bytes: float
    picked: FloatArray
    left_bytes: FloatArray
    right_bytes: FloatArray
    flops: FloatArray
    slices: FloatArray

    @property
    def dense_bytes(self) -> FloatArray:
        return self.elements * self.element_bytes


Sized = Callable[[Sizes], FloatArray]


def _wire(sizes: Sizes) -> FloatArray:
    return sizes.wire_bytes


def _dense(sizes: Sizes) -> FloatArray:
    return sizes.dense_bytes


def _nothing(sizes: Sizes) -> FloatArray:
    return np.zeros(len(sizes.elements))


@dataclass(frozen=True)
class Step:
    """`size`: bytes that the collective's fit is asked for; `prepare`: seconds every rank computes before; `prepare_root`: its root.

    `fit`: the probed primitive whose cost the step is a part of, one of `of` steps; "" where the collective itself was probed.
    A step without a collective only computes.
    """

    collective: Collective | None
    size: Sized
    prepare: Sized = _nothing
    prepare_root: Sized = _nothing
    fit: str = ""
    circle: Circle = Circle.WORLD
    root: int | None = None


def _summed(sizes: Sizes) -> FloatArray:
    return sizes.summed_bytes


def sizes_of(messages: Sequence[Message], traffic: RowTraffic, ranks: int) -> Sizes:
    """Of messages of one kind, that is with the same compressor and dtype, in a world of so many `ranks`."""
    first = messages[0]
    elements = np.array([message.elements for message in messages], dtype=np.float64)
    wire = np.array([traffic.sent_bytes(message) for message in messages])
    summed = np.array([traffic.summed_bytes(message, ranks) for message in messages])
    none = np.zeros(len(messages))
    left, right, flops, picked = none, none, none, none
    element_bytes = DTYPE_BYTES[first.dtype]
    if first.compressor is Compressor.POWER_SGD:
        factors = np.array([_factors(message) for message in messages], dtype=np.float64)
        left, right, flops = (
            factors[:, 0] * element_bytes,
            factors[:, 1] * element_bytes,
            factors[:, 2],
        )
    elif first.compressor is Compressor.TOP_K:
        picked = wire / (element_bytes + 4)
    travelling = min(element_bytes, 2) if first.compressor in CASTS else element_bytes
    slices = np.array([len(message.slices) for message in messages], dtype=np.float64)
    return Sizes(elements, wire, summed, travelling, picked, left, right, flops, slices)


def _factors(message: Message) -> tuple[int, int, int]:
    """(elements of the first sum with the slices that travel as they are, of the second, multiplications of a product)."""
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


def steps_of(
    message: Message, members: int, two_level: bool, costs: RuntimeCosts
) -> tuple[Step, ...]:
    """Of all messages of this one's kind; `members` of the circle whose sum it is, the leaders' where `two_level`."""
    circle = Circle.LEADERS if two_level else Circle.WORLD
    if message.sparse is not SparseHandling.DENSE:
        return _rows(message, members, costs)
    if message.compressor.error_feedback:
        own = _compressed(message, members, circle, costs)
    else:
        own = _plain(message.synchronizer, message.owner, circle, _wire)
    if not two_level:
        return own
    inside = Step(Collective.REDUCE, _dense, circle=Circle.HOSTS)
    return (inside, *own, Step(Collective.BROADCAST, _dense, circle=Circle.HOSTS))


def _plain(
    synchronizer: Synchronizer, owner: int | None, circle: Circle, size: Sized
) -> tuple[Step, ...]:
    if synchronizer is Synchronizer.ALL_REDUCE:
        return (Step(Collective.ALL_REDUCE, size, circle=circle),)
    if synchronizer is Synchronizer.REDUCE_SCATTER_ALL_GATHER:
        kinds = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        return tuple(Step(kind, size, fit=synchronizer.operation, circle=circle) for kind in kinds)
    if synchronizer is Synchronizer.PARAMETER_SERVER:
        kinds = (Collective.GATHER, Collective.SCATTER)
        return tuple(
            Step(kind, size, fit=synchronizer.operation, circle=circle, root=owner)
            for kind in kinds
        )
    return tuple(
        Step(kind, size, circle=circle, root=owner)
        for kind in (Collective.REDUCE, Collective.BROADCAST)
    )


def _compressed(
    message: Message, members: int, circle: Circle, costs: RuntimeCosts
) -> tuple[Step, ...]:
    if message.compressor is Compressor.POWER_SGD:
        return _low_rank(message, circle, costs)
    encode, add_all, read = _codec(message.compressor, costs)

    def combined(sizes: Sizes) -> FloatArray:
        """What the one who sums does: adds what all have sent, and compresses the sum."""
        return add_all(sizes, float(members)) + encode(sizes, 1.0)

    if message.synchronizer in (Synchronizer.PARAMETER_SERVER, Synchronizer.REDUCE_BROADCAST):
        pushed = message.synchronizer is Synchronizer.PARAMETER_SERVER
        back = Collective.SCATTER if pushed else Collective.BROADCAST
        return (
            Step(
                Collective.GATHER,
                _wire,
                lambda sizes: encode(sizes, 1.0),
                circle=circle,
                root=message.owner,
            ),
            Step(back, _wire, prepare_root=combined, circle=circle, root=message.owner),
            Step(None, _nothing, lambda sizes: read(sizes, 1.0), circle=circle),
        )
    if message.compressor.is_quantiser:
        return (
            Step(Collective.ALL_TO_ALL, _wire, lambda sizes: encode(sizes, 1.0), circle=circle),
            Step(
                Collective.ALL_GATHER,
                _wire,
                lambda sizes: add_all(sizes, 1.0) + encode(sizes, 1 / members),
                circle=circle,
            ),
            Step(None, _nothing, lambda sizes: read(sizes, 1.0), circle=circle),
        )
    return (
        Step(
            Collective.ALL_GATHER,
            lambda sizes: members * sizes.wire_bytes,
            lambda sizes: encode(sizes, 1.0),
            circle=circle,
        ),
        Step(None, _nothing, lambda sizes: add_all(sizes, float(members)), circle=circle),
    )


Coded = Callable[[Sizes, float], FloatArray]
"""Seconds for so many times the message's elements, or for so many ranks' payloads."""


def _codec(compressor: Compressor, costs: RuntimeCosts) -> tuple[Coded, Coded, Coded]:
    """(compress, add payloads, read one payload)."""
    if compressor.is_quantiser:
        codec = _quantiser_costs(compressor, costs)

        def encode(sizes: Sizes, share: float) -> FloatArray:
            return codec.encode_s + codec.encode_s_per_element * share * sizes.elements

        def read(sizes: Sizes, share: float) -> FloatArray:
            return codec.decode_s + codec.decode_s_per_element * share * sizes.elements

        return encode, read, read

    def find(sizes: Sizes, share: float) -> FloatArray:
        return costs["top_k_find_s"] + costs["top_k_find_s_per_element"] * share * sizes.elements

    def add(sizes: Sizes, rows: float) -> FloatArray:
        return costs["top_k_add_s"] + costs["top_k_add_s_per_element"] * rows * sizes.picked

    return find, add, add


def _quantiser_costs(compressor: Compressor, costs: RuntimeCosts) -> CodecCosts:
    if compressor.description.costs is not None:
        return compressor.description.costs
    return CodecCosts(
        encode_s=costs["int8_encode_s"],
        encode_s_per_element=costs["int8_encode_s_per_element"],
        decode_s=costs["int8_decode_s"],
        decode_s_per_element=costs["int8_decode_s_per_element"],
        source=costs.int8_encode_s.source,
    )


def _low_rank(message: Message, circle: Circle, costs: RuntimeCosts) -> tuple[Step, ...]:
    """Two sums by the message's primitive and a product before and behind each."""

    def product(sizes: Sizes) -> FloatArray:
        return costs["low_rank_s"] * sizes.slices + costs["low_rank_s_per_flop"] * sizes.flops

    def prepared(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        first, *others = steps
        return (
            Step(
                first.collective,
                first.size,
                product,
                first.prepare_root,
                first.fit,
                first.circle,
                first.root,
            ),
            *others,
        )

    steps = prepared(
        _plain(message.synchronizer, message.owner, circle, lambda sizes: sizes.left_bytes)
    )
    if _factors(message)[1]:
        steps += prepared(
            _plain(message.synchronizer, message.owner, circle, lambda sizes: sizes.right_bytes)
        )
    return (*steps, Step(None, _nothing, product, circle=circle))


def _rows(message: Message, members: int, costs: RuntimeCosts) -> tuple[Step, ...]:
    """Rows of a sparse gradient: how many they are first, then the rows; a server sends back those that any rank touched."""

    def counts(sizes: Sizes) -> FloatArray:
        return np.full(len(sizes.elements), COUNT_BYTES * members)

    def take(sizes: Sizes) -> FloatArray:
        return costs["rows_take_s_per_byte"] * sizes.wire_bytes

    def add(sizes: Sizes) -> FloatArray:
        return costs["rows_add_s_per_byte"] * members * sizes.wire_bytes

    def write(sizes: Sizes) -> FloatArray:
        return costs["rows_write_s_per_byte"] * sizes.summed_bytes

    told = Step(Collective.ALL_GATHER, counts, take)
    if message.sparse is SparseHandling.ALL_GATHER:
        rows = Step(Collective.ALL_GATHER, lambda sizes: members * sizes.wire_bytes)
        return told, rows, Step(None, _nothing, lambda sizes: add(sizes) + write(sizes))
    spread = Step(
        Collective.BROADCAST,
        lambda sizes: np.full(len(sizes.elements), COUNT_BYTES),
        prepare_root=add,
        root=message.owner,
    )
    rows, back = (
        Step(Collective.GATHER, _wire, root=message.owner),
        Step(Collective.SCATTER, _summed, root=message.owner),
    )
    return told, rows, spread, back, Step(None, _nothing, write)
