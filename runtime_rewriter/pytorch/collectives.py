"""How one message of a plan is enacted with torch.distributed.

| symbol | meaning |
|---|---|
| w | number of ranks |
| wire | flat buffer of one message in the dtype that travels; holds this rank's part / w before, the sum over ranks after |
| phase 1, 2 | the collectives of a message; all but an all-reduce have two |

Every gradient is scaled by 1/w first and then summed, exactly as torch's DDP does, so that two ranks
give the same bits.  Phase 1 of all messages runs on one process group and phase 2 on another: within
each group every rank issues in plan order, and a late phase 2 never blocks the next phase 1.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.errors import SynchronizationError
from autotune.strategy_space.plan import Message, Plan, Primitive, TensorSlice
from autotune.strategy_space.strategy import Compressor, SparseHandling
from runtime_rewriter.emulation import travelling


@dataclass(frozen=True)
class Timeouts:
    """How long ranks wait for each other: `message_s` in a training step, `agreement_s` when a plan is loaded."""

    message_s: float
    agreement_s: float


TUNING_TIMEOUTS = Timeouts(60.0, 20.0)
TRAINING_TIMEOUTS = Timeouts(1800.0, 60.0)
"""Ordinary training: a rank may write a checkpoint for as long as torch's own default allows."""
_WIRE_DTYPE = {Compressor.FP16: torch.float16, Compressor.BF16: torch.bfloat16}
_ROOTED = (Primitive.PUSH_PULL, Primitive.REDUCE_BROADCAST)


def why_refused(plan: Plan) -> str | None:
    """The rule that keeps this runtime from enacting `plan`, or None; needs no model and no process group."""
    if plan.ring_order is not None:
        return f"this runtime leaves ring orders to the communication library, but the plan asks for {plan.ring_order}"
    for number, message in enumerate(plan.messages):
        reason = _why_message_refused(message, plan.world_size)
        if reason is not None:
            return f"message {number} ({describe(message)}): {reason}"
    return None


def _why_message_refused(message: Message, world_size: int) -> str | None:
    compressed = message.compressor is not Compressor.NONE
    if compressed and message.compressor not in _WIRE_DTYPE:
        return f"compressor must be none, fp16 or bf16, but is {message.compressor}"
    if compressed and message.dtype.startswith("complex"):
        return f"complex gradients travel uncompressed, but the compressor is {message.compressor}"
    if message.hierarchical:
        return "hierarchical collectives are not enacted; set hierarchical = false"
    if message.sparse is not SparseHandling.DENSE:
        return f"sparse gradients travel dense, but the message asks for {message.sparse}"
    if message.ranks:
        return f"every rank takes part in a message, but the plan names {message.ranks}"
    if message.primitive in _ROOTED and (message.owner is None or not 0 <= message.owner < world_size):
        return f"the owner must be a rank below {world_size}, but is {message.owner}"
    return None


def describe(message: Message) -> str:
    """For error messages: the primitive and the first variables."""
    names = list(dict.fromkeys(part.variable for part in message.slices))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{message.primitive} of {', '.join(names[:3])}{more}"


@dataclass(frozen=True)
class Ranks:
    """The process groups of one synchronizer; `rank` and owners count within the group."""

    rank: int
    size: int
    base: dist.ProcessGroup  # the script's own group; nothing of ours travels on it
    first: dist.ProcessGroup
    second: dist.ProcessGroup
    control: dist.ProcessGroup  # gloo with a short timeout: agreement between steps
    control_timeout_s: float

    @staticmethod
    def of(group: dist.ProcessGroup | None, timeout_s: float, control_timeout_s: float) -> Ranks:
        """Collective: every rank of `group` (None: of the world) calls it at the same place."""
        base = group if group is not None else dist.group.WORLD
        assert base is not None
        members = dist.get_process_group_ranks(base)
        partial = len(members) != dist.get_world_size()
        backend = dist.get_backend_config(base)

        def new(kind: str, seconds: float) -> dist.ProcessGroup:
            made: dist.ProcessGroup = dist.new_group(
                members, timeout=timedelta(seconds=seconds), backend=kind, use_local_synchronization=partial
            )
            return made

        return Ranks(
            dist.get_rank(base),
            len(members),
            base,
            new(backend, timeout_s),
            new(backend, timeout_s),
            new("gloo", control_timeout_s),
            control_timeout_s,
        )

    def destroy(self) -> None:
        """Local; does nothing for groups that the script has destroyed already."""
        if not dist.is_initialized():
            return
        for group in (self.first, self.second, self.control):
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)


Mark = float | torch.cuda.Event


