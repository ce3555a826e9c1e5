"""A worker's ops in a graph: passes in segments, packing, issuing, writing back and the update.

With an accelerator, the accelerator's queue runs ahead and a thread of the host packs and issues
behind it. If the CPU computes, both are one queue, and the CPU time of sending is taken from
computation.

| symbol | meaning |
|---|---|
| V | variables, in backward order |
| M | messages, in issue order |
| ready, needed | times of `costs.timing`, shape (V,) |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Discipline, Kind
from autotune.lowering.host_costs import HostCosts
from autotune.lowering.messages import SliceTable
from autotune.lowering.pass_times import PassTimes


@dataclass(frozen=True)
class BufferBroadcast:
    """How the buffers of a module reach all ranks before a forward pass.

    `alone_s`: without competitors. `hops`: transfers one behind the other in the broadcast's tree,
    each of which occupies its ports for `hop_s`. `ports`: (queue, lock or NONE) of each port that
    the plan's messages use, too.
    """

    alone_s: float
    hops: int = 0
    hop_s: float = 0.0
    ports: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class _BackwardLayout:
    """The places of a backward pass's N ops in their block.

    The ops of each variable follow each other: `heads`, which are its part of the backward pass,
    handing out its gradient if that costs time, and packing; and for each message that it completes
    `parts`, which are an issue, with a send if sending takes time from computation.

    `start`, `fill` (V,): the part of the pass, and packing. `issue` (M,). `layer` (N,): the
    variable. `on_host` (N,): whether the host's thread runs the op.
    """

    heads: tuple[str, ...]
    parts: tuple[str, ...]
    start: IntArray
    fill: IntArray
    issue: IntArray
    layer: IntArray
    on_host: BoolArray

    @staticmethod
    def of(costs: HostCosts, variables: int) -> _BackwardLayout:
        sends = bool(costs.taken_s.any())
        parts = ("issue", "send") if sends else ("issue",)
        heads: tuple[str, ...] = ("backward", "pack")
        if costs.hand_out_s.any():
            heads = ("backward", "hand out", "pack")
        width, head = len(parts), len(heads)
        issues = np.bincount(costs.issued_at, minlength=variables)
        lengths = head + width * issues
        start = np.cumsum(lengths) - lengths
        earlier = (np.cumsum(issues) - issues)[costs.issued_at]  # messages of earlier variables
        place = np.arange(len(costs.issued_at)) - earlier
        issue = start[costs.issued_at] + head + width * place
        on_host = np.ones(int(lengths.sum()), dtype=np.bool_)
        on_host[start] = False
        if sends:
            on_host[issue + 1] = False
        layer = np.repeat(np.arange(variables), lengths)
        return _BackwardLayout(heads, parts, start, start + head - 1, issue, layer, on_host)

    @property
    def sends(self) -> bool:
        return "send" in self.parts


class Worker:
    """Adds one worker's passes to a builder.

    `cores`: queue of the cores that its thread shares with all other work; NONE if it has a core of
    its own. `share`: factor of the host's times on shared cores. `broadcast`: that of the
    buffers before a forward pass.
    """

    def __init__(
        self,
        to: DfgBuilder,
        rank: int,
        times: PassTimes,
        host_costs: HostCosts,
        *,
        cores: int,
        share: float,
        broadcast: BufferBroadcast,
    ) -> None:
        self._cores, self._share = (NONE, 1.0) if times.computes_on_cpu else (cores, share)
        self._broadcast = broadcast
        self._to = to
        self._rank = rank
        self._times = times
        self._costs = host_costs
        taken = host_costs.taken_s.any()
        discipline = Discipline.PRIORITY if taken else Discipline.FIFO
        self._device = to.queue(f"r{rank} device", discipline)
        self._host = self._device if times.computes_on_cpu else to.queue(f"r{rank} host")
        self._computed = self._done = NONE

    @property
    def ends(self) -> tuple[int, int]:
        """The last ops of the device and of the host's thread."""
        return self._computed, self._done

    def forward(self, after: int) -> int:
        """A pass that waits only for its buffers; its last op."""
        began = self._buffers(after)
        forward_s = self._times.workload.forward_s
        self._computed = self._op("forward", self._device, forward_s, Kind.FORWARD, (began,))
        return self._computed

    def _buffers(self, after: int) -> int:
        """Rank 0's buffers arrive, behind the messages that the ports carry already."""
        broadcast = self._broadcast
        if broadcast.alone_s <= 0:
            return after
        copied = self._op("copy buffers", self._host, self._costs.buffers_s, Kind.PACK, (after,))
        reached, rest_s = copied, broadcast.alone_s
        for number in range(broadcast.hops if broadcast.ports else 0):
            name = f"r{self._rank} buffers {number}"
            sent = [
                self._to.op(
                    name, port, broadcast.hop_s, Kind.SEND, (reached,), acquires=lock, releases=lock
                )
                for port, lock in broadcast.ports
            ]
            reached = self._op(f"buffers {number} arrived", NONE, 0.0, Kind.VIRTUAL, tuple(sent))
            rest_s -= broadcast.hop_s
        return self._op("broadcast buffers", NONE, max(rest_s, 0.0), Kind.RECV, (reached,))

    def backward(self, after: int) -> IntArray:
        """The ops that issue the messages, shape (M,)."""
        times, first = self._times, self._to.ops
        layout = _BackwardLayout.of(self._costs, len(times.ready_s))
        host_ops = np.flatnonzero(layout.on_host)
        self._add_backward_edges(layout, host_ops, first)
        self._to.edge(after, first)
        self._add_backward_ops(layout)
        last_computed = first + int(layout.start[-1])
        self._done = first + int(host_ops[-1])
        behind = (last_computed, self._done) if times.computes_on_cpu else (last_computed,)
        rest_s = max(times.workload.backward_s - float(times.ready_s[-1]), 0.0)
        self._computed = self._op("backward end", self._device, rest_s, Kind.BACKWARD, behind)
        issued: IntArray = first + layout.issue
        return issued

    def _add_backward_edges(self, layout: _BackwardLayout, host_ops: IntArray, first: int) -> None:
        """Edges between the ops of the pass, of which `first` is the first one.

        `host_ops`: those of the host's thread, counted from `first`.
        """
        to, start, issue = self._to, layout.start, layout.issue
        if layout.sends:
            to.edges(first + issue, first + issue + 1)
        to.edges(first + host_ops[:-1], first + host_ops[1:])
        to.edges(first + start, first + layout.fill)
        to.edges(first + start[:-1], first + start[1:])
        if self._times.computes_on_cpu:
            previous = host_ops[np.searchsorted(host_ops, start[1:]) - 1]
            to.edges(first + previous, first + start[1:])

    def _add_backward_ops(self, layout: _BackwardLayout) -> None:
        costs, times, rank = self._costs, self._times, self._rank
        start, issue, on_host = layout.start, layout.issue, layout.on_host
        heads, parts = layout.heads, layout.parts
        head, width = len(heads), len(parts)
        total = len(on_host)
        duration_s = np.zeros(total)
        kind = np.full(total, Kind.PACK, dtype=np.int64)
        priority = np.zeros(total, dtype=np.int64)
        duration_s[layout.fill] = self._share * costs.fill_s
        duration_s[issue] = self._share * costs.issue_s
        if head == 3:
            duration_s[start + 1] = self._share * costs.hand_out_s
        duration_s[start] = np.diff(times.ready_s, prepend=0.0)
        kind[start] = Kind.BACKWARD
        if layout.sends:
            duration_s[issue + 1] = costs.taken_s
            kind[issue + 1] = Kind.OTHER
            priority[issue + 1] = -1
        variables, layer = times.workload.variables, layout.layer

        def name(number: int) -> str:  # knows no worker: cycles would keep whole graphs
            variable = int(layer[number])
            part = number - int(start[variable])
            what = heads[part] if part < head else parts[(part - head) % width]
            return f"r{rank} {what} {variables[variable].name}"

        self._to.block(
            total,
            name,
            duration_s=duration_s,
            queue=np.where(on_host, self._host, self._device),
            channel=np.where(on_host, self._cores, NONE),
            kind=kind,
            priority=priority,
            layer=layer,
            worker=rank,
        )

    def update(self, arrived: int) -> int:
        """Write back all averages once they have arrived, then update; the last op."""
        written_s = float(self._costs.write_s.sum())
        written = self._op(
            "write averages", self._host, written_s, Kind.UNPACK, (*self.ends, arrived)
        )
        update_s = self._times.workload.update_s
        self._computed = self._op("update", self._device, update_s, Kind.UPDATE, (written,))
        if self._updates_on_host:
            update_s = self._costs.update_s
            real = self._op("real update", self._host, update_s, Kind.UPDATE, (written,))
            self._computed = self._op("updated", NONE, 0.0, Kind.VIRTUAL, (self._computed, real))
        self._done = self._computed
        return self._computed

    def defer(self, slices: SliceTable, ends: IntArray, norms: int = NONE) -> None:
        """Leave averages and updates to later reads: the script's own, between the steps, wait for
        their variables' messages, which arrive at `ends` (M,).

        Without such reads, each variable's update takes its time in the forward pass. `norms`: the
        op after which the norms of all gradients are known; NONE: nobody needs them.
        """
        behind = self.ends if norms == NONE else (*self.ends, norms)
        deferred = self._op("defer", self._host, self._costs.defer_s, Kind.OTHER, behind)
        update_s = self._times.workload.update_s
        first_read_s = self._first_reads_s(slices, len(ends))
        early = first_read_s < 0
        if not early.any():
            update_s *= self._costs.early_update
            self._computed = self._op("update", self._device, update_s, Kind.UPDATE, (deferred,))
            self._done = self._computed
            return
        reads_s = np.where(early, update_s + first_read_s, np.inf)
        self._wait_for_reads("update", Kind.UPDATE, deferred, reads_s, slices, ends, update_s)

    def forward_waiting(self, slices: SliceTable, ends: IntArray) -> tuple[int, int]:
        """A pass, behind `defer`, in which a read waits for its variable's messages; its last ops.

        Messages that have arrived, at `ends` (M,), are averaged and applied at the next read of any
        variable.
        """
        began = self._buffers(self._joined())
        first_read_s = self._first_reads_s(slices, len(ends))
        reads_s = np.where(first_read_s < 0, np.inf, first_read_s)
        forward_s = self._times.workload.forward_s
        if np.isinf(reads_s).all():
            self._computed = self._op("forward", self._device, forward_s, Kind.FORWARD, (began,))
            return self.ends
        updated_s = self._shares(slices) * self._times.workload.update_s
        late = 0.0 if (first_read_s < 0).any() else 1.0 - self._costs.early_update
        self._wait_for_reads(
            "forward", Kind.FORWARD, began, reads_s, slices, ends, forward_s, late * updated_s
        )
        return self.ends

    def _first_reads_s(self, slices: SliceTable, messages: int) -> FloatArray:
        """When a variable of each message is first read, from the start of the forward pass, (M,).

        Before it, the script itself reads.
        """
        first_read_s = np.full(messages, np.inf)
        np.minimum.at(first_read_s, slices.message, self._times.needed_s[slices.variable])
        return first_read_s

    def _joined(self) -> int:
        """An op behind the last ops of the device and of the host's thread."""
        if self._done == self._computed:
            return self._computed
        return self._op("begin forward", NONE, 0.0, Kind.VIRTUAL, self.ends)

    def _wait_for_reads(
        self,
        part: str,
        kind: Kind,
        began: int,
        reads_s: FloatArray,
        slices: SliceTable,
        ends: IntArray,
        lasts_s: float,
        updated_s: FloatArray | None = None,
    ) -> None:
        """Compute for `lasts_s` behind `began`, interrupted by reads of messages.

        `reads_s` (M,): when each message is first read; infinite for one that is not read here.
        `updated_s` (M,): time of the device for the updates with each message, behind its read.
        """
        times, to, rank = self._times, self._to, self._rank
        read = np.flatnonzero(np.isfinite(reads_s))
        read_s, group = np.unique(reads_s[read], return_inverse=True)
        group = group.ravel()
        flushed_s = self._flushed_s(slices)[read]
        written_s = np.bincount(group, weights=flushed_s, minlength=len(read_s))
        segment = to.ops + 3 * np.arange(len(read_s))
        gate = segment + 1
        written = segment + 2
        passed = written if times.computes_on_cpu else gate
        to.edge(began, int(segment[0]))
        to.edge(began, int(written[0]))
        to.edges(ends[read], gate[group])
        to.edges(gate, written)
        for chain in (segment, written):
            to.edges(chain[:-1], chain[1:])
        to.edges(passed[:-1], segment[1:])

        def name(number: int) -> str:
            return f"r{rank} {(part, 'read', 'write')[number % 3]} {number // 3}"

        segment_s = np.diff(read_s, prepend=0.0)
        behind_s: FloatArray = np.zeros(len(read_s))
        if updated_s is not None:
            np.add.at(behind_s, group, updated_s[read])
            segment_s[1:] += behind_s[:-1]
        durations_s = (segment_s, np.zeros(len(read_s)), self._share * written_s)
        count = len(read_s)
        to.block(
            3 * count,
            name,
            duration_s=np.column_stack(durations_s).ravel(),
            queue=np.tile([self._device, NONE, self._host], count),
            channel=np.tile([NONE, NONE, self._cores], count),
            kind=np.tile([kind, Kind.VIRTUAL, Kind.UNPACK], count),
            worker=rank,
        )
        rest_s = max(lasts_s - float(read_s[-1]), 0.0) + float(behind_s[-1])
        behind = (int(segment[-1]), int(passed[-1]))
        self._computed = self._op(f"{part} end", self._device, rest_s, kind, behind)
        self._done = int(written[-1])

    def _flushed_s(self, slices: SliceTable) -> FloatArray:
        """Time to take in each message and apply its share of its variables' updates, (M,)."""
        each_s = self._costs.flush_each_s
        if self._updates_on_host:
            elements = self._times.elements
            each_s = each_s + self._costs.update_s * elements / elements.sum()
        weights = self._times.share(slices) * each_s[slices.variable]
        applied_s: FloatArray = np.bincount(slices.message, weights=weights).astype(np.float64)
        return self._costs.flush_s + applied_s

    def _shares(self, slices: SliceTable) -> FloatArray:
        """Each message's share of all elements, (M,)."""
        elements = self._times.elements
        weights = self._times.share(slices) * elements[slices.variable]
        of_message: FloatArray = np.bincount(slices.message, weights=weights).astype(np.float64)
        return of_message / max(float(elements.sum()), 1.0)

    @property
    def _updates_on_host(self) -> bool:
        """Whether the host updates, too, on shared cores (emulations until 2026-11-22)."""
        on_cpu = self._times.workload.device == "cpu"
        return self._cores != NONE and on_cpu and self._costs.update_s > 0

    def _op(
        self, name: str, queue: int, duration_s: float, kind: Kind, after: tuple[int, ...]
    ) -> int:
        on_host = queue == self._host and queue != self._device
        return self._to.op(
            f"r{self._rank} {name}",
            queue,
            duration_s * self._share if on_host else duration_s,
            kind,
            after,
            channel=self._cores if on_host else NONE,
            worker=self._rank,
        )
