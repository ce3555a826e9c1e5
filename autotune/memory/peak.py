"""Peak memory of one replica: the step without synchronization, plus the buffers of a plan.

    live_i(plan) = live_i + always + the plan's buffers in segment i + gradients across the step

The channel decides how long a message is queued or in flight (`costs/issue_order.py`):
`end_j = max(end_(j-1), ready_j) + cost_j`, with ready_j from the segments of the profile and cost_j
from the cluster. If a plan crosses the step, it keeps a gradient until its variable is read again.
If results wait for the norms of all gradients, each sum has the channel in issue order, and its
result afterwards, in the order of `Plan.results`.

Source: dPRO sec. 4.3 (memory from the lifetimes of a replay) and Table 4.

| symbol | meaning | unit |
|---|---|---|
| S | segments of the step | - |
| M | messages of the plan | - |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.costs.issue_order import channel_ends_s
from autotune.costs.sync_cost import message_costs
from autotune.errors import InvalidInput
from autotune.lowering.messages import has_owners
from autotune.memory.buffers import Buffer, When
from autotune.memory.plan_buffers import PLAN_BUCKETS, multiplying_lanes, plan_buffers
from autotune.memory.process_groups import leader_of_rank
from autotune.memory.segments import first_backward, last_backward, read_segments, ready_segments
from autotune.recordings.memory_file import RecordedMemory
from autotune.recordings.memory_profile import Lifetime, MemoryProfile, Replica, TensorRole, touched
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.shares import Shares
from autotune.strategy_space.strategy import Synchronizer
from autotune.workload import Workload


@dataclass(frozen=True)
class MemoryEstimate:
    """The peak of one replica: `peak_bytes` in segment `segment`, which ends at `at_s`.

    `by_kind`: the bytes of the peak by `TensorRole`. `live_bytes` (S,): most bytes alive at once in
    each segment. `end_s` (S,): ends of the segments. Times are seconds from the start of the step.
    """

    peak_bytes: int
    segment: int
    at_s: float
    by_kind: dict[str, int]
    live_bytes: IntArray
    end_s: FloatArray


@dataclass(frozen=True)
class Turn:
    """One use of the channel, in segments `started` to `ended`.

    Segment S is the first segment of the next step. `place`: in the order of the results if
    `is_result`, otherwise in issue order.
    """

    is_result: bool
    place: int
    started: int
    ended: int


@dataclass(frozen=True)
class Flights:
    """The segment in which each message is issued, (M,), and its turns on the channel.

    A message has one turn, or two if its result waits for the norms of all gradients.
    """

    issued: IntArray
    turns: tuple[tuple[Turn, ...], ...]

    def of(self, buffer: Buffer) -> tuple[Turn, ...]:
        """The turns during which a temporary buffer of a message exists."""
        assert buffer.message is not None
        turns = self.turns[buffer.message]
        if buffer.when is When.QUEUED:  # until the result has arrived
            return (replace(turns[-1], started=int(self.issued[buffer.message])),)
        return turns[-1:] if buffer.when is When.RESULT else turns


def highest_peak(
    memory: RecordedMemory,
    profile: MemoryProfile,
    workload: Workload,
    plan: Plan | None,
    cluster: Cluster,
) -> MemoryEstimate:
    """The peak of the replica that needs the most memory.

    Candidates are rank 0, which is like most ranks, and those of `largest_owners`.
    """
    hosts = cluster.host_of_rank
    estimates = []
    for rank in sorted({0, *(largest_owners(plan, hosts) if plan is not None else ())}):
        replica = memory.replica(rank, hosts)
        estimates.append(peak_memory(profile, workload, plan, cluster, replica=replica))
    return max(estimates, key=lambda estimate: estimate.peak_bytes)


def largest_owners(plan: Plan, host_of_rank: Sequence[int]) -> set[int]:
    """The ranks that receive the most to sum it: as owners, by their shares, and both.

    The m members of a message send it to its owner, which holds m copies. A direct exchange has no
    owner: for each element that a rank owns, it holds those of m - 1 others. The leader of a host
    owns what all ranks of its host own of a hierarchical one.
    """
    ranks = np.arange(plan.world_size)
    leaders = np.array(leader_of_rank(host_of_rank) or ranks)
    hosts = len(np.unique(leaders))
    by_owner, by_shares = np.zeros(plan.world_size), np.zeros(plan.world_size)
    bytes_of: Counter[tuple[bool, Shares]] = Counter()  # many messages have the same few shares
    for message in plan.messages:
        members = hosts if message.hierarchical else plan.world_size
        if message.owner is not None:
            by_owner[message.owner] += members * message.wire_bytes
        elif message.shares is not None:
            received_bytes = (members - 1) * message.wire_bytes
            bytes_of[message.hierarchical, message.shares] += received_bytes
    for (hierarchical, shares), size in bytes_of.items():
        np.add.at(by_shares, leaders if hierarchical else ranks, size * np.array(shares))
    columns = (by_owner, by_shares, by_owner + by_shares)
    return {int(np.argmax(column)) for column in columns if column.any()}


def peak_memory(
    profile: MemoryProfile,
    workload: Workload | None = None,
    plan: Plan | None = None,
    cluster: Cluster | None = None,
    *,
    replica: Replica | None = None,
) -> MemoryEstimate:
    """The most bytes that one replica allocates at once during a step.

    Without `workload`: a replica without synchronization. Without `plan`: a replica in torch's DDP.
    Without `cluster`: messages take no time. Raises `InvalidInput` if the profile and the workload
    belong to different models.
    """
    if workload is None:
        return _estimate(profile, [], np.zeros(len(profile.segments), dtype=np.int64))
    if profile.model != workload.id:
        raise InvalidInput(
            "the profile and the workload must be of one model, "
            f"but are of {profile.model} and {workload.id}"
        )
    replica = _with_profile(replica or Replica(), profile)
    world = plan if plan is not None else cluster
    world_size = 2 if world is None else world.world_size
    buffers = plan_buffers(plan, workload, replica, world_size)
    flights = None if plan is None else _flights(profile, plan, workload, cluster)
    added = [
        Lifetime(buffer.bytes, TensorRole.COMMUNICATION)
        for buffer in buffers
        if buffer.when is When.ALWAYS
    ]
    if plan is not None and (library_bytes := profile.bytes_of(TensorRole.LIBRARY)):
        # The recording holds two workspaces: the script's thread and autograd's engine multiply.
        lanes = len(multiplying_lanes(plan))
        added.append(Lifetime(lanes * library_bytes // 2, TensorRole.LIBRARY))
    if plan is not None and plan.cross_step:
        added += _crossing_gradients(profile)
    uses_buckets = plan is None or any(buffer.what == PLAN_BUCKETS for buffer in buffers)
    if replica.bucket_view and replica.ddp and uses_buckets:
        profile = _without_gradients(profile)
    return _estimate(profile, added, _passing_bytes(buffers, profile, flights))


def _with_profile(replica: Replica, profile: MemoryProfile) -> Replica:
    """The replica with the device, buffers and sparse gradients of the profile."""
    sparse_bytes = replica.sparse_bytes
    return replace(
        replica,
        device=profile.device,
        sparse_bytes=dict(profile.sparse_bytes) if sparse_bytes is None else sparse_bytes,
        buffer_bytes=replica.buffer_bytes or profile.bytes_of(TensorRole.BUFFER),
    )


def _flights(
    profile: MemoryProfile, plan: Plan, workload: Workload, cluster: Cluster | None
) -> Flights:
    """One channel sends the messages in issue order, at the times of the profile's segments."""
    ready_at = ready_segments(profile)
    last = last_backward(profile)
    last_ready = [
        max(ready_at.get(part.variable, last) for part in message.slices)
        for message in plan.messages
    ]
    issued = np.maximum.accumulate(np.array(last_ready, dtype=np.int64))
    cost_s = np.zeros(len(issued))
    if cluster is not None:
        cost_s = message_costs(plan, cluster, workload).channel_s
    return Flights(issued, _turns(profile, plan, issued, cost_s))


