"""When Horovod negotiates, fuses and sends the tensors of one step.

A background thread of each rank repeats one cycle (Horovod 0.28.1, `operations.cc`, `RunLoopOnce`).
It begins a cycle time after the last one began, or as soon as that one has ended. In the cycle it
takes what was enqueued before, agrees with all ranks on what every rank has (a small all-reduce of
the response cache's bits), fuses these tensors in the order of their last step, and executes the
batches itself, one after the other. So no cycle begins while a batch is sent.

| symbol | meaning |
|---|---|
| K | tensors, in the order in which they are enqueued |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autotune.errors import InvalidInput
from autotune.limits import MAX_BYTES, check_range, check_seconds

DEFAULT_THRESHOLD_BYTES = 128 * 2**20
DEFAULT_CYCLE_S = 1e-3
"""Horovod 0.28.1, `BackgroundThreadLoop` in operations.cc."""


@dataclass(frozen=True)
class HorovodSettings:
    """The settings of Horovod that decide how it sends gradients.

    - `fusion_threshold_bytes`, `cycle_s`: `HOROVOD_FUSION_THRESHOLD`, `HOROVOD_CYCLE_TIME`.
    - `groups`: variables that `DistributedOptimizer(groups=...)` enqueues together, when the last
      one is ready. `fuses_groups`: False with `HOROVOD_DISABLE_GROUP_FUSION=1`, which sends each
      group apart.

    Raises `InvalidInput` for values that Horovod has no meaning for, and a variable in two groups.
    """

    fusion_threshold_bytes: int = DEFAULT_THRESHOLD_BYTES
    cycle_s: float = DEFAULT_CYCLE_S
    groups: tuple[tuple[str, ...], ...] = ()
    fuses_groups: bool = True

    def __post_init__(self) -> None:
        check_range(self.fusion_threshold_bytes, 0, MAX_BYTES, "Horovod's fusion threshold (bytes)")
        check_seconds(self.cycle_s, "Horovod's cycle time")
        names = sorted(name for group in self.groups for name in group)
        twice = next((name for name, after in pairwise(names) if name == after), None)
        if twice is not None:
            raise InvalidInput(
                f"a variable may be in one group of Horovod, but {twice!r} is in two"
            )


@dataclass(frozen=True)
class EnqueuedTensor:
    """A tensor that all ranks have enqueued at `at_s`. Tensors of one `dtype` fuse."""

    name: str
    size_bytes: float
    dtype: str
    at_s: float
    group: int | None = None


@dataclass(frozen=True)
class SentBatch:
    """Tensors, by index, that one transfer carries."""

    tensors: tuple[int, ...]
    size_bytes: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class NegotiationCycle:
    """A cycle that answered tensors; cycles without any are left out."""

    start_s: float
    answered_s: float
    batches: tuple[SentBatch, ...]

    @property
    def tensors(self) -> tuple[int, ...]:
        return tuple(tensor for batch in self.batches for tensor in batch.tensors)


BatchTime = Callable[[int, float], float]
"""(tensors, bytes) -> seconds in which the background thread executes the batch."""


def negotiated(
    tensors: Sequence[EnqueuedTensor],
    settings: HorovodSettings,
    *,
    negotiate_s: float,
    batch_s: BatchTime,
    phase: float = 0.5,
) -> list[NegotiationCycle]:
    """The cycles of one step, until every tensor is sent.

    `negotiate_s`: agreement of all ranks within a cycle. `phase`: place of the first enqueuing
    between two idle cycles, in [0, 1].
    """
    period_s = max(settings.cycle_s, negotiate_s)  # 0: a cycle is always about to begin
    left = deque(sorted(range(len(tensors)), key=lambda tensor: tensors[tensor].at_s))
    cycles: list[NegotiationCycle] = []
    start_s = tensors[left[0]].at_s + phase * period_s if left else 0.0
    while left:
        if (idle_s := tensors[left[0]].at_s - start_s) > 0:
            idle_cycles = -(-idle_s // period_s) if period_s > 0 else 0.0
            start_s = max(start_s + idle_cycles * period_s, tensors[left[0]].at_s)
        taken = []
        while left and tensors[left[0]].at_s <= start_s:
            taken.append(left.popleft())
        at_s = answered_s = start_s + negotiate_s
        batches = []
        for fused in fused_batches([tensors[tensor] for tensor in taken], settings):
            members = tuple(taken[member] for member in fused)
            size_bytes = sum(tensors[member].size_bytes for member in members)
            end_s = at_s + batch_s(len(members), size_bytes)
            batches.append(SentBatch(members, size_bytes, at_s, end_s))
            at_s = end_s
        cycles.append(NegotiationCycle(start_s, answered_s, tuple(batches)))
        start_s = max(start_s + settings.cycle_s, at_s)
    return cycles


def fused_batches(
    tensors: Sequence[EnqueuedTensor], settings: HorovodSettings
) -> list[tuple[int, ...]]:
    """Divide tensors that are answered together into batches, as `FuseResponses` does."""
    if settings.fuses_groups or all(tensor.group is None for tensor in tensors):
        return _fused(tensors, range(len(tensors)), settings.fusion_threshold_bytes)
    members: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.group is not None:
            members.setdefault(tensor.group, []).append(number)
    rest = [number for number, tensor in enumerate(tensors) if tensor.group is None]
    return [
        batch
        for numbers in (*members.values(), rest)
        for batch in _fused(tensors, numbers, settings.fusion_threshold_bytes)
    ]


def _fused(
    tensors: Sequence[EnqueuedTensor], numbers: Sequence[int], threshold_bytes: float
) -> list[tuple[int, ...]]:
    """Fuse in order; a tensor that does not fit is skipped while what was skipped would fit."""
    left = deque(numbers)
    batches = []
    while left:
        batch = [left.popleft()]
        size_bytes = tensors[batch[0]].size_bytes
        skipped: list[int] = []
        skipped_bytes = 0.0
        while left:
            following = tensors[left[0]]
            fits = size_bytes + following.size_bytes <= threshold_bytes
            if fits and following.dtype == tensors[batch[0]].dtype:
                size_bytes += following.size_bytes
                batch.append(left.popleft())
                continue
            skipped_bytes += following.size_bytes
            if size_bytes + skipped_bytes > threshold_bytes:
                break
            skipped.append(left.popleft())
        left.extendleft(reversed(skipped))
        batches.append(tuple(batch))
    return batches


def last_end_s(cycles: Sequence[NegotiationCycle]) -> float:
    """When the last tensor has arrived; 0 without tensors."""
    return max((batch.end_s for cycle in cycles for batch in cycle.batches), default=0.0)
