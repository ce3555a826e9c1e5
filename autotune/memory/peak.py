"""Peak memory of one replica: what a step holds without synchronization, and what a plan adds, over the segments of the step.

    live_i(plan) = live_i + always + sum of the plan's buffers that are there in segment i + gradients that cross the step

Buffers of messages that are queued or under way are there for as long as the channel says: `end_j = max(end_(j-1), ready_j) + cost_j`
(see cross_step.py), with ready_j from the profile's own segments and cost_j from the cluster, or from whoever replays the plan (`Flights`).
Where a plan crosses the step, the gradient of a variable is kept until the variable is read again.

Source: dPRO sec. 4.3 (memory from the lifetimes of a replay) and Table 4.

| symbol | meaning | unit |
|---|---|---|
| S | segments of the step | - |
| M | messages of the plan | - |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.costs.issue_order import channel_ends_s
from autotune.costs.sync_cost import message_costs
from autotune.errors import InvalidInput
from autotune.memory.plan_buffers import Buffer, When, multiplying_lanes, plan_buffers
from autotune.recordings.memory_profile import (
    Held,
    Lifetime,
    MemoryProfile,
    Phase,
    Replica,
    touched,
)
from autotune.strategy_space.plan import Plan
from autotune.workload import Workload


@dataclass(frozen=True)
class MemoryEstimate:
    """`peak_bytes` are alive in segment `segment`, which ends `at_s` after the step began, `by_kind` of them each.

    `live_bytes`: the curve, most bytes alive at once in every segment, shape (S,); `end_s`: when they end.
    """

    peak_bytes: int
    segment: int
    at_s: float
    by_kind: dict[str, int]
    live_bytes: IntArray
    end_s: FloatArray


@dataclass(frozen=True)
class Flights:
    """In which segments each message of a plan is issued, gets the channel and has arrived, each of shape (M,).

    They count on into the next step: S is its first segment.
    """

    issued: IntArray
    started: IntArray
    ended: IntArray


def peak_memory(
    profile: MemoryProfile,
    workload: Workload | None = None,
    plan: Plan | None = None,
    cluster: Cluster | None = None,
    *,
    replica: Replica | None = None,
    flights: Flights | None = None,
) -> MemoryEstimate:
    """The most bytes that one replica has allocated at once during a step.

    Without a workload, of a replica that synchronizes nothing; with one and without a plan, of a replica in torch's DDP. `cluster`
    gives the messages' times where `flights` does not; without both, messages take no time. Raises `InvalidInput` where the parts
    belong to different models.
    """
    if workload is None:
        return _estimate(profile, [], np.zeros(len(profile.segments), dtype=np.int64))
    if profile.model != workload.id:
        raise InvalidInput(
            f"the profile and the workload must be of one model, but are of {profile.model} and {workload.id}"
        )
    replica = with_profile(replica or Replica(), profile)
    world_size = (
        plan.world_size if plan is not None else cluster.world_size if cluster is not None else 2
    )
    buffers = plan_buffers(plan, workload, replica, world_size)
    if flights is None and plan is not None:
        flights = flights_by_cost(profile, plan, workload, cluster)
    extra = [Lifetime(one.bytes, Held.COMMUNICATION) for one in buffers if one.when is When.ALWAYS]
    if plan is not None and (kept_bytes := profile.bytes_of(Held.LIBRARY)):
        # Recorded is a workspace of each of two threads, the script's and the engine's, on the one stream on which both multiply.
        extra.append(Lifetime(len(multiplying_lanes(plan)) * kept_bytes // 2, Held.LIBRARY))
    if plan is not None and plan.cross_step:
        extra += _crossing(profile)
    if (
        replica.bucket_view
        and replica.ddp
        and (plan is None or any(one.what == "buckets of the plan" for one in buffers))
    ):
        profile = _without_gradients(profile)
    return _estimate(profile, extra, _passing_bytes(buffers, profile, flights))


def with_profile(replica: Replica, profile: MemoryProfile) -> Replica:
    """The replica with what the profile knows of it: its device, buffers and sparse gradients."""
    return replace(
        replica,
        device=profile.device,
        sparse_bytes=dict(profile.sparse_bytes)
        if replica.sparse_bytes is None
        else replica.sparse_bytes,
        buffer_bytes=replica.buffer_bytes or profile.bytes_of(Held.BUFFER),
    )


def ready_segments(profile: MemoryProfile) -> dict[str, int]:
    """Variable -> the segment in which its gradient becomes final; of several micro-batches the last."""
    return {name: at for at, segment in enumerate(profile.segments) for name in segment.readies}


def read_segments(profile: MemoryProfile) -> dict[str, int]:
    """Variable -> the segment in which it is first read."""
    found: dict[str, int] = {}
    for at, segment in enumerate(profile.segments):
        for name in segment.reads:
            found.setdefault(name, at)
    return found


def last_backward(profile: MemoryProfile) -> int:
    """The segment in which the backward pass ends, and waits for what is under way."""
    found = [at for at, segment in enumerate(profile.segments) if segment.phase is Phase.BACKWARD]
    return found[-1] if found else len(profile.segments) - 1


def flights_by_cost(
    profile: MemoryProfile, plan: Plan, workload: Workload, cluster: Cluster | None
) -> Flights:
    """One channel, messages in issue order, in the times of the profile's segments."""
    ready_at, last = ready_segments(profile), last_backward(profile)
    of_message = [
        max(ready_at.get(part.variable, last) for part in message.slices)
        for message in plan.messages
    ]
    issued = np.maximum.accumulate(np.array(of_message, dtype=np.int64))
    cost_s = (
        np.zeros(len(issued))
        if cluster is None
        else message_costs(plan, cluster, workload).channel_s
    )
    ends_s = channel_ends_s(profile.end_s[issued], cost_s)
    return flights_at(profile, issued, ends_s - cost_s, ends_s, plan.cross_step)


