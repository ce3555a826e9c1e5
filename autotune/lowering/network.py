"""The messages of a graph: their steps as rounds on ports, with the locks and threads they need.

| symbol | meaning |
|---|---|
| M | messages, in issue order |
| K | messages of one kind |
| L | ops of one message of a kind |
| P, C | ports, hosts with cores |
| W | workers in the graph, 1 if the graph is symmetric |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Kind
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.messages import Batch, TimedStep
from autotune.lowering.traffic import IN, OUT, Collective, Ports

CORES = "cores"
"""Queue of the cores that all hosts share."""
MAX_ROUNDS = 16
"""More rounds are joined into this many equal ones. Alone, a message takes the same time;
concurrent messages share the links more coarsely."""
STAR_PIECES = 4
"""Pieces of a gather or scatter, whose transfers share a link evenly with other messages."""
_STARS = (Collective.GATHER, Collective.SCATTER)
MAX_PORTS_COMPARED = 64
"""Above it, only equal ports are folded."""


class _Op(NamedTuple):
    """One op of a message. `slot`, `size_slot`: rows of the template's durations and sizes."""

    queue: int = NONE
    channel: int = NONE
    kind: int = Kind.VIRTUAL
    worker: int = NONE
    acquires: int = NONE
    releases: int = NONE
    slot: int = 0
    size_slot: int = NONE


@dataclass
class _Template:
    """The ops of one message of a batch.

    `durations`, `sizes`: rows of shape (K,); row 0 of the durations is 0. For each lane, by worker:
    `threads` are the ops of the lane's thread, `ends` those that the lane's step ends with.
    """

    durations: list[FloatArray]
    ops: list[_Op] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    sizes: list[FloatArray] = field(default_factory=list)
    threads: list[list[int]] = field(default_factory=list)
    ends: list[list[int]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)  # ops that start when the message is issued

    def add(self, name: str, op: _Op, after: Sequence[int]) -> int:
        number = len(self.ops)
        self.names.append(name)
        self.ops.append(op)
        self.edges.extend((parent, number) for parent in after)
        if not after:
            self.first.append(number)
        return number

    def duration(self, values_s: FloatArray) -> int:
        self.durations.append(values_s)
        return len(self.durations) - 1


@dataclass(frozen=True, eq=False)
class MessageOps:
    """`starts`, `ends` (M,): the first op and the Out op of every message; its ops lie between."""

    starts: IntArray
    ends: IntArray


