"""Reads timelines that Horovod 0.21 to 0.28 writes (`HOROVOD_TIMELINE`, `hvd.start_timeline`).

Rank 0 alone writes one, in microseconds of a monotonic clock. A process id is a tensor, named by
metadata. A tensor's events nest: the negotiation, then the operation with its activities.

    NEGOTIATE_ALLREDUCE   until all ranks have the tensor; X events named by rank mark each of them
    ALLREDUCE             the operation; its end states dtype and shape
      MEMCPY_IN_FUSION_BUFFER, GLOO_ALLREDUCE (or NCCL_, MPI_ ...), MEMCPY_OUT_FUSION_BUFFER

A hierarchical all-reduce has several transfers, such as NCCL_REDUCESCATTER, MPI_ALLREDUCE and
NCCL_ALLGATHER, with copies between them. They count as one, from the first start to the last end.

Tensors of a fused batch enter the transfer one right after the other: no event of another kind, and
no end of one of them, lies between. Cached negotiations name no ranks. A version before 0.28 never
closes the JSON array, and a script that dies leaves it open anywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autotune.arrays import FloatArray
from autotune.errors import InvalidInput
from autotune.limits import MAX_ELEMENTS, MAX_VARIABLES
from autotune.profiling.formats.collective_args import element_bytes
from autotune.profiling.formats.json_stream import JsonItems, Read
from autotune.profiling.formats.limits import MAX_SPAN_US, limited, limited_rank
from autotune.profiling.formats.rank_trace import Repair

BEGINNING = b"start_time_since_epoch_in_micros"
"""In the first event of every timeline since Horovod 0.21."""
MAX_EVENTS = 50_000_000
MAX_NAME_CHARS = 400
MAX_DEPTH = 16
"""Nested events of a tensor; Horovod nests two."""
MOST_BAD = 0.05
US = 1e-6

NEGOTIATE = "NEGOTIATE_"
CYCLE = "CYCLE_START"
COPY_IN, COPY_OUT = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"
CROSS = "CROSS_"
"""In the name of a transfer between one rank of each host."""
SEVERAL = " + "
"""Between the names of several transfers."""
_TRANSFER = re.compile(
    rf"(?:GLOO|MPI|NCCL|CCL|DDL|MLSL)_(?:{CROSS})?(?:ALLREDUCE|ADASUM_ALLREDUCE|ALLGATHER|BCAST|"
    r"BROADCAST|ALLTOALL|REDUCESCATTER|REDUCE)"
)
_DIMENSIONS = re.compile(r"\d{1,15}")


@dataclass(frozen=True)
class TensorOperation:
    """One tensor's way through Horovod; seconds from the timeline's origin.

    - `negotiated_s`: start and end of the negotiation, None where the timeline does not show it.
    - `ready_s`: (rank, when rank 0 learned that it has the tensor); none for cached negotiations.
    - `transfers`: names of the activities that send, in their order.
    - `copied_in_s`, `transferred_s`, `copied_out_s`: spans of the activities, None for absent ones.
    """

    tensor: str
    kind: str
    start_s: float
    end_s: float
    size_bytes: float = 0.0
    dtype: str = ""
    negotiated_s: tuple[float, float] | None = None
    ready_s: tuple[tuple[int, float], ...] = ()
    transfers: tuple[str, ...] = ()
    copied_in_s: tuple[float, float] | None = None
    transferred_s: tuple[float, float] | None = None
    copied_out_s: tuple[float, float] | None = None

    @property
    def transfer(self) -> str:
        return SEVERAL.join(self.transfers)


@dataclass(frozen=True)
class FusedBatch:
    """Operations, by index, that are transferred together; a batch of one is not copied.

    `transfers`: names of the activities that send, one after the other.
    """

    operations: tuple[int, ...]
    transfers: tuple[str, ...]
    size_bytes: float
    start_s: float
    transfer_s: tuple[float, float]
    end_s: float

    @property
    def transfer(self) -> str:
        return SEVERAL.join(self.transfers)

    @property
    def is_flat(self) -> bool:
        """Whether all ranks took part in one transfer, which a ring may have carried."""
        return len(self.transfers) == 1 and CROSS not in self.transfers[0]


@dataclass(frozen=True, eq=False)
class HorovodTimeline:
    """Complete operations in order of start, and their batches.

    - `origin_us`: time of the origin since 1970 by rank 0's clock, 0 where not stated.
    - `cycles_s` (C,): starts of negotiation cycles, if they were marked.
    - `ranks`: ranks that negotiations name, at least 1.
    """

    source: str
    origin_us: int
    operations: tuple[TensorOperation, ...]
    batches: tuple[FusedBatch, ...]
    cycles_s: FloatArray
    ranks: int
    repairs: tuple[Repair, ...] = ()


def read_horovod(read: Read, where: str) -> HorovodTimeline:
    """Read one timeline. Raises `InvalidInput` for another file and for one mostly unusable."""
    return _TimelineReader(JsonItems(read, "", where, may_be_cut=True), where).timeline()


@dataclass
class _Open:
    """An event that began and has not ended, with its activities so far."""

    name: str
    start_us: float
    activities: dict[str, tuple[float, float]] = field(default_factory=dict)
    transfers: list[tuple[str, tuple[float, float]]] = field(default_factory=list)
    batch: list[int] | None = None


@dataclass
class _Tensor:
    name: str
    stack: list[_Open] = field(default_factory=list)
    negotiated_us: tuple[float, float] | None = None
    ready_us: list[tuple[int, float]] = field(default_factory=list)


class _TimelineReader:
    def __init__(self, items: JsonItems, where: str) -> None:
        self.items, self.where = items, where
        self.tensors: dict[int, _Tensor] = {}
        self.operations: list[TensorOperation] = []
        self.batches: list[list[int]] = []
        self.cycles_us: list[float] = []
        self.run: tuple[str, list[int], set[int]] | None = None
        self.origin_us = 0
        self.ranks = 1
        self.bad, self.first_bad = 0, ""

    def timeline(self) -> HorovodTimeline:
        for event in self.items:
            if self.items.items > MAX_EVENTS:
                raise InvalidInput(
                    f"{self.where} may hold at most {MAX_EVENTS} events, but has more"
                )
            try:
                problem = self._event(event) if isinstance(event, dict) else "it is no object"
            except InvalidInput as error:
                place = f"{self.where}, event {self.items.items - 1}"
                raise InvalidInput(f"{place}: {error}; is the file damaged?") from error
            if problem:
                self.bad += 1
                self.first_bad = self.first_bad or f"event {self.items.items - 1}: {problem}"
        if self.bad > MOST_BAD * self.items.items:
            raise InvalidInput(
                f"at most {100 * MOST_BAD:.0f} % of a timeline's events may be unusable, but of "
                f"{self.items.items} in {self.where} {self.bad} are; first {self.first_bad}; "
                "record the timeline again"
            )
        if not self.operations:
            raise InvalidInput(
                f"{self.where} must hold a complete operation of Horovod, but has none; train some "
                "steps with HOROVOD_TIMELINE set, and name rank 0's file"
            )
        return self._build()

    def _event(self, event: dict[str, Any]) -> str:
        """Take in the event; return what is wrong with it, "" if nothing is."""
        phase = event.get("ph")
        if phase == "M":
            return self._metadata(event)
        at_us = event.get("ts")
        if not _is_time(at_us):
            return f"ts must be 0 to {MAX_SPAN_US:.0f} us, but is {at_us!r:.40}"
        assert isinstance(at_us, int | float)
        name = str(event.get("name", ""))[:MAX_NAME_CHARS]
        if phase == "i":
            if name == CYCLE:
                self.cycles_us.append(at_us)
            return ""
        tensor = self.tensors.get(_whole(event.get("pid")))
        if tensor is None:
            return f"no process_name names the tensor of pid {event.get('pid')!r:.40}"
        if phase == "B":
            return self._begin(tensor, name, at_us, _whole(event.get("pid")))
        if phase == "E":
            return self._end(tensor, at_us, event)
        if phase == "X":
            return self._rank_ready(tensor, name, at_us)
        return f"ph must be B, E, X, i or M, but is {phase!r:.40}"

    def _metadata(self, event: dict[str, Any]) -> str:
        arguments = event.get("args")
        if event.get("name") != "process_name" or not isinstance(arguments, Mapping):
            return ""
        if (origin_us := _whole(arguments.get(BEGINNING.decode()))) > 0:
            self.origin_us = origin_us
        if "name" in arguments and (pid := _whole(event.get("pid"))) >= 0:
            limited(len(self.tensors), MAX_VARIABLES, "tensors in a timeline")
            self.tensors.setdefault(pid, _Tensor(str(arguments["name"])[:MAX_NAME_CHARS]))
        return ""

    def _begin(self, tensor: _Tensor, name: str, at_us: float, pid: int) -> str:
        if len(tensor.stack) == MAX_DEPTH:
            return f"the events of a tensor may nest {MAX_DEPTH} deep"
        began = _Open(name, at_us)
        tensor.stack.append(began)
        if len(tensor.stack) == 2 and _TRANSFER.match(name):
            if self.run is None or self.run[0] != name or pid in self.run[2]:
                self.run = (name, [], set())
            self.run[2].add(pid)
            began.batch = self.run[1]
        else:
            self.run = None
        return ""

    def _end(self, tensor: _Tensor, at_us: float, event: dict[str, Any]) -> str:
        if not tensor.stack:
            return "it ends and never began"
        began = tensor.stack.pop()
        if began.batch is not None:
            self.run = None
        if at_us < began.start_us:
            return f"it ends before it began, at {began.start_us} us"
        span = (began.start_us, at_us)
        if began.name.startswith(NEGOTIATE):
            tensor.negotiated_us = span
        elif tensor.stack:
            self._activity(tensor.stack[-1], began, span)
        else:
            self._operation(tensor, began, at_us, event)
        return ""

    def _activity(self, within: _Open, ended: _Open, span: tuple[float, float]) -> None:
        within.activities[ended.name] = span
        if ended.batch is not None:
            within.batch = ended.batch
            within.transfers.append((ended.name, span))

    def _operation(
        self, tensor: _Tensor, began: _Open, at_us: float, event: dict[str, Any]
    ) -> None:
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, Mapping) else {}
        dtype = str(arguments.get("dtype", ""))[:40]
        if began.batch is not None:
            if not began.batch:
                self.batches.append(began.batch)
            began.batch.append(len(self.operations))
        spans = {name: _seconds(span) for name, span in began.activities.items()}
        sent_us = [span for _, span in began.transfers]
        self.operations.append(
            TensorOperation(
                tensor=tensor.name,
                kind=began.name,
                start_s=began.start_us * US,
                end_s=at_us * US,
                size_bytes=float(_elements(arguments.get("shape")) * element_bytes(dtype)),
                dtype=dtype,
                negotiated_s=None
                if tensor.negotiated_us is None
                else _seconds(tensor.negotiated_us),
                ready_s=tuple((rank, ready_us * US) for rank, ready_us in tensor.ready_us),
                transfers=tuple(dict.fromkeys(name for name, _ in began.transfers)),
                copied_in_s=spans.get(COPY_IN),
                transferred_s=_seconds(_hull(sent_us)) if sent_us else None,
                copied_out_s=spans.get(COPY_OUT),
            )
        )
        tensor.negotiated_us, tensor.ready_us = None, []

    def _rank_ready(self, tensor: _Tensor, name: str, at_us: float) -> str:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            return f"an X event must be named by a rank, but is {name!r:.40}"
        rank = limited_rank(int(name))
        self.ranks = max(self.ranks, rank + 1)
        tensor.ready_us.append((rank, at_us))
        return ""

    def _build(self) -> HorovodTimeline:
        order = sorted(range(len(self.operations)), key=lambda at: self.operations[at].start_s)
        place = {old: new for new, old in enumerate(order)}
        operations = tuple(self.operations[old] for old in order)
        batches = [_batch([place[old] for old in batch], operations) for batch in self.batches]
        repairs = [Repair(f"events left out; first {self.first_bad}", self.bad)] if self.bad else []
        if self.items.cut:
            repairs.append(Repair("the timeline is cut off at its end"))
        open_tensors = sum(bool(tensor.stack) for tensor in self.tensors.values())
        if open_tensors:
            repairs.append(Repair("an operation begins and never ends, left out", open_tensors))
        return HorovodTimeline(
            source=self.where,
            origin_us=self.origin_us,
            operations=operations,
            batches=tuple(sorted(batches, key=lambda batch: batch.start_s)),
            cycles_s=np.array(sorted(self.cycles_us), dtype=np.float64) * US,
            ranks=self.ranks,
            repairs=tuple(repairs),
        )


def _batch(members: list[int], operations: tuple[TensorOperation, ...]) -> FusedBatch:
    of_batch = [operations[member] for member in members]
    spans_s = [one.transferred_s for one in of_batch if one.transferred_s is not None]
    return FusedBatch(
        operations=tuple(sorted(members)),
        transfers=of_batch[0].transfers,
        size_bytes=sum(one.size_bytes for one in of_batch),
        start_s=min(one.start_s for one in of_batch),
        transfer_s=_hull(spans_s),
        end_s=max(one.end_s for one in of_batch),
    )


def _hull(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The first start and the last end."""
    return min(start for start, _ in spans), max(end for _, end in spans)


def _seconds(span_us: tuple[float, float]) -> tuple[float, float]:
    return span_us[0] * US, span_us[1] * US


def _elements(shape: Any) -> int:
    """Elements of a shape such as "[3, 4]"; 0 where none is stated, 1 for a scalar's "[]"."""
    if not isinstance(shape, str):
        return 0
    elements = 1
    for extent in _DIMENSIONS.findall(shape[:MAX_NAME_CHARS]):
        elements = limited(elements * int(extent), MAX_ELEMENTS, "elements in a tensor")
    return elements


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 <= value <= MAX_SPAN_US


def _whole(value: Any) -> int:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 0 <= value < 2**53 else -1