def _turns(
    profile: MemoryProfile, plan: Plan, issued: IntArray, cost_s: FloatArray
) -> tuple[tuple[Turn, ...], ...]:
    """The turns of each message, (M,); if it has two, each takes half of its `cost_s`."""
    last = last_backward(profile)
    held_back = np.array(
        [number for number in plan.results or () if _has_result(plan.messages[number])],
        dtype=np.int64,
    )
    result_s = cost_s[held_back] / 2
    sum_s = cost_s.copy()
    sum_s[held_back] = result_s
    sum_end_s = channel_ends_s(profile.end_s[issued], sum_s)
    norms_s = float(sum_end_s.max(initial=profile.end_s[last]))
    result_end_s: FloatArray = norms_s + np.cumsum(result_s)
    # A message that does not cross the step ends before the backward pass does.
    latest = last
    if plan.cross_step:
        latest = len(profile.segments) + first_backward(profile) - 1
    two_steps_s = np.concatenate([profile.end_s, profile.end_s + profile.end_s[-1]])

    def segments(at_s: FloatArray, earliest: IntArray | int) -> list[int]:
        segment = np.minimum(np.searchsorted(two_steps_s, at_s), latest)
        numbers: list[int] = np.maximum(segment, earliest).tolist()
        return numbers

    sums = zip(segments(sum_end_s - sum_s, issued), segments(sum_end_s, issued), strict=True)
    turns: list[tuple[Turn, ...]] = [
        (Turn(False, number, started, ended),) for number, (started, ended) in enumerate(sums)
    ]
    results = zip(
        held_back.tolist(),
        segments(result_end_s - result_s, last),
        segments(result_end_s, last),
        strict=True,
    )
    for place, (number, started, ended) in enumerate(results):
        turns[number] += (Turn(True, place, started, ended),)
    return tuple(turns)


