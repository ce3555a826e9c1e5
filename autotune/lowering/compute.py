"""A worker's side of a graph: passes in segments, packing, issuing, writing back and the update.

Where an accelerator computes, its queue runs ahead and a thread of the host packs and issues behind it. Where the CPU computes, both
are one queue, and what sending takes of the CPU is taken from computation.

| symbol | meaning |
|---|---|
| V | variables, in backward order |
| M | messages, in issue order |
| ready, needed | times of `strategy_space.timing`, shape (V,) |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.costs.timing import close_groups, needed_times_s, ready_times_s
from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Discipline, Kind
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.messages import Members
from autotune.workload import DTYPE_BYTES, Workload


@dataclass(frozen=True, eq=False)
class Passes:
    """What all plans of a workload share. `wakes_ready`, `wakes_read` (V,): an emulated accelerator wakes up for this variable's gradient
    or first read, and not for one just before it.
    """

    workload: Workload
    ready_s: FloatArray
    needed_s: FloatArray
    wakes_ready: BoolArray
    wakes_read: BoolArray
    grad_bytes: FloatArray
    computes_on_cpu: bool

    @staticmethod
    def of(workload: Workload) -> Passes:
        """A gradient is ready no earlier than those before it."""
        ready_s = np.maximum.accumulate(np.clip(ready_times_s(workload), 0.0, None))
        sizes = np.array(
            [variable.elements * DTYPE_BYTES[variable.dtype] for variable in workload.variables],
            dtype=np.float64,
        )
        needed_s = needed_times_s(workload)
        on_cpu = workload.device == "cpu" and workload.threads > 0
        return Passes(
            workload, ready_s, needed_s, _firsts(ready_s), _firsts(needed_s), sizes, on_cpu
        )


def _firsts(times_s: FloatArray) -> BoolArray:
    """Whether each is the first of its close group."""
    order = np.argsort(times_s, kind="stable")
    found = np.zeros(len(times_s), dtype=np.bool_)
    found[order[[group[0] for group in close_groups(times_s[order].tolist())]]] = True
    return found


@dataclass(frozen=True, eq=False)
class Duties:
    """What a plan makes a worker's own thread do: seconds per variable (V,), per message (M,) and at the end."""

    hand_out_s: FloatArray
    fill_s: FloatArray
    issue_s: FloatArray
    taken_s: FloatArray
    write_s: FloatArray
    settle_s: float
    settle_each_s: FloatArray
    defer_s: float
    buffers_s: float
    update_s: float  # of the host's own: what is left of the update for it
    issued_at: IntArray  # (M,), backward position whose gradient lets the message go

    @staticmethod
    def of(
        passes: Passes,
        members: Members,
        cast: BoolArray,
        prepare_s: FloatArray,
        taken_s: FloatArray,
        costs: RuntimeCosts,
        buckets: bool = False,
    ) -> Duties:
        """`cast` (M,): rounded to 16 bits. `prepare_s` (M,): computed as the message is issued. A message waits for those before it.

        `buckets`: torch's own reducer carries the plan out.
        """
        each_s, write_s = (
            (costs["bucket_s"], 0.0) if buckets else (costs["fill_s"], costs["write_s"])
        )
        per_byte = np.where(cast, costs["cast_s_per_byte"], costs["pack_s_per_byte"])
        count = len(passes.ready_s)
        elements = np.array(
            [variable.elements for variable in passes.workload.variables], dtype=np.float64
        )
        share = members.elements / np.maximum(elements[members.variable], 1.0)
        packed_s = np.bincount(
            members.variable, weights=share * per_byte[members.message], minlength=count
        )
        return Duties(
            costs["hand_out_s_per_byte"] * passes.grad_bytes,
            each_s + costs["wake_s"] * passes.wakes_ready + packed_s * passes.grad_bytes,
            costs["issue_s"] + prepare_s,
            taken_s,
            write_s + costs["unpack_s_per_byte"] * passes.grad_bytes,
            costs["settle_s"],
            costs["settle_each_s"]
            + costs["wake_s"] * passes.wakes_read
            + costs["settle_s_per_byte"] * passes.grad_bytes,
            costs["defer_s"] * count,
            costs["buffer_s"] * passes.workload.buffers,
            costs["real_update"] * passes.workload.update_s,
            np.maximum.accumulate(members.last),
        )


