"""Adds the messages of data-parallel training to a step of one worker.

All workers do the same, so one of them and the queue of its process group show a step of any number
of workers. A message runs once its last gradient is in the bucket and its issue has come through;
messages follow each other, as NCCL's and gloo's do within a group. What a bucket holds is copied
back behind the backward pass, once the bucket has arrived.

The parts are those of DDP's reducer. Where a step was recorded under DDP, its own copies stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.lowering.costs import RuntimeCosts
from autotune.whatif.base import Base
from autotune.whatif.messages.accompanied import accompanied_share
from autotune.whatif.messages.bucket_messages import BucketMessages
from autotune.whatif.messages.ddp_buckets import Bucket, RecordedReducer, recorded_reducer
from autotune.whatif.primitives import add, connect, insert, insert_calls, usual_launch
from autotune.whatif.question import Gradient

NETWORK = "network"


@dataclass(frozen=True, eq=False)
class _Copies:
    """`packs` (V,): the op that copies each gradient into its bucket; `first_reads` (B,): the first
    op that reads each bucket once it has arrived, NONE for a bucket that nothing reads."""

    packs: IntArray
    first_reads: IntArray


def synchronized(
    base: Base,
    gradients: Sequence[Gradient],
    buckets: Sequence[Bucket],
    messages: BucketMessages,
    costs: RuntimeCosts,
) -> Base:
    """The step with a message for each bucket, in their order.

    Raises `InvalidInput` where a gradient's op has no launch, behind which its copy is inserted.
    """
    recorded = recorded_reducer(base, gradients)
    if recorded is not None:
        copies = _Copies(recorded.packs, _first_reads(base, recorded, buckets))
    else:
        base, copies = _with_copies(base, gradients, buckets, costs)
    issue_s = 0.0 if recorded is not None else costs["issue_s"]
    base, issues = _issues(base, copies.packs, buckets, issue_s)
    return _with_messages(base, copies, buckets, messages, issues)


def producers(base: Base, gradients: Sequence[Gradient], buckets: Sequence[Bucket]) -> IntArray:
    """The op that completes each bucket, shape (B,): the copy of its last gradient under DDP."""
    recorded = recorded_reducer(base, gradients)
    ready = recorded.packs if recorded is not None else ready_ops(base, gradients)
    return ready[[bucket.positions[-1] for bucket in buckets]]


def ready_ops(base: Base, gradients: Sequence[Gradient]) -> IntArray:
    """(V,) the op that completes each gradient; on a device, if there is one.

    For an op of the host it is the last one that its thread launched so far.
    """
    ready = np.array([one.ready for one in gradients], dtype=np.int64)
    if not base.on_device.any():
        return ready
    calls = base.launch[base.launched]
    for place in np.flatnonzero(~base.on_device[ready]).tolist():
        at = ready[place]
        so_far = (base.queue[calls] == base.queue[at]) & (calls <= at)
        if so_far.any():
            ready[place] = base.launched[np.flatnonzero(so_far)[-1]]
    return ready


def _first_reads(base: Base, recorded: RecordedReducer, buckets: Sequence[Bucket]) -> IntArray:
    """(B,) the first copy back of each bucket; of a sparse one, which has none, the next one."""
    behind = _after(base, recorded.packs)
    if not len(recorded.unpacks):
        return np.broadcast_to(behind, len(buckets))
    dense = [len(bucket.positions) if bucket.rows_bytes is None else 0 for bucket in buckets]
    firsts = np.cumsum([0, *dense[:-1]])
    reads: IntArray = np.concatenate([recorded.unpacks, behind])[firsts]
    return reads


def _after(base: Base, packs: IntArray) -> IntArray:
    """(1,) the device op that is launched behind the last of `packs`; on a CPU its follower."""
    if not base.on_device.any():
        follows = (base.parent == packs[-1]) & (base.queue[base.child] == base.queue[packs[-1]])
        return base.child[follows][:1] if follows.any() else np.array([NONE])
    place = int(np.flatnonzero(np.isin(base.launched, packs))[-1]) + 1
    return base.launched[place : place + 1] if place < len(base.launched) else np.array([NONE])


def _with_copies(
    base: Base, gradients: Sequence[Gradient], buckets: Sequence[Bucket], costs: RuntimeCosts
) -> tuple[Base, _Copies]:
    """Add the copies of a step without DDP: one op for gradients that the same op completes."""
    ready = ready_ops(base, gradients)
    dense = np.array([one.rows_bytes is None for one in gradients], dtype=np.float64)
    sizes = dense * np.array([one.size_bytes for one in gradients])
    ops, group = np.unique(ready, return_inverse=True)
    count = np.bincount(group, weights=dense).astype(np.float64)
    packed_s: FloatArray = costs["pack_s_per_byte"] * np.bincount(group, weights=sizes).astype(
        np.float64
    )
    names = [f"pack {base.names.ops[op]}" for op in ops]
    host_s = costs["bucket_s"] * count
    updates_before = np.array([one.updates_before for one in gradients])
    tails = {number: _last(base, ready[updates_before == number]) for number in set(updates_before)}
    if base.on_device.any():
        copies = base.ops + np.arange(len(ops))
        base = insert(base, ops, packed_s, names, Kind.PACK)
        base = _set_duration(base, copies + len(ops), host_s)
    else:
        base, copies = insert_calls(base, ops, packed_s + host_s, names, Kind.PACK)
    packs = copies[group]
    behind = {number: int(copies[ops == tail][0]) for number, tail in tails.items()}
    reads = []
    for number, bucket in enumerate(buckets):
        turn = updates_before[bucket.positions[0]]
        copied = bucket.rows_bytes is None
        copied_s = np.array([costs["unpack_s_per_byte"] * bucket.size_bytes * copied])
        calls_s = np.array([costs["write_s"] * len(bucket.positions) * copied])
        name = [f"unpack bucket {number}"]
        new, after = base.ops, np.array([behind[turn]])
        if base.on_device.any():
            base = insert(base, after, copied_s, name, Kind.UNPACK)
            base = _set_duration(base, np.array([new + 1]), calls_s)
        else:
            base, _ = insert_calls(base, after, copied_s + calls_s, name, Kind.UNPACK)
        reads.append(new)
        behind[turn] = new
    return base, _Copies(packs, np.array(reads, dtype=np.int64))


def _last(base: Base, ops: IntArray) -> int:
    """The op that the host comes to last; on a CPU, the last one in the order of the threads."""
    if not base.on_device.any():
        return int(ops.max())
    return int(base.launched[np.isin(base.launched, ops)][-1])


def _set_duration(base: Base, ops: IntArray, duration_s: FloatArray) -> Base:
    durations_s = base.duration_s.copy()
    durations_s[ops] = duration_s
    return replace(base, duration_s=durations_s)


def _issues(
    base: Base, packs: IntArray, buckets: Sequence[Bucket], issue_s: float
) -> tuple[Base, IntArray]:
    """Add the calls that issue the messages, each behind the call of its bucket's last copy."""
    last: dict[int, int] = {}
    issues = []
    for number, bucket in enumerate(buckets):
        pack = int(packs[bucket.positions[-1]])
        call = int(base.launch[pack]) if base.on_device[pack] else pack
        after = last.get(call, call)
        last[call] = base.ops
        issues.append(base.ops)
        names = [f"issue bucket {number}"]
        base, _ = insert_calls(base, np.array([after]), np.array([issue_s]), names)
    return base, np.array(issues, dtype=np.int64)