def _has_result(message: Message) -> bool:
    """Whether owners hold the sum when norms are taken, and send it to all ranks afterwards."""
    return has_owners(message) and message.synchronizer is not Synchronizer.ALL_REDUCE


def _passing_bytes(
    buffers: Sequence[Buffer], profile: MemoryProfile, flights: Flights | None
) -> IntArray:
    """Bytes of temporary buffers, shape (S,).

    Within a segment, gradients are packed one by one, then messages are in flight. The averages are
    written after the last message. The largest of the three counts.
    """
    count = len(profile.segments)
    last = last_backward(profile)
    ready_at = ready_segments(profile)
    packed_bytes: Counter[tuple[int, str | None, int | None]] = Counter()
    in_flight = _InFlight(count)
    for buffer in buffers:
        if buffer.when is When.READY:
            # The hook packs a gradient at the start of the next segment.
            at = min(ready_at.get(buffer.variable or "", last) + 1, last)
            packed_bytes[at, buffer.variable, buffer.message] += buffer.bytes
        elif buffer.when in (When.QUEUED, When.FLIGHT, When.RESULT):
            assert flights is not None
            for turn in flights.of(buffer):
                in_flight.add(buffer, turn)
    passing = np.array([in_flight.most_bytes(at) for at in range(count)], dtype=np.int64)
    for (at, _, message), size in packed_bytes.items():
        sent_before = 0 if message is None else in_flight.most_bytes(at, message)
        passing[at] = max(passing[at], size + sent_before)
    written_bytes = sum(buffer.bytes for buffer in buffers if buffer.when is When.END)
    passing[last] = max(passing[last], written_bytes)
    passing[0] += sum(buffer.bytes for buffer in buffers if buffer.when is When.STEP_START)
    return passing


