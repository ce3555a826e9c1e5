"""The network's side of a graph: every message's steps as rounds on the ports, with the locks and threads that they need.

| symbol | meaning |
|---|---|
| M | messages, in issue order |
| K | messages of one kind |
| L | ops of one message of a kind |
| W | workers that are written down, 1 where all are alike |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Kind
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.messages import Batch, SendStep, kept_cores, kept_ports
from autotune.lowering.traffic import IN, OUT, Collective, Ports

CORES = "cores"
"""The queue of the one machine's cores, where all hosts share them."""
MOST_ROUNDS = 16
"""Rounds beyond are joined into as many equal ones. Alone a message takes the same; side by side the links are shared more coarsely."""
STAR_PIECES = 4
"""Into so many a gather or scatter is cut, since its transfers share a link evenly with those of other messages."""


_COPIED = ("queue", "channel", "kind", "worker", "acquires", "releases")


@dataclass
class _Template:
    """Ops of one message; `slot` says which row of the durations each takes."""

    queue: list[int] = field(default_factory=list)
    channel: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    size_slot: list[int] = field(default_factory=list)
    worker: list[int] = field(default_factory=list)
    acquires: list[int] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    durations: list[FloatArray] = field(default_factory=list)
    sizes: list[FloatArray] = field(default_factory=list)
    prepared: list[list[int]] = field(
        default_factory=list
    )  # of each step, the ops of its lane's thread, by worker
    done: list[list[int]] = field(
        default_factory=list
    )  # of each step, what its lane has behind it, by worker
    first: list[int] = field(default_factory=list)  # ops that start with the message's issue

    def add(
        self,
        name: str,
        queue: int,
        kind: Kind,
        slot: int,
        after: Sequence[int],
        worker: int = NONE,
        acquires: int = NONE,
        releases: int = NONE,
        size_slot: int = NONE,
        channel: int = NONE,
    ) -> int:
        number = len(self.queue)
        self.names.append(name)
        self.queue.append(queue)
        self.channel.append(channel)
        self.kind.append(kind)
        self.slot.append(slot)
        self.size_slot.append(size_slot)
        self.worker.append(worker)
        self.acquires.append(acquires)
        self.releases.append(releases)
        self.edges.extend((parent, number) for parent in after)
        if not after:
            self.first.append(number)
        return number

    def duration(self, values: FloatArray) -> int:
        self.durations.append(values)
        return len(self.durations) - 1

    def size(self, values: FloatArray) -> int:
        self.sizes.append(values)
        return len(self.sizes) - 1


@dataclass(frozen=True, eq=False)
class Sent:
    """`starts`, `ends` (M,): the first op of every message and its Out op; those between are its own."""

    starts: IntArray
    ends: IntArray


