"""The steps of a Horovod timeline, each as a data-flow graph of rank 0's background thread.

The thread alternates between negotiating and executing. So the graph has two devices, the
negotiation cycle and the channel, and each starts where the other ends:

    ready (tensor) ─┐
    ready (tensor) ─┴▶ wait for the cycle ─▶ negotiation ─▶ copy in ─▶ transfer ─▶ copy out ─▶ ...

The timeline shows when a tensor became ready, not why. The replay keeps that time and the wait for
the next cycle as measured. A flat transfer has one event; its hops are derived from the ring that
Gloo, NCCL and MPI run for large tensors, and their names state it. The transfers of a hierarchical
all-reduce are one op.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.errors import InvalidInput
from autotune.profiling.formats.horovod import FusedBatch, HorovodTimeline
from autotune.profiling.formats.rank_trace import listed_numbers

NEGOTIATION, CHANNEL = "negotiation cycle", "rank 0 channel"
DERIVED = "(derived)"
MOST_HOPS = 64
"""Hops of one transfer in the graph; a larger ring is joined into this many equal ones."""
LARGE_SHARE = 0.9
"""Share of all bytes in the large tensors: gradients have far more than averaged metrics."""


@dataclass(frozen=True)
class HorovodStep:
    """The batches of a step, by index.

    `start_s`: when the first negotiation began.
    """

    number: int
    batches: tuple[int, ...]
    start_s: float
    end_s: float

    @property
    def measured_s(self) -> float:
        return self.end_s - self.start_s


def horovod_steps(timeline: HorovodTimeline) -> tuple[HorovodStep, ...]:
    """Divide the timeline into steps: a step ends before a large tensor that it already has.

    Small tensors, such as averaged metrics, may occur in a step several times. They end it only if
    it has a large tensor. Steps have the same tensors equally often: of all such groups of batches
    they have the most bytes together. Tensors that occur once, such as broadcast parameters, and
    other groups are the script's own calls.
    """
    weights = _weights(timeline)
    groups = _groups(timeline, weights)
    if not groups:
        raise InvalidInput(
            f"{timeline.source} must hold a transfer of a batch, but none of its "
            f"{len(timeline.operations)} operations has one; train with more than one rank"
        )
    kinds = [frozenset(group.tensors.items()) for group in groups]
    weight_of: dict[frozenset[tuple[str, int]], float] = defaultdict(float)
    for kind, group in zip(kinds, groups, strict=True):
        members = [member for at in group.batches for member in timeline.batches[at].operations]
        weight_of[kind] += sum(weights[member] for member in members)
    usual = max(weight_of, key=lambda kind: weight_of[kind])
    whole = [group.batches for group, kind in zip(groups, kinds, strict=True) if kind == usual]
    return tuple(_step(timeline, number, batches) for number, batches in enumerate(whole))


def operations_outside(timeline: HorovodTimeline, steps: Sequence[HorovodStep]) -> tuple[int, ...]:
    """Indices of the operations that belong to no step."""
    of_steps = {
        member
        for step in steps
        for batch in step.batches
        for member in timeline.batches[batch].operations
    }
    return tuple(at for at in range(len(timeline.operations)) if at not in of_steps)


@dataclass
class _Group:
    """Batches in a row, by index, and how often each tensor is in them."""

    batches: list[int] = field(default_factory=list)
    tensors: Counter[str] = field(default_factory=Counter)

    def ends_before(self, tensors: Set[str], large: Set[str]) -> bool:
        """Whether these tensors begin another step; see `horovod_steps`."""
        repeated = self.tensors.keys() & tensors
        return bool(repeated & large) or bool(repeated and self.tensors.keys() & large)


def _groups(timeline: HorovodTimeline, weights: Sequence[float]) -> list[_Group]:
    occurrences = Counter(one.tensor for one in timeline.operations)
    least = min(2, max(occurrences.values()))
    weight_of: dict[str, float] = defaultdict(float)
    for operation, weight in zip(timeline.operations, weights, strict=True):
        if occurrences[operation.tensor] >= least:
            weight_of[operation.tensor] += weight
    large = _largest(weight_of)
    groups: list[_Group] = []
    for number, batch in enumerate(timeline.batches):
        names = (timeline.operations[member].tensor for member in batch.operations)
        of_batch = {name for name in names if name in weight_of}
        if not of_batch:
            continue
        if not groups or groups[-1].ends_before(of_batch, large):
            groups.append(_Group())
        groups[-1].batches.append(number)
        groups[-1].tensors.update(of_batch)
    return groups


def _weights(timeline: HorovodTimeline) -> list[float]:
    """The bytes of every operation; 1 for each if the timeline states no bytes."""
    weights = [one.size_bytes for one in timeline.operations]
    return weights if any(weights) else [1.0] * len(weights)


def _largest(weight_of: Mapping[str, float]) -> frozenset[str]:
    """The fewest tensors that have `LARGE_SHARE` of all bytes."""
    largest, left = set(), LARGE_SHARE * sum(weight_of.values())
    for tensor in sorted(weight_of, key=lambda tensor: -weight_of[tensor]):
        if left <= 0:
            break
        largest.add(tensor)
        left -= weight_of[tensor]
    return frozenset(largest)


def chosen_step(steps: Sequence[HorovodStep], wanted: int | None) -> HorovodStep:
    """The step of this number; for None the one of lower median time. Raises `InvalidInput`."""
    if wanted is None:
        by_time = sorted(steps, key=lambda step: step.measured_s)
        return by_time[(len(steps) - 1) // 2]
    if not 0 <= wanted < len(steps):
        numbers = listed_numbers(range(len(steps)))
        raise InvalidInput(f"the step must be one of {numbers}, but is {wanted}")
    return steps[wanted]


def step_dfg(timeline: HorovodTimeline, step: HorovodStep) -> Dfg:
    """The step's graph; time 0 is its start."""
    to = DfgBuilder()
    negotiation, channel = to.queue(NEGOTIATION), to.queue(CHANNEL)
    end, free_s = NONE, step.start_s
    for cycle in _cycles(timeline, step):
        answered_s = max(_answered_s(timeline, batch) for batch in cycle)
        members = [member for batch in cycle for member in batch.operations]
        ready_s = [_ready_s(timeline, member) for member in members]
        begin_s = _cycle_start_s(timeline, answered_s, max(free_s, *ready_s))
        ready = [
            to.op(
                f"ready {timeline.operations[member].tensor}",
                NONE,
                max(at_s - step.start_s, 0.0),
                Kind.VIRTUAL,
                layer=to.layer(timeline.operations[member].tensor),
                worker=0,
            )
            for member, at_s in zip(members, ready_s, strict=True)
        ]
        wait_s = max(begin_s - max(free_s, *ready_s), 0.0)
        waited = to.op("wait for the cycle", NONE, wait_s, Kind.VIRTUAL, (*ready, end), worker=0)
        begun_s = max(free_s, *ready_s) + wait_s
        end = to.op(
            f"negotiate {len(members)} tensors",
            negotiation,
            max(answered_s - begun_s, 0.0),
            Kind.COLLECTIVE,
            (waited,),
            worker=0,
        )
        free_s = max(answered_s, begun_s)
        for batch in cycle:
            end = _add_batch(to, channel, timeline, batch, end, free_s)
            free_s = max(batch.end_s, free_s)
    return to.build()