class Device:
    """Clock and streams: the one place that knows CPU from CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if self._cuda else None

    def now_s(self) -> float:
        """Monotonic seconds after all queued device work."""
        if self._cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def mark(self) -> Mark:
        """A point in time on the device's own queue, without waiting for it."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds_between(self, start: Mark, stop: Mark) -> float:
        """Seconds from one mark to another; waits for the second."""
        if isinstance(start, float):
            assert isinstance(stop, float)
            return stop - start
        assert isinstance(stop, torch.cuda.Event)
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3

    def side_stream(self) -> AbstractContextManager[object]:
        """Where second phases are prepared: with NCCL `work.wait()` orders this stream, not the training's."""
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)


class Exchange(Protocol):
    """The collectives of one message over its wire buffer. `advance` is called once phase 1 has completed."""

    two_phases: bool

    def start(self) -> dist.Work: ...

    def advance(self) -> dist.Work: ...


class AllReduce:
    two_phases = False

    def __init__(self, wire: Tensor, ranks: Ranks) -> None:
        self._wire, self._ranks = wire, ranks

    def start(self) -> dist.Work:
        return _work(dist.all_reduce(self._wire, group=self._ranks.first, async_op=True))

    def advance(self) -> dist.Work:
        raise AssertionError("an all-reduce has one phase")