def flights_at(
    profile: MemoryProfile,
    issued: IntArray,
    start_s: FloatArray,
    end_s: FloatArray,
    cross_step: bool,
) -> Flights:
    """From seconds since the step began, (M,), to segments. What does not cross the step is waited for when the backward pass ends."""
    last, count = last_backward(profile), len(profile.segments)
    ring = np.concatenate([profile.end_s, profile.end_s + profile.end_s[-1]])
    latest = count + _first_backward(profile) - 1 if cross_step else last
    started, ended = (
        np.minimum(np.searchsorted(ring, at_s, side="left"), latest) for at_s in (start_s, end_s)
    )
    return Flights(issued, np.maximum(started, issued), np.maximum(ended, issued))


def _first_backward(profile: MemoryProfile) -> int:
    return next(
        (at for at, segment in enumerate(profile.segments) if segment.phase is Phase.BACKWARD),
        len(profile.segments),
    )


def _passing_bytes(
    buffers: Sequence[Buffer], profile: MemoryProfile, flights: Flights | None
) -> IntArray:
    """What is there for a while only, shape (S,). In one segment gradients are packed one after the other, then messages are under way,
    and when all have arrived the averages are written: the largest of these counts."""
    count, last, ready_at = len(profile.segments), last_backward(profile), ready_segments(profile)
    packed: dict[tuple[int, str | None, int | None], int] = {}
    written = sum(one.bytes for one in buffers if one.when is When.END)
    under_way = _UnderWay(count)
    for one in buffers:
        if one.when is When.READY:
            at = min(
                ready_at.get(one.variable or "", last) + 1, last
            )  # it is packed when the next segment has begun
            packed[at, one.variable, one.message] = (
                packed.get((at, one.variable, one.message), 0) + one.bytes
            )
        elif one.when in (When.QUEUED, When.FLIGHT):
            assert flights is not None and one.message is not None
            waits = one.when is When.QUEUED
            born = int((flights.issued if waits else flights.started)[one.message])
            under_way.add(one.message, one.bytes, waits, born, int(flights.ended[one.message]))
    passing = np.array([under_way.most_bytes(at) for at in range(count)], dtype=np.int64)
    for (at, _, message), size in packed.items():
        passing[at] = max(
            passing[at], size + (0 if message is None else under_way.most_bytes(at, message))
        )
    passing[last] = max(passing[last], written)
    passing[0] += sum(one.bytes for one in buffers if one.when is When.STEP_START)
    return passing