def _add_batch(
    to: DfgBuilder,
    channel: int,
    timeline: HorovodTimeline,
    batch: FusedBatch,
    after: int,
    free_s: float,
) -> int:
    """Copy in from `free_s`, with the dispatch before it; the hops; copy out."""
    names = [timeline.operations[member].tensor for member in batch.operations]
    label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    layer = to.layer(names[0])
    start_s, transferred_s = (max(at_s, free_s) for at_s in batch.transfer_s)

    def add(name: str, seconds: float, kind: Kind, behind: int, size_bytes: float = 0.0) -> int:
        return to.op(
            f"{name} {label}",
            channel,
            max(seconds, 0.0),
            kind,
            (behind,),
            size_bytes=size_bytes,
            layer=layer,
            worker=0,
        )

    last = add("copy in", start_s - free_s, Kind.PACK, after)
    sent_bytes = batch.size_bytes * max(2 * (timeline.ranks - 1), 1) / timeline.ranks
    hops = max(2 * (timeline.ranks - 1), 1) if batch.is_flat else 1
    shown = min(hops, MOST_HOPS)
    for hop in range(shown):
        name = f"{batch.transfer} hop {hop} {DERIVED}" if hops > 1 else batch.transfer
        seconds = (transferred_s - start_s) / shown
        last = add(name, seconds, Kind.COLLECTIVE, last, sent_bytes / shown)
    return add("copy out", batch.end_s - transferred_s, Kind.UNPACK, last)


def _step(timeline: HorovodTimeline, number: int, batches: Sequence[int]) -> HorovodStep:
    of_step = [timeline.batches[batch] for batch in batches]
    members = [member for batch in of_step for member in batch.operations]
    return HorovodStep(
        number,
        tuple(batches),
        min(_ready_s(timeline, member) for member in members),
        max(batch.end_s for batch in of_step),
    )


def _cycles(timeline: HorovodTimeline, step: HorovodStep) -> list[list[FusedBatch]]:
    """The batches by the negotiation that answered them: those answered before the first begins."""
    cycles: list[list[FusedBatch]] = []
    for batch in (timeline.batches[number] for number in step.batches):
        if not cycles or _answered_s(timeline, batch) > cycles[-1][0].start_s:
            cycles.append([])
        cycles[-1].append(batch)
    return cycles


def _ready_s(timeline: HorovodTimeline, member: int) -> float:
    operation = timeline.operations[member]
    return operation.start_s if operation.negotiated_s is None else operation.negotiated_s[0]


def _answered_s(timeline: HorovodTimeline, batch: FusedBatch) -> float:
    spans_s = (timeline.operations[member].negotiated_s for member in batch.operations)
    return max((span_s[1] for span_s in spans_s if span_s is not None), default=batch.start_s)


def _cycle_start_s(timeline: HorovodTimeline, answered_s: float, earliest_s: float) -> float:
    """The marked start of the cycle that ended at `answered_s`; `earliest_s` without marks."""
    at = int(np.searchsorted(timeline.cycles_s, answered_s)) - 1
    return max(float(timeline.cycles_s[at]), earliest_s) if at >= 0 else earliest_s