class ReduceScatterAllGather:
    """Needs a wire whose length is a multiple of w."""

    two_phases = True

    def __init__(self, wire: Tensor, ranks: Ranks) -> None:
        self._wire, self._ranks = wire, ranks
        self._shard = wire.new_empty(wire.numel() // ranks.size)

    def start(self) -> dist.Work:
        return _work(dist.reduce_scatter_single(self._shard, self._wire, group=self._ranks.first, async_op=True))

    def advance(self) -> dist.Work:
        return _work(dist.all_gather_single(self._wire, self._shard, group=self._ranks.second, async_op=True))


class PushPull:
    """Parameter server: every rank sends to the owner, which sums in rank order and sends back to each.

    The server's state is the aggregated gradient; the optimizer runs on every rank, so any optimizer and
    gradient clipping stay exact.  The bytes on every link are those of a server that updates parameters.
    """

    two_phases = True

    def __init__(self, wire: Tensor, ranks: Ranks, owner: int) -> None:
        self._wire, self._ranks, self._owner = wire, ranks, owner
        owns = ranks.rank == owner
        self._received = [torch.empty_like(wire) for _ in range(ranks.size)] if owns else None
        half = wire.dtype in (torch.float16, torch.bfloat16)
        self._total = torch.empty_like(wire, dtype=torch.float32) if owns and half else None

    def start(self) -> dist.Work:
        return _work(dist.gather(self._wire, self._received, group=self._ranks.first, group_dst=self._owner, async_op=True))

    def advance(self) -> dist.Work:
        copies = None if self._received is None else [self._summed(self._received)] * self._ranks.size
        return _work(dist.scatter(self._wire, copies, group=self._ranks.second, group_src=self._owner, async_op=True))

    def _summed(self, received: list[Tensor]) -> Tensor:
        """16-bit parts are summed in float32 and rounded once."""
        if self._total is None:
            for part in received[1:]:
                received[0].add_(part)
            return received[0]
        self._total.copy_(received[0])
        for part in received[1:]:
            self._total.add_(part)
        return received[0].copy_(self._total)


class ReduceBroadcast:
    """A tree or ring of the library's choice carries the sum to the owner, and another one from there to each."""

    two_phases = True

    def __init__(self, wire: Tensor, ranks: Ranks, owner: int) -> None:
        self._wire, self._ranks, self._owner = wire, ranks, owner

    def start(self) -> dist.Work:
        return _work(dist.reduce(self._wire, group=self._ranks.first, group_dst=self._owner, async_op=True))

    def advance(self) -> dist.Work:
        return _work(dist.broadcast(self._wire, group=self._ranks.second, group_src=self._owner, async_op=True))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a member of the group gets a work handle"
    return work


def make_exchange(primitive: Primitive, wire: Tensor, ranks: Ranks, owner: int | None = None) -> Exchange:
    """`wire` is real and its length a multiple of w."""
    if primitive is Primitive.ALL_REDUCE:
        return AllReduce(wire, ranks)
    if primitive is Primitive.REDUCE_SCATTER_ALL_GATHER:
        return ReduceScatterAllGather(wire, ranks)
    assert owner is not None, "a primitive with a root has an owner"
    return PushPull(wire, ranks, owner) if primitive is Primitive.PUSH_PULL else ReduceBroadcast(wire, ranks, owner)


BATCHED_BYTES = 64 * 1024
"""Slices up to here are packed together once the last of their message is ready: one by one, calls would cost more than copies."""


class Transfer:
    """One message: its wire buffer, a view of it per slice, and the collectives in flight.

    `pending` counts the slices that this backward pass has not filled yet. `batched`: numbers of the slices that wait for
    the last of them. With a `byte_scale` of k only the first
    part of the wire, 1/k of it, travels; the rest keeps this rank's own part / w.
    """

    def __init__(
        self, number: int, message: Message, parameters: Mapping[str, Tensor], ranks: Ranks, device: Device, byte_scale: float = 1.0
    ) -> None:
        self.number, self.message = number, message
        self._rank, self._device = ranks.rank, device
        dtype = getattr(torch, message.dtype)
        padded = -(-message.elements // ranks.size) * ranks.size
        wire = torch.zeros(padded, dtype=_WIRE_DTYPE.get(message.compressor, dtype), device=device.device)
        self.views = list(_views(wire, message, parameters))
        self.pending = len(self.views)
        # What is cast is scaled on its way, one by one, so that it is rounded once.
        most = BATCHED_BYTES // wire.element_size() if wire.dtype == dtype else 0
        self.batched = tuple(number for number, (part, _) in enumerate(self.views) if part.elements <= most)
        self._scaled = _runs(wire, [part.elements for part, _ in self.views], frozenset(self.batched))
        real = torch.view_as_real(wire).flatten() if wire.is_complex() else wire
        real = real[: travelling(real.numel(), byte_scale, ranks.size)]
        self._exchange = make_exchange(message.primitive, real, ranks, message.owner) if message.elements else None
        self._first: dist.Work | None = None
        self._second: Future[dist.Work] | None = None

    def pack(self, sources: Sequence[Tensor | None], scale: float) -> None:
        """Fill the batched slices, in their order, and scale them; None is a gradient of zeros."""
        views = [self.views[number][1] for number in self.batched]
        for view, source in zip(views, sources, strict=True):
            if source is None:
                view.zero_()
        found = [(view, source) for view, source in zip(views, sources, strict=True) if source is not None]
        if found:
            torch._foreach_copy_([view for view, _ in found], [source for _, source in found])
        for run in self._scaled:
            run.mul_(scale)

    def issue(self, second_phases: ThreadPoolExecutor) -> None:
        """Start phase 1 and leave phase 2, if there is one, to the executor's single thread."""
        if self._exchange is None:
            return
        try:
            self._first = self._exchange.start()
        except RuntimeError as error:
            raise self._failed(error) from error
        if self._exchange.two_phases:
            self._second = second_phases.submit(self._advance, self._exchange, self._first)

    def _advance(self, exchange: Exchange, first: dist.Work) -> dist.Work:
        with self._device.side_stream():
            first.wait()
            return exchange.advance()

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return at once."""
        if self._second is None:
            return self._first is None or self._first.is_completed()
        return self._second.done() and self._second.result().is_completed()

    def wait(self) -> None:
        """Until the wire holds the sum. Raises `SynchronizationError` when a rank is gone or too late."""
        try:
            last = self._first if self._second is None else self._second.result()
            if last is not None:
                last.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        self._first = self._second = None

    def reset(self) -> None:
        self.pending = len(self.views)

    def _failed(self, error: Exception) -> SynchronizationError:
        return SynchronizationError(
            f"message {self.number} ({describe(self.message)}) must complete on every rank, but failed on rank {self._rank}: "
            f"{error}; is every other rank alive and at the same step?"
        )


def slice_of(tensor: Tensor, part: TensorSlice) -> Tensor:
    """The view of `tensor` that `part` means."""
    return tensor if part.axis is None else tensor.narrow(part.axis, part.start, part.stop - part.start)


def _views(wire: Tensor, message: Message, parameters: Mapping[str, Tensor]) -> Iterator[tuple[TensorSlice, Tensor]]:
    """A view per slice. Whole channels-last tensors keep their strides, so that copies run along memory."""
    offset = 0
    for part in message.slices:
        parameter = parameters[part.variable]
        flat = wire[offset : offset + part.elements]
        if part.axis is None and _is_channels_last(parameter):
            view = flat.as_strided(parameter.size(), parameter.stride())
        else:
            view = flat.view(slice_of(parameter, part).shape)
        yield part, view
        offset += part.elements


def _runs(wire: Tensor, elements: Sequence[int], chosen: frozenset[int]) -> list[Tensor]:
    """The stretches of the wire that the chosen slices cover."""
    runs: list[tuple[int, int]] = []
    offset = 0
    for number, count in enumerate(elements):
        if number in chosen:
            if runs and runs[-1][1] == offset:
                runs[-1] = (runs[-1][0], offset + count)
            else:
                runs.append((offset, offset + count))
        offset += count
    return [wire[start:stop] for start, stop in runs if stop > start]


def _is_channels_last(tensor: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(tensor.dim())
    return layout is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout)