def _with_messages(
    base: Base, copies: _Copies, buckets: Sequence[Bucket], sent: BucketMessages, issues: IntArray
) -> Base:
    latency_s = usual_launch(base)[1] if base.on_device.any() else 0.0
    base, messages = add(
        base, NETWORK, sent.seconds, sent.names, Kind.COLLECTIVE, size_bytes=sent.size_bytes
    )
    sizes = {at: one.element_bytes for at, one in zip(messages.tolist(), buckets, strict=True)}
    base = replace(base, element_bytes={**base.element_bytes, **sizes})
    base = connect(base, issues, messages, delay_s=latency_s)
    for message, bucket in zip(messages.tolist(), buckets, strict=True):
        base = connect(base, np.unique(copies.packs[list(bucket.positions)]), message)
    if len(messages) > 1:
        pairs = np.array(list(pairwise(messages.tolist())))
        base = connect(base, pairs[:, 0], pairs[:, 1])
    base = connect(base, messages[-1], messages[0], later=1)
    read = copies.first_reads != NONE
    return connect(base, messages[read], copies.first_reads[read])


def contended(base: Base, messages: BoolArray, factor: float) -> Base:
    """Lengthen `messages` by how much of them runs while the device computes.

    A message that kernels accompany all the time takes `factor` times as long.
    """
    shares = _overlap(base, np.flatnonzero(messages))
    durations_s = base.duration_s.copy()
    durations_s[messages] *= 1.0 + (factor - 1.0) * shares
    return replace(base, duration_s=durations_s)


def uncontended(base: Base, messages: BoolArray, factor: float) -> Base:
    """The inverse of `contended`, for messages that contention has lengthened already."""
    shares = _overlap(base, np.flatnonzero(messages))
    durations_s = base.duration_s.copy()
    durations_s[messages] /= 1.0 + (factor - 1.0) * shares
    return replace(base, duration_s=durations_s)


def _overlap(base: Base, ops: IntArray) -> FloatArray:
    """The share of each op's time during which kernels run, in the steady step; 0 on a CPU."""
    computes = base.on_device & (base.kind != Kind.COLLECTIVE) & (base.queue != NONE)
    if not computes.any() or not len(ops):
        return np.zeros(len(ops))
    return accompanied_share(base, ops, computes, with_gaps=False)