class _InFlight:
    """Buffers of messages by segment.

    Messages take the channel one after the other and free their buffers behind it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        # of each segment, by turn and message: [bytes while it is queued, bytes while it is sent]
        self._bytes: list[dict[tuple[bool, int, int], list[int]]] = [{} for _ in range(count)]

    def add(self, buffer: Buffer, turn: Turn) -> None:
        assert buffer.message is not None
        for at in range(turn.started, min(turn.ended, turn.started + self._count - 1) + 1):
            key = (turn.is_result, turn.place, buffer.message)
            by_state = self._bytes[at % self._count].setdefault(key, [0, 0])
            by_state[0 if buffer.when is When.QUEUED else 1] += buffer.bytes

    def most_bytes(self, at: int, before: int | None = None) -> int:
        """Most bytes at once in segment `at`, of the messages with numbers below `before`.

        A gloo process group has two threads, so next to the second step of one message the first
        steps of the next two may be sent. A message holds its queued bytes during its first step.
        The message before frees its own a little late. Results are sent behind all sums.
        """
        sizes = [
            (is_result, queued, sent)
            for (is_result, _, message), (queued, sent) in sorted(self._bytes[at].items())
            if before is None or message < before
        ]
        most = waiting = 0
        following: dict[bool, list[int]] = {False: [], True: []}
        for number, (is_result, queued, sent) in reversed(list(enumerate(sizes))):
            waiting += queued
            freed_late = sizes[number - 1][1] if number else 0
            most = max(most, freed_late + waiting + sent + sum(following[is_result]))
            following[is_result] = [0 if queued else sent, *following[is_result][:1]]
        return most


def _crossing_gradients(profile: MemoryProfile) -> list[Lifetime]:
    """Gradients kept until the next step reads their variables, after the script dropped them."""
    read_at = read_segments(profile)
    last = last_backward(profile)
    count = len(profile.segments)
    crossing = []
    for lifetime in profile.lifetimes:
        born, dies, variable = lifetime.born, lifetime.dies, lifetime.variable
        if lifetime.kind is not TensorRole.GRADIENT or variable is None:
            continue
        if born is None or dies is None:
            continue
        dropped = dies + (count if dies < born else 0)
        needed = count + read_at.get(variable, 0)
        if dropped < needed and born <= last:
            start, end = (dropped + 1) % count, needed % count
            crossing.append(Lifetime(lifetime.bytes, TensorRole.GRADIENT, start, end, variable))
    return crossing


def _without_gradients(profile: MemoryProfile) -> MemoryProfile:
    """The profile of a replica whose gradients are views of buckets."""
    left = [one for one in profile.lifetimes if one.kind is not TensorRole.GRADIENT]
    touched_bytes = touched([one for one in left if one.born is not None], len(profile.segments))
    relief_bytes = np.minimum(profile.relief_bytes, touched_bytes)
    segments = tuple(
        replace(segment, relief_bytes=int(size))
        for segment, size in zip(profile.segments, relief_bytes, strict=True)
    )
    return replace(profile, segments=segments, lifetimes=tuple(left))


def _estimate(
    profile: MemoryProfile, added: Sequence[Lifetime], passing_bytes: IntArray
) -> MemoryEstimate:
    always_bytes = sum(one.bytes for one in added if one.born is None)
    moving_bytes = touched([one for one in added if one.born is not None], len(profile.segments))
    live_bytes = profile.live_bytes + passing_bytes + moving_bytes + always_bytes
    at = int(np.argmax(live_bytes))
    by_kind = {role.value: 0 for role in TensorRole}
    by_kind[TensorRole.COMMUNICATION.value] = int(passing_bytes[at])
    for lifetime in (*profile.lifetimes, *added):
        if _alive(lifetime, at):
            by_kind[lifetime.kind.value] += lifetime.bytes
    # Tensors that touch the segment but are not alive at its peak, as the recorder saw.
    left = int(profile.relief_bytes[at])
    for role in (TensorRole.TEMPORARY, TensorRole.ACTIVATION, TensorRole.GRADIENT):
        relieved = min(left, by_kind[role.value])
        by_kind[role.value] -= relieved
        left -= relieved
    at_s = float(profile.end_s[at])
    return MemoryEstimate(int(live_bytes[at]), at, at_s, by_kind, live_bytes, profile.end_s)


def _alive(lifetime: Lifetime, at: int) -> bool:
    born, dies = lifetime.born, lifetime.dies
    if born is None or dies is None:
        return True
    return born <= at <= dies if born <= dies else at >= born or at <= dies