class Network:
    """Writes the messages of one plan into an emitter, any number of times."""

    def __init__(
        self,
        batches: Sequence[Batch],
        fold: bool,
        ports: Ports,
        costs: RuntimeCosts,
        workers: Sequence[int],
        limit: int | None,
        layer: IntArray,
        coarse: bool,
        crowd: float = 0.0,
    ) -> None:
        """`limit`: messages that a lane has under way at once (`Plan.limit`). `fold`: only the ports that decide are written down.

        `coarse`: messages that have the network to themselves are one round, but for ranks that share cores, on which other work holds
        up a message round by round.

        `crowd`: ranks per core of the one machine that they share; 0 where each has cores enough.
        """
        self._batches, self._link, self._costs = batches, ports, costs
        self._ports, self._cores = kept_ports(batches, fold), kept_cores(batches, fold)
        self._workers, self._limit, self._layer = workers, limit, layer
        alone = limit == 1 and all(len(batch.steps) == 1 for batch in batches)
        self._coarse, self._crowd = coarse and alone and crowd == 0, crowd
        self._messages = sum(len(batch.numbers) for batch in batches)
        steps = [step for batch in batches for step in batch.steps]
        # Hosts that hold up others' gathers or scatters: elsewhere nobody would wait for a turn.
        self._slow_leaves = {
            port % ports.hosts
            for step in steps
            for port in self._deciding(step)
            if port != self._root_port(step)
        }

    def emit(self, to: DfgBuilder, issued: IntArray) -> Sent:
        """One step's messages; `issued` (W, M): the ops that issue them."""
        made = [self._template(to, batch) for batch in self._batches]
        lengths = np.zeros(self._messages, dtype=np.int64)
        for batch, template in zip(self._batches, made, strict=True):
            lengths[batch.numbers] = len(template.queue)
        base = to.ops + np.cumsum(lengths) - lengths
        total = int(lengths.sum())
        columns = {name: np.full(total, NONE, dtype=np.int64) for name in (*_COPIED, "layer")}
        duration_s, size_bytes = np.zeros(total), np.zeros(total)
        names: dict[int, list[str]] = {}
        lanes = max(len(template.prepared) for template in made)
        prepared = np.full((lanes, len(self._workers), self._messages), -1, dtype=np.int64)
        done = prepared.copy()
        ends = np.zeros(self._messages, dtype=np.int64)
        for batch, template in zip(self._batches, made, strict=True):
            start, count = base[batch.numbers], len(template.queue)
            at = (start - to.ops)[:, None] + np.arange(count)
            for name in _COPIED:
                columns[name][at] = np.array(getattr(template, name))
            columns["layer"][at] = self._layer[batch.numbers][:, None]
            duration_s[at] = np.stack(template.durations)[template.slot].T
            sized = np.array([*template.sizes, np.zeros(len(start))])
            size_bytes[at] = sized[np.array(template.size_slot)].T
            edges = np.array(template.edges, dtype=np.int64).reshape(-1, 2)
            to.edges(start[:, None] + edges[:, 0], start[:, None] + edges[:, 1])
            for op in template.first:
                to.edges(
                    issued[:, batch.numbers], np.broadcast_to(start + op, (len(issued), len(start)))
                )
            for table, ops in ((prepared, template.prepared), (done, template.done)):
                for lane, of_workers in enumerate(ops):
                    for worker, op in enumerate(of_workers):
                        table[lane, worker, batch.numbers] = start + op
            ends[batch.numbers] = start + count - 1
            names.update(dict.fromkeys(batch.numbers.tolist(), template.names))
        self._chain(to, prepared, done)
        offsets = base - to.ops

        def named(number: int) -> str:
            message = int(np.searchsorted(offsets, number, side="right")) - 1
            return f"message {message} {names[message][number - int(offsets[message])]}"

        to.block(total, named, duration_s=duration_s, size_bytes=size_bytes, **columns)
        return Sent(base, ends)

    def _cores_name(self, host: int) -> str:
        return CORES if self._crowd > 0 else f"{self._link.name(host).removesuffix(' out')} cores"

    def _chain(self, to: DfgBuilder, prepared: IntArray, done: IntArray) -> None:
        """Each lane's thread takes the messages in plan order, the next one when its step of the one `limit` places before is done."""
        for lane, lane_ends in zip(prepared, done, strict=True):
            for taken, ends in zip(lane, lane_ends, strict=True):
                there = np.flatnonzero(taken >= 0)
                if self._limit != 1:
                    to.edges(taken[there[:-1]], taken[there[1:]])
                if self._limit is not None:
                    to.edges(ends[there[: -self._limit]], taken[there[self._limit :]])

    def _template(self, to: DfgBuilder, batch: Batch) -> _Template:
        made = _Template()
        none = np.zeros(len(batch.numbers))
        empty = made.duration(none)
        behind: list[int] = []
        for lane, own in enumerate(batch.steps):
            behind = self._step(to, made, own, lane, behind, empty)
        if len(behind) > 1 or len(made.queue) - 1 not in behind:
            made.add("out", NONE, Kind.VIRTUAL, empty, behind)
        return made

    def _step(
        self,
        to: DfgBuilder,
        made: _Template,
        own: SendStep,
        lane: int,
        behind: list[int],
        empty: int,
    ) -> list[int]:
        """The ops of one step behind those of the step before; those that the next one waits for."""
        threads = []
        if lane > 0 or self._limit is not None:
            share = self._crowd / len(self._workers) if self._crowd > 0 else 1.0
            slot = made.duration(share * (self._costs["lane_s"] + own.prepare_s))
            cores = to.queue(CORES) if self._crowd > 0 else NONE
            thread = f"lane {lane}"
            kind = Kind.UNPACK if own.times is None else Kind.PACK
            for worker in self._workers:
                queue = to.queue(f"r{worker} {thread}")
                threads.append(
                    made.add(
                        f"{thread} of r{worker}",
                        queue,
                        kind,
                        slot,
                        behind,
                        worker=worker,
                        channel=cores,
                    )
                )
            behind = threads
        made.prepared.append(threads)
        if own.prepare_root_s.any():
            queue = to.queue(f"r{own.root} server")
            behind = [
                made.add(
                    "sum",
                    queue,
                    Kind.SERVER,
                    made.duration(own.prepare_root_s),
                    behind,
                    worker=own.root,
                )
            ]
        if own.times is not None:
            behind = [self._rounds(to, made, own, lane, behind, empty)]
        made.done.append(behind * len(self._workers) if len(behind) == 1 else behind)
        return behind

    def _rounds(
        self,
        to: DfgBuilder,
        made: _Template,
        own: SendStep,
        lane: int,
        behind: list[int],
        empty: int,
    ) -> int:
        """In every round each port sends its share, then the rest of the time passes; the last op gives the thread back."""
        times, none = own.times, np.zeros(len(own.size_bytes))
        assert times is not None and own.step.collective is not None
        collective = own.step.collective
        loaded = [int(port) for port in self._ports if times.ports[port] > 0]
        rounds = (
            STAR_PIECES
            if times.rounds == 1 and collective is not Collective.ALL_TO_ALL
            else min(times.rounds, MOST_ROUNDS)
        )
        rounds = 1 if self._coarse else rounds
        lock = (
            NONE
            if self._limit == 1
            else to.lock(int(self._costs["threads"]), (lane, own.circle_key))
        )
        busy = [int(host) for host in self._cores if times.cores[host] > 0]
        # Cores are at work beyond a message's end: senders still move what their sockets hold, threads go back to sleep.
        crowded = float(times.cores.max(initial=0.0))
        within_s = np.minimum(times.cpu_s, times.alone_s / crowded) if crowded > 0 else none
        beyond_s = times.cpu_s - within_s if crowded > 0 else none
        most_s = np.maximum(times.link_s, within_s * crowded)
        waits = made.duration(
            np.maximum(times.alone_s - most_s, 0.0) / rounds
        )  # the product may round up to more
        sends = {
            self._link.name(port): (
                Kind.SEND,
                made.duration(times.link_s * times.ports[port] / rounds),
            )
            for port in loaded
        }
        sends |= {
            self._cores_name(host): (
                Kind.COPY,
                made.duration(within_s * times.cores[host] / rounds),
            )
            for host in busy
        }
        size = made.size(own.size_bytes / rounds)
        entry = made.add(f"{collective} in", NONE, Kind.VIRTUAL, empty, behind, acquires=lock)
        names = tuple(sends)
        made.queue += [*map(to.queue, names), NONE] * rounds
        turns = self._turns(own)
        hosts = {port: self._link.name(port).rpartition(" ")[0] for port in turns}
        channels = [
            to.queue(f"lane {lane} turns of {hosts[port]}") if port in turns else NONE
            for port in loaded
        ]
        made.channel += [*channels, *[NONE] * (len(names) - len(loaded) + 1)] * rounds
        made.kind += [*(kind for kind, _ in sends.values()), Kind.VIRTUAL] * rounds
        made.slot += [*(slot for _, slot in sends.values()), waits] * rounds
        made.size_slot += [
            *(size if kind is Kind.SEND else NONE for kind, _ in sends.values()),
            NONE,
        ] * rounds
        made.worker += [NONE] * (len(names) + 1) * rounds
        made.acquires += [NONE] * (len(names) + 1) * rounds
        made.releases += [NONE] * ((len(names) + 1) * rounds - 1) + [lock]
        made.names += _round_names(collective, names, rounds)
        made.edges += [
            (entry + parent, entry + child) for parent, child in _round_edges(len(names), rounds)
        ]
        last = len(made.queue) - 1
        if beyond_s.any():
            for host in busy:
                slot = made.duration(beyond_s * times.cores[host])
                made.add(
                    f"{collective} beyond",
                    to.queue(self._cores_name(host)),
                    Kind.COPY,
                    slot,
                    [last],
                )
        return last

    def _turns(self, own: SendStep) -> set[int]:
        """Ports on which a gather or scatter takes turns with those of the same lane that its host's other direction carries.

        Gloo's receiver asks its sender for a tensor, on the connection that carries tensors the other way, and so behind those. So what a
        host sends into a gather waits while it is the root of another one; of scatters, what it receives. It is felt where that is slowest.
        """
        ports = self._deciding(own)
        hosts = self._link.hosts
        return {port for port in ports if port % hosts in self._slow_leaves}

    def _deciding(self, own: SendStep) -> list[int]:
        """The root's port where that is the slowest of a gather or scatter, else those of other hosts that are; none of other steps."""
        times = own.times
        if (
            times is None
            or self._limit == 1
            or own.step.collective not in (Collective.GATHER, Collective.SCATTER)
        ):
            return []
        at_root = self._root_port(own)
        slowest = np.flatnonzero(times.ports >= 1 - 1e-9).tolist()
        return (
            [at_root]
            if at_root in slowest
            else [port for port in slowest if port < 2 * self._link.hosts]
        )

    def _root_port(self, own: SendStep) -> int:
        side = IN if own.step.collective is Collective.GATHER else OUT
        return side * self._link.hosts + int(self._link.host_of_rank[own.root])


@lru_cache(maxsize=1024)
def _round_names(collective: Collective, ports: tuple[str, ...], rounds: int) -> tuple[str, ...]:
    return tuple(
        f"{collective} {number} {name}" for number in range(rounds) for name in (*ports, "wait")
    )


@lru_cache(maxsize=256)
def _round_edges(ports: int, rounds: int) -> tuple[tuple[int, int], ...]:
    """Of the ops behind op 0: in each round the ports' behind the wait of the round before, and the wait behind them."""
    edges = []
    for number in range(rounds):
        before, first = number * (ports + 1), number * (ports + 1) + 1
        edges += [(before, first + port) for port in range(ports)] + [
            (first + port, first + ports) for port in range(ports)
        ]
        if ports == 0:
            edges.append((before, first))
    return tuple(edges)