class _UnderWay:
    """Buffers of messages by segment. Messages have the channel one after the other, and those that have had it hold nothing any more."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._at: list[dict[int, list[int]]] = [
            {} for _ in range(count)
        ]  # by message: bytes while it is queued, while it is sent

    def add(self, message: int, size: int, queued: bool, born: int, dies: int) -> None:
        for at in range(born, min(dies, born + self._count - 1) + 1):
            self._at[at % self._count].setdefault(message, [0, 0])[0 if queued else 1] += size

    def most_bytes(self, at: int, before: int | None = None) -> int:
        """At once in segment `at`, of the messages up to number `before`.

        Beside the second step of one the first steps of the next two may be sent, since a process group of gloo has two threads; what a
        message holds for its first step is its queued bytes, if any. The message before lets go of its own a little late.
        """
        own = [
            sizes
            for number, sizes in sorted(self._at[at].items())
            if before is None or number < before
        ]
        most = waiting = 0
        following: list[int] = []
        for number, (queued, sent) in reversed(list(enumerate(own))):
            waiting += queued
            late = own[number - 1][0] if number else 0
            most = max(most, late + waiting + sent + sum(following))
            following = [0 if queued else sent, *following[:1]]
        return most


def _crossing(profile: MemoryProfile) -> list[Lifetime]:
    """Gradients that are kept until their variables are read in the next step, where the script has dropped them before."""
    read_at, count = read_segments(profile), len(profile.segments)
    found = []
    for one in profile.lifetimes:
        if (
            one.kind is not Held.GRADIENT
            or one.born is None
            or one.dies is None
            or one.variable is None
        ):
            continue
        dies = one.dies + (count if one.dies < one.born else 0)
        needed = count + read_at.get(one.variable, 0)
        if dies < needed and one.born <= last_backward(profile):
            found.append(
                Lifetime(one.bytes, Held.GRADIENT, (dies + 1) % count, needed % count, one.variable)
            )
    return found


def _without_gradients(profile: MemoryProfile) -> MemoryProfile:
    """Gradients are views of buckets."""
    relief = np.minimum(
        profile.relief_bytes,
        touched(
            [o for o in profile.lifetimes if o.born is not None and o.kind is not Held.GRADIENT],
            len(profile.segments),
        ),
    )
    segments = tuple(
        replace(segment, relief_bytes=int(size))
        for segment, size in zip(profile.segments, relief, strict=True)
    )
    return replace(
        profile,
        segments=segments,
        lifetimes=tuple(one for one in profile.lifetimes if one.kind is not Held.GRADIENT),
    )


def _estimate(
    profile: MemoryProfile, extra: Sequence[Lifetime], passing: IntArray
) -> MemoryEstimate:
    moving = touched([one for one in extra if one.born is not None], len(profile.segments))
    live = (
        profile.live_bytes + passing + moving + sum(one.bytes for one in extra if one.born is None)
    )
    at = int(np.argmax(live))
    by_kind = dict.fromkeys((kind.value for kind in Held), 0)
    by_kind[Held.COMMUNICATION.value] = int(passing[at])
    for one in (*profile.lifetimes, *extra):
        if _holds(one, at):
            by_kind[one.kind.value] += one.bytes
    left = int(
        profile.relief_bytes[at]
    )  # what touches the segment and is not there at its peak: made or dropped within it
    for kind in (Held.TEMPORARY, Held.ACTIVATION, Held.GRADIENT):
        taken = min(left, by_kind[kind.value])
        by_kind[kind.value] -= taken
        left -= taken
    return MemoryEstimate(int(live[at]), at, float(profile.end_s[at]), by_kind, live, profile.end_s)


def _holds(one: Lifetime, at: int) -> bool:
    if one.born is None or one.dies is None:
        return True
    return one.born <= at <= one.dies if one.born <= one.dies else at >= one.born or at <= one.dies