class Network:
    """Adds the messages of one plan to a builder, any number of times."""

    def __init__(
        self,
        batches: Sequence[Batch],
        ports: Ports,
        costs: RuntimeCosts,
        *,
        symmetric: bool,
        workers: Sequence[int],
        limit: int | None,
        layer: IntArray,
        coarse: bool,
        crowd: float = 0.0,
    ) -> None:
        """`limit`: messages in flight on a lane (`Plan.limit`). `layer` (M,): layers of the ops.

        `symmetric`: only the ports that decide are in the graph. `coarse`: a message without
        competitors is one round. `crowd`: ranks per core of the machine that they share; 0 if every
        rank has cores enough. With shared cores, other work delays a message round by round.
        """
        timed_steps = [timed for batch in batches for timed in batch.steps]
        times = [timed.times for timed in timed_steps if timed.times is not None]
        self._batches = batches
        self._ports = ports
        self._costs = costs
        self._used_ports = deciding([step.ports for step in times], symmetric).tolist()
        self._used_cores = deciding([step.cores for step in times], symmetric).tolist()
        self._workers = workers
        self._limit = limit
        self._layer = layer
        self._crowd = crowd
        alone = limit == 1 and all(len(batch.steps) == 1 for batch in batches)
        self._coarse = coarse and alone and crowd == 0
        self._messages = sum(len(batch.numbers) for batch in batches)
        self._slow_leaves = {
            port % ports.hosts
            for timed in timed_steps
            for port in self._slowest_ports(timed)
            if port != self._root_port(timed)
        }

    def emit(self, to: DfgBuilder, issued: IntArray) -> MessageOps:
        """Add the messages of one step; the ops `issued` (W, M) issue them."""
        templates = [self._template(to, batch) for batch in self._batches]
        lengths = np.zeros(self._messages, dtype=np.int64)
        for batch, template in zip(self._batches, templates, strict=True):
            lengths[batch.numbers] = len(template.ops)
        offsets = np.cumsum(lengths) - lengths
        base = to.ops + offsets
        total = int(lengths.sum())
        columns = np.empty((len(_Op._fields) - 2, total), dtype=np.int64)
        layer = np.empty(total, dtype=np.int64)
        duration_s, size_bytes = np.zeros(total), np.zeros(total)
        lanes = max(len(template.threads) for template in templates)
        threads = np.full((lanes, len(self._workers), self._messages), NONE, dtype=np.int64)
        lane_ends = threads.copy()
        names: dict[int, list[str]] = {}
        for batch, template in zip(self._batches, templates, strict=True):
            numbers = batch.numbers
            ops = np.array(template.ops, dtype=np.int64)
            at = offsets[numbers][:, None] + np.arange(len(ops))
            columns[:, at] = ops[:, None, :-2].T
            layer[at] = self._layer[numbers][:, None]
            duration_s[at] = np.stack(template.durations)[ops[:, -2]].T
            sizes = np.array([*template.sizes, np.zeros(len(numbers))])
            size_bytes[at] = sizes[ops[:, -1]].T
            start = base[numbers]
            edges = np.array(template.edges, dtype=np.int64).reshape(-1, 2)
            to.edges(start[:, None] + edges[:, 0], start[:, None] + edges[:, 1])
            for op in template.first:
                to.edges(issued[:, numbers], np.broadcast_to(start + op, (len(issued), len(start))))
            for table, ops_of_lane in ((threads, template.threads), (lane_ends, template.ends)):
                for lane, of_workers in enumerate(ops_of_lane):
                    for worker, op in enumerate(of_workers):
                        table[lane, worker, numbers] = start + op
            names.update(dict.fromkeys(numbers.tolist(), template.names))
        self._chain(to, threads, lane_ends)

        def name(number: int) -> str:
            message = int(np.searchsorted(offsets, number, side="right")) - 1
            return f"message {message} {names[message][number - int(offsets[message])]}"

        to.block(
            total,
            name,
            duration_s=duration_s,
            size_bytes=size_bytes,
            layer=layer,
            **dict(zip(_Op._fields, columns, strict=False)),
        )
        return MessageOps(base, base + lengths - 1)

    def _chain(self, to: DfgBuilder, threads: IntArray, lane_ends: IntArray) -> None:
        """Each lane's thread takes the messages in plan order.

        It takes a message when the message `limit` places before it has ended on the lane.
        """
        for lane, ends_of_lane in zip(threads, lane_ends, strict=True):
            for taken, ends in zip(lane, ends_of_lane, strict=True):
                used = np.flatnonzero(taken != NONE)
                if self._limit != 1:
                    to.edges(taken[used[:-1]], taken[used[1:]])
                if self._limit is not None:
                    to.edges(ends[used[: -self._limit]], taken[used[self._limit :]])

    def _template(self, to: DfgBuilder, batch: Batch) -> _Template:
        template = _Template([np.zeros(len(batch.numbers))])
        behind: list[int] = []
        for lane, timed in enumerate(batch.steps):
            behind = self._add_step(to, template, timed, lane, behind)
        if len(behind) > 1 or len(template.ops) - 1 not in behind:
            template.add("out", _Op(), behind)
        return template

    def _add_step(
        self, to: DfgBuilder, template: _Template, timed: TimedStep, lane: int, behind: list[int]
    ) -> list[int]:
        """Add the ops of one step behind those of the step before; the ops that it ends with."""
        step = timed.step
        threads = []
        if lane > 0 or self._limit is not None:
            share = self._crowd / len(self._workers) if self._crowd > 0 else 1.0
            slot = template.duration(share * (self._costs["lane_s"] + step.prepare_s))
            cores = to.queue(CORES) if self._crowd > 0 else NONE
            kind = Kind.UNPACK if timed.times is None else Kind.PACK
            for worker in self._workers:
                queue = to.queue(f"r{worker} lane {lane}")
                op = _Op(queue, cores, kind, worker, slot=slot)
                threads.append(template.add(f"lane {lane} of r{worker}", op, behind))
            behind = threads
        template.threads.append(threads)
        if step.prepare_root_s.any():
            queue = to.queue(f"r{timed.root} server")
            slot = template.duration(step.prepare_root_s)
            op = _Op(queue, kind=Kind.SERVER, worker=timed.root, slot=slot)
            behind = [template.add("sum", op, behind)]
        if timed.times is not None:
            behind = [self._add_rounds(to, template, timed, lane, behind)]
        template.ends.append(behind * len(self._workers) if len(behind) == 1 else behind)
        return behind

    def _add_rounds(
        self, to: DfgBuilder, template: _Template, timed: TimedStep, lane: int, behind: list[int]
    ) -> int:
        """Add the rounds of a collective; its last op, which gives the thread back.

        In every round each port sends its share, then the rest of the time passes.
        """
        times, collective = timed.times, timed.step.collective
        assert times is not None and collective is not None
        loaded = [port for port in self._used_ports if times.ports[port] > 0]
        busy = [host for host in self._used_cores if times.cores[host] > 0]
        rounds = min(times.rounds, MAX_ROUNDS)
        if times.rounds == 1 and collective is not Collective.ALL_TO_ALL:
            rounds = STAR_PIECES
        if self._coarse:
            rounds = 1
        lock = NONE
        if self._limit != 1:
            threads = int(self._costs["star_threads" if collective in _STARS else "threads"])
            lock = to.lock(threads, (lane, timed.group, threads))
        # Cores work beyond a message's end: senders drain their sockets, threads fall asleep.
        crowded = float(times.cores.max(initial=0.0))
        within_s = beyond_s = template.durations[0]
        if crowded > 0:
            within_s = np.minimum(times.cpu_s, times.alone_s / crowded)
            beyond_s = times.cpu_s - within_s
        most_s = np.maximum(times.link_s, within_s * crowded)
        rest_s = np.maximum(times.alone_s - most_s, 0.0)  # the product may round up to more
        rest = template.duration(rest_s / rounds)
        sends = [template.duration(times.link_s * times.ports[port] / rounds) for port in loaded]
        copies = [template.duration(within_s * times.cores[host] / rounds) for host in busy]
        template.sizes.append(timed.step.size_bytes / rounds)
        size = len(template.sizes) - 1
        entry = template.add(f"{collective} in", _Op(acquires=lock), behind)
        port_names = [self._ports.name(port) for port in loaded]
        names = (*port_names, *(self._cores_name(host) for host in busy))
        queues = [to.queue(name) for name in names]
        one_round = [
            _Op(queue, self._turns(to, timed, lane, port), Kind.SEND, slot=slot, size_slot=size)
            for queue, port, slot in zip(queues, loaded, sends, strict=False)
        ]
        one_round += [
            _Op(queue, kind=Kind.COPY, slot=slot)
            for queue, slot in zip(queues[len(loaded) :], copies, strict=True)
        ]
        template.ops += [*one_round, _Op(slot=rest)] * rounds
        template.ops[-1] = _Op(slot=rest, releases=lock)
        template.names += _round_names(collective, names, rounds)
        template.edges += [
            (entry + parent, entry + child) for parent, child in _round_edges(len(names), rounds)
        ]
        last = len(template.ops) - 1
        if beyond_s.any():
            for host in busy:
                slot = template.duration(beyond_s * times.cores[host])
                op = _Op(to.queue(self._cores_name(host)), kind=Kind.COPY, slot=slot)
                template.add(f"{collective} beyond", op, [last])
        return last

    def _cores_name(self, host: int) -> str:
        if self._crowd > 0:
            return CORES
        return f"{self._ports.name(host).removesuffix(' out')} cores"

    def _turns(self, to: DfgBuilder, timed: TimedStep, lane: int, port: int) -> int:
        """The channel on which gathers or scatters of both directions of a host take turns.

        Gloo's receiver requests a tensor on the connection that carries tensors the other way, and
        waits behind those. So a host's transfer into a gather waits while the host is the root of
        another gather; for scatters, a transfer to the host waits. This delays the slowest hosts.
        """
        slow = port % self._ports.hosts in self._slow_leaves
        if not slow or port not in self._slowest_ports(timed):
            return NONE
        return to.queue(f"lane {lane} turns of {self._ports.name(port).rpartition(' ')[0]}")

    def _slowest_ports(self, timed: TimedStep) -> list[int]:
        """The slowest ports of a gather or scatter: the root's, or those of other hosts.

        Empty for other steps.
        """
        star = timed.step.collective in _STARS
        if timed.times is None or self._limit == 1 or not star or not self._costs["star_turns"]:
            return []
        slowest: list[int] = np.flatnonzero(timed.times.ports >= 1 - 1e-9).tolist()
        at_root = self._root_port(timed)
        if at_root in slowest:
            return [at_root]
        return [port for port in slowest if port < 2 * self._ports.hosts]

    def _root_port(self, timed: TimedStep) -> int:
        side = IN if timed.step.collective is Collective.GATHER else OUT
        return side * self._ports.hosts + int(self._ports.host_of_rank[timed.root])