class Worker:
    """Writes one worker's passes into an emitter. Its queues are named after its rank.

    `cores`: the queue of the cores that its own thread shares with all other work, NONE where it has one for itself; `share`: by which
    the duties' times are multiplied on these. `broadcast_s`: how long the buffers travel before a forward pass.
    """

    def __init__(
        self,
        to: DfgBuilder,
        rank: int,
        passes: Passes,
        duties: Duties,
        cores: int = NONE,
        share: float = 1.0,
        broadcast_s: float = 0.0,
    ) -> None:
        self._cores, self._share = (NONE, 1.0) if passes.computes_on_cpu else (cores, share)
        self._broadcast_s = broadcast_s
        self._to, self._rank, self._passes, self._duties = to, rank, passes, duties
        self._names = [variable.name for variable in passes.workload.variables]
        self._device = to.queue(
            f"r{rank} device", Discipline.PRIORITY if duties.taken_s.any() else Discipline.FIFO
        )
        self._host = self._device if passes.computes_on_cpu else to.queue(f"r{rank} host")
        self._computed = self._done = NONE

    def forward(self, after: int) -> int:
        """A pass that waits for nothing but its buffers; its end."""
        began = self._buffers(after)
        self._computed = self._op(
            "forward", self._device, self._passes.workload.forward_s, Kind.FORWARD, (began,)
        )
        return self._computed

    def _buffers(self, after: int) -> int:
        """Rank 0's buffers have arrived; their few bytes are taken to meet no others."""
        if self._broadcast_s <= 0:
            return after
        copied = self._op("copy buffers", self._host, self._duties.buffers_s, Kind.PACK, (after,))
        return self._op("broadcast buffers", NONE, self._broadcast_s, Kind.RECV, (copied,))

    def backward(self, after: int) -> IntArray:
        """The ops that issue the messages, shape (M,)."""
        duties, passes, to = self._duties, self._passes, self._to
        count, messages = len(passes.ready_s), len(duties.issued_at)
        width, head = 2 if duties.taken_s.any() else 1, 3 if duties.hand_out_s.any() else 2
        issues = np.bincount(duties.issued_at, minlength=count)
        lengths = head + width * issues
        start = np.cumsum(lengths) - lengths
        fill = start + head - 1
        total = int(lengths.sum())
        first = to.ops
        at_position = np.arange(messages) - (np.cumsum(issues) - issues)[duties.issued_at]
        issue = start[duties.issued_at] + head + width * at_position
        duration_s, kind = np.zeros(total), np.full(total, Kind.PACK, dtype=np.int64)
        queue, channel = (
            np.full(total, self._host, dtype=np.int64),
            np.full(total, self._cores, dtype=np.int64),
        )
        priority, host = np.zeros(total, dtype=np.int64), np.ones(total, dtype=np.bool_)
        duration_s[fill], duration_s[issue] = (
            self._share * duties.fill_s,
            self._share * duties.issue_s,
        )
        if head == 3:
            duration_s[start + 1] = self._share * duties.hand_out_s
        duration_s[start], kind[start], queue[start] = (
            np.diff(passes.ready_s, prepend=0.0),
            Kind.BACKWARD,
            self._device,
        )
        host[start] = False
        if width == 2:
            duration_s[issue + 1], kind[issue + 1], queue[issue + 1], priority[issue + 1] = (
                duties.taken_s,
                Kind.OTHER,
                self._device,
                -1,
            )
            host[issue + 1] = False
            to.edges(first + issue, first + issue + 1)
        channel[~host] = NONE
        layer = np.repeat(np.arange(count), lengths)
        on_host = np.flatnonzero(host)
        to.edges(first + on_host[:-1], first + on_host[1:])
        to.edges(first + start, first + fill)
        to.edges(first + start[:-1], first + start[1:])
        to.edges(after, first)
        if passes.computes_on_cpu:
            to.edges(first + on_host[np.searchsorted(on_host, start[1:]) - 1], first + start[1:])
        names = self._names

        def named(number: int) -> str:
            position = int(layer[number])
            part = number - int(start[position])
            heads = ("backward", "pack") if head == 2 else ("backward", "hand out", "pack")
            what = heads[part] if part < head else ("issue", "send")[(part - head) % width]
            return f"r{self._rank} {what} {names[position]}"

        columns = {
            "queue": queue,
            "channel": channel,
            "kind": kind,
            "priority": priority,
            "layer": layer,
        }
        to.block(total, named, duration_s=duration_s, worker=self._rank, **columns)
        self._done = first + int(on_host[-1])
        rest_s = max(passes.workload.backward_s - float(passes.ready_s[-1]), 0.0)
        ahead = (
            (first + int(start[-1]), self._done)
            if passes.computes_on_cpu
            else (first + int(start[-1]),)
        )
        self._computed = self._op("backward end", self._device, rest_s, Kind.BACKWARD, ahead)
        issued: IntArray = first + issue
        return issued

    @property
    def ends(self) -> tuple[int, int]:
        """The last ops of the device and of the thread beside it."""
        return self._computed, self._done

    def update(self, arrived: int) -> int:
        """Averages are written back once all have come, then comes the update; its end."""
        written_s = float(self._duties.write_s.sum())
        written = self._op(
            "write averages", self._host, written_s, Kind.UNPACK, (*self.ends, arrived)
        )
        update_s = self._passes.workload.update_s
        self._computed = self._op("update", self._device, update_s, Kind.UPDATE, (written,))
        if self._updates_for_real:
            real = self._op(
                "real update", self._host, self._duties.update_s, Kind.UPDATE, (written,)
            )
            self._computed = self._op("updated", NONE, 0.0, Kind.VIRTUAL, (self._computed, real))
        self._done = self._computed
        return self._computed

    def defer(self) -> int:
        """Averages and updates are left to the next forward pass."""
        deferred = self._op("defer", self._host, self._duties.defer_s, Kind.OTHER, self.ends)
        self._computed = self._done = self._op(
            "update", self._device, self._passes.workload.update_s, Kind.UPDATE, (deferred,)
        )
        return self._computed

    @property
    def _updates_for_real(self) -> bool:
        """Emulated accelerators whose host updates, too, as all ranks that share the cores do (until 2026-11-22)."""
        return (
            self._cores != NONE
            and self._passes.workload.device == "cpu"
            and self._duties.update_s > 0
        )

    def forward_waiting(self, members: Members, ends: IntArray) -> tuple[int, int]:
        """The pass reads each variable once its messages are in, from `ends` (M,); its last ops. Behind `defer`.

        What has arrived is averaged and updated at the next read, whatever that reads.
        """
        passes, to = self._passes, self._to
        first_read = np.full(len(ends), np.inf)
        np.minimum.at(first_read, members.message, passes.needed_s[members.variable])
        times, group = np.unique(first_read, return_inverse=True)
        group = group.ravel()
        written_s = np.bincount(
            group, weights=self._written_s(members), minlength=len(times)
        ).astype(np.float64)
        on_cpu = passes.computes_on_cpu
        began = self._buffers(self._computed)
        base = to.ops
        segment = base + 3 * np.arange(len(times))
        gate, written = segment + 1, segment + 2
        read = written if on_cpu else gate
        to.edges(began, segment[0])
        to.edges(began, written[0])
        to.edges(ends, gate[group])
        to.edges(gate, written)
        for behind in (segment, written):
            to.edges(behind[:-1], behind[1:])
        to.edges(read[:-1], segment[1:])
        total = 3 * len(times)
        columns = {name: np.zeros(total) for name in ("duration_s", "queue", "channel", "kind")}
        values: dict[str, tuple[float | FloatArray, ...]] = {
            "duration_s": (np.diff(times, prepend=0.0), 0.0, self._share * written_s),
            "channel": (NONE, NONE, self._cores),
            "queue": (self._device, NONE, self._host),
            "kind": (Kind.FORWARD, Kind.VIRTUAL, Kind.UNPACK),
        }
        for name, of_parts in values.items():
            for part, value in enumerate(of_parts):
                columns[name][part::3] = value

        def named(number: int) -> str:
            return f"r{self._rank} {('forward', 'read', 'write')[number % 3]} {number // 3}"

        to.block(total, named, worker=self._rank, **columns)
        rest_s = max(passes.workload.forward_s - float(times[-1]), 0.0)
        ahead = (int(segment[-1]), int(read[-1]))
        self._computed, self._done = (
            self._op("forward end", self._device, rest_s, Kind.FORWARD, ahead),
            int(written[-1]),
        )
        return self.ends

    def _written_s(self, members: Members) -> FloatArray:
        """Per message: taking it in, and its share of what its variables take to be averaged and really updated, shape (M,)."""
        elements = np.array(
            [variable.elements for variable in self._passes.workload.variables], dtype=np.float64
        )
        share = members.elements / np.maximum(elements[members.variable], 1.0)
        count = int(members.message.max()) + 1
        each_s = self._duties.settle_each_s
        if self._updates_for_real:
            each_s = each_s + self._duties.update_s * elements / elements.sum()
        weights = share * each_s[members.variable]
        return self._duties.settle_s + np.bincount(
            members.message, weights=weights, minlength=count
        ).astype(np.float64)

    def _op(
        self, name: str, queue: int, duration_s: float, kind: Kind, after: tuple[int, ...]
    ) -> int:
        on_host = queue == self._host and queue != self._device
        columns = {
            "queue": queue,
            "channel": self._cores if on_host else NONE,
            "kind": kind,
            "worker": self._rank,
        }
        taken_s = duration_s * self._share if on_host else duration_s
        number = self._to.block(1, lambda _: f"r{self._rank} {name}", duration_s=taken_s, **columns)
        self._to.edges(np.array(after), number)
        return number