def deciding(loads: Sequence[FloatArray], symmetric: bool) -> IntArray:
    """The ports, or hosts with cores, that decide when a step ends, ascending.

    `loads`: the load of each port, one array for each step. Ports without load never decide. If
    `symmetric`, neither does a port that no step loads more than another port: both serve the same
    ops in the same order, so by induction it never finishes later. So one of n equal hosts is left,
    and the slowest one of a ring through unequal hosts; this is exact.
    """
    if not loads:
        return np.zeros(0, dtype=np.int64)
    distinct = np.stack(list({row.tobytes(): row for row in loads}.values()))
    loaded = np.flatnonzero(distinct.any(axis=0))
    if not symmetric or len(loaded) < 2:
        return loaded
    columns = np.ascontiguousarray(distinct[:, loaded].T)
    lowest: dict[bytes, int] = {}  # of equal ports
    for port, column in zip(loaded.tolist(), columns, strict=True):
        lowest.setdefault(column.tobytes(), port)
    left = np.array(sorted(lowest.values()), dtype=np.int64)
    if len(left) > MAX_PORTS_COMPARED:
        return left
    columns = distinct[:, left]
    # below[p, q]: no step loads p more than q
    below: BoolArray = np.all(columns[:, :, None] <= columns[:, None, :], axis=0)
    np.fill_diagonal(below, False)
    return left[~below.any(axis=1)]


@lru_cache(maxsize=1024)
def _round_names(collective: Collective, ports: tuple[str, ...], rounds: int) -> tuple[str, ...]:
    return tuple(
        f"{collective} {number} {name}" for number in range(rounds) for name in (*ports, "wait")
    )


@lru_cache(maxsize=256)
def _round_edges(ports: int, rounds: int) -> tuple[tuple[int, int], ...]:
    """Edges behind op 0: each wait leads to the ports of the next round, these to its wait."""
    edges = []
    for number in range(rounds):
        before = number * (ports + 1)
        wait = before + ports + 1
        for port in range(before + 1, wait):
            edges += [(before, port), (port, wait)]
        if ports == 0:
            edges.append((before, wait))
    return tuple(edges)
