"""The messages of a graph: their steps as rounds on ports, with the locks and threads they need.

| symbol | meaning |
|---|---|
| M | messages, in issue order |
| K | messages of one kind |
| P, C | ports, hosts with cores |
| W | workers in the graph, 1 if the graph is symmetric |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray, IntArray
from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Discipline, Kind
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.deciding import deciding, distinct
from autotune.lowering.messages import Batch, TimedStep
from autotune.lowering.step_times import StepTimes
from autotune.lowering.template import Connection, Op, Rounds, Stage, StepOps, Template
from autotune.lowering.traffic import DIRECT, IN, OUT, Collective, Ports

CORES = "cores"
"""Queue of the cores that all hosts share."""
MAX_ROUNDS = 16
"""More rounds are joined into this many equal ones. Alone, a message takes the same time;
concurrent messages share the links more coarsely."""
STAR_PIECES = 4
"""Pieces of a gather or scatter, whose transfers share a link evenly with other messages.

A direct exchange is cut into as many unless the plan cuts it finer."""
UNLIMITED = 2**30
"""Messages in flight on a lane where the library decides."""
_STARS = (Collective.GATHER, Collective.SCATTER)


@dataclass(frozen=True, eq=False)
class MessageOps:
    """`starts`, `ends` (M,): the first op and the Out op of every message.

    A message whose results wait for norms has two ranges of ops: from `starts` to `sums`, and from
    `results` to `ends`. Otherwise `sums` and `ends`, and `starts` and `results`, are equal.
    """

    starts: IntArray
    sums: IntArray
    results: IntArray
    ends: IntArray

    @staticmethod
    def whole(starts: IntArray, ends: IntArray) -> MessageOps:
        """Messages of one range each."""
        return MessageOps(starts, ends, starts, ends)

    def followed_by(self, results: MessageOps, sent: IntArray) -> MessageOps:
        """These messages, with the second ranges of those numbered `sent`, in this order."""
        starts, ends = self.starts.copy(), self.ends.copy()
        starts[sent], ends[sent] = results.starts, results.ends
        return MessageOps(self.starts, self.sums, starts, ends)

    @property
    def ranges(self) -> tuple[tuple[IntArray, IntArray], ...]:
        """The first and last ops of both ranges, which may be equal."""
        return (self.starts, self.sums), (self.results, self.ends)

    def of_op(self, ops: int) -> IntArray:
        """The message of each of a graph's `ops`, NONE for other ops; shape (N,)."""
        message: IntArray = np.full(ops, NONE, dtype=np.int64)
        for firsts, lasts in self.ranges:
            for number, (first, last) in enumerate(
                zip(firsts.tolist(), lasts.tolist(), strict=True)
            ):
                message[first : last + 1] = number
        return message


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
        in_flight: int,
        layer: IntArray,
        coarse: bool,
        shared: bool,
        crowd: float = 0.0,
    ) -> None:
        """`limit`: messages in flight on a lane (`Plan.limit`). `in_flight`: pieces of direct
        exchanges in flight in each of their rounds. `layer` (M,): layers of the ops.

        `symmetric`: only the ports that decide are in the graph. `coarse`: a message without
        competitors is one round. `shared`: the plan has direct exchanges. `crowd`: ranks per core
        of the machine that they share; 0 if every rank has cores enough. With shared cores, other
        work delays a message round by round.
        """
        timed_steps = [timed for batch in batches for timed in batch.steps]
        times = [timed.times for timed in timed_steps if timed.times is not None]
        self._batches = batches
        self._ports = ports
        self._costs = costs
        # The busiest device of a host may differ between stages, which then exceed their whole.
        loads = [ports for step in times for ports in (*step.stages, step.ports)]
        self._used_ports = deciding(loads, symmetric).tolist()
        self._used_cores = deciding([step.cores for step in times], symmetric).tolist()
        self._workers = workers
        self._limit = limit
        self._in_flight = in_flight
        self._layer = layer
        self._shared = shared
        self._owners = distinct([mask for step in times for mask in step.owners])
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
        columns = np.empty((len(Op._fields) - 2, total), dtype=np.int64)
        layer = np.empty(total, dtype=np.int64)
        duration_s, size_bytes = np.zeros(total), np.zeros(total)
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
            names.update(dict.fromkeys(numbers.tolist(), template.names))
        self._chain(to, templates, base)
        self._connect(to, templates, base)

        def name(number: int) -> str:
            message = int(np.searchsorted(offsets, number, side="right")) - 1
            return f"message {message} {names[message][number - int(offsets[message])]}"

        to.block(
            total,
            name,
            duration_s=duration_s,
            size_bytes=size_bytes,
            layer=layer,
            **dict(zip(Op._fields, columns, strict=False)),
        )
        return MessageOps.whole(base, base + lengths - 1)

    def _chain(self, to: DfgBuilder, templates: Sequence[Template], base: IntArray) -> None:
        """Each lane's thread takes the pieces of all messages in plan order.

        It takes one when that `limit` places before it has ended on the lane. Direct exchanges have
        a limit of their own.
        """
        for lane in range(max(len(template.threads) for template in templates)):
            numbers: list[IntArray] = []
            taken: list[IntArray] = []
            ends: list[IntArray] = []
            limits: list[IntArray] = []
            for batch, template in zip(self._batches, templates, strict=True):
                if lane >= len(template.threads) or not template.threads[lane][0]:
                    continue
                start = base[batch.numbers][:, None, None]
                places = np.repeat(batch.numbers, len(template.threads[lane]))
                limit = self._in_flight if batch.direct else self._limit
                numbers.append(places)
                limits.append(np.full(len(places), limit or UNLIMITED))
                for table, ops in ((taken, template.threads[lane]), (ends, template.ends[lane])):
                    table.append((start + np.array(ops)).reshape(-1, len(self._workers)))
            if not numbers:
                continue
            order = np.argsort(np.concatenate(numbers), kind="stable")
            first, last = np.concatenate(taken)[order], np.concatenate(ends)[order]
            most = np.concatenate(limits)[order]
            if (most != 1).any():
                to.edges(first[:-1], first[1:])
            limited = np.flatnonzero(most < UNLIMITED)
            behind = np.arange(len(limited)) - most[limited]
            waits = behind >= 0
            to.edges(last[limited[behind[waits]]], first[limited[waits]])

    def _connect(self, to: DfgBuilder, templates: Sequence[Template], base: IntArray) -> None:
        """Each connection carries the tensors of all messages in plan order."""
        users: dict[Connection, list[tuple[int, int, int]]] = {}  # (batch, first op, last op)
        for number, template in enumerate(templates):
            for connection, ends in template.connections.items():
                users.setdefault(connection, []).append((number, *ends))
        for batches in {tuple(each) for each in users.values()}:
            numbers = np.concatenate([self._batches[batch].numbers for batch, _, _ in batches])
            first, last = (
                np.concatenate([base[self._batches[use[0]].numbers] + use[side] for use in batches])
                for side in (1, 2)
            )
            order = np.argsort(numbers)
            to.edges(last[order[:-1]], first[order[1:]])

    def _template(self, to: DfgBuilder, batch: Batch) -> Template:
        template = Template([np.zeros(len(batch.numbers))])
        steps = [
            self._step_ops(to, template, timed, lane, batch)
            for lane, timed in enumerate(batch.steps)
        ]
        template.threads = [[] for _ in steps]
        template.ends = [[] for _ in steps]
        last: list[int] = []
        for _ in range(batch.pieces):
            behind: list[int] = []
            before: Collective | None = None
            for lane, step in enumerate(steps):
                collective = batch.steps[lane].step.collective
                pulls = (before, collective) == DIRECT
                behind = step.add(template, lane, behind, behind if pulls else [])
                before = collective
            last += behind
        if len(last) > 1 or len(template.ops) - 1 not in last:
            template.add("out", Op(), last)
        return template

    def _step_ops(
        self, to: DfgBuilder, template: Template, timed: TimedStep, lane: int, batch: Batch
    ) -> StepOps:
        """The ops of a step of each piece.

        The thread that issues messages prepares them for lane 0, unless there is a limit.
        """
        step = timed.step
        threads: list[tuple[str, Op]] = []
        later: list[tuple[str, Op]] = []
        if lane > 0 or self._limit is not None or batch.direct:
            share = self._crowd / len(self._workers) if self._crowd > 0 else 1.0
            slot = behind = template.duration(share * (self._costs["lane_s"] + step.prepare_s))
            if batch.pieces > 1 and self._in_flight > 1:  # which keep the thread awake
                behind = template.duration(share * (self._costs["piece_s"] + step.prepare_s))
            cores = to.queue(CORES) if self._crowd > 0 else NONE
            kind = Kind.UNPACK if timed.times is None else Kind.PACK
            for worker in self._workers:
                op = Op(to.queue(f"r{worker} lane {lane}"), cores, kind, worker, slot=slot)
                threads.append((f"lane {lane} of r{worker}", op))
                later.append((f"lane {lane} of r{worker}", op._replace(slot=behind)))
        root = None
        if step.prepare_root_s.any():
            queue = to.queue(f"r{timed.root} server")
            slot = template.duration(step.prepare_root_s)
            root = Op(queue, kind=Kind.SERVER, worker=timed.root, slot=slot)
        rounds = None
        if timed.times is not None:
            rounds = self._rounds(to, template, timed, timed.times, lane, batch)
        return StepOps(tuple(threads), tuple(later), root, rounds, len(self._workers))

    def _rounds(
        self,
        to: DfgBuilder,
        template: Template,
        timed: TimedStep,
        times: StepTimes,
        lane: int,
        batch: Batch,
    ) -> Rounds:
        """The rounds of a collective for each piece."""
        collective = timed.step.collective
        assert collective is not None
        direct = collective in DIRECT
        rounds = min(times.rounds, MAX_ROUNDS)
        if times.rounds == 1 and collective is not Collective.ALL_TO_ALL:
            rounds = -(-STAR_PIECES // batch.pieces)
        if self._coarse:
            rounds = 1
        lock = NONE
        if self._limit != 1 and not direct:
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
        stages, owners = times.stages, times.owners
        if rounds < len(stages):  # pieces overlap each other
            stages, owners = (times.ports,), (np.logical_or.reduce(owners),)
        busy = [host for host in self._used_cores if times.cores[host] > 0]
        in_each = max(rounds // len(stages), 1)
        count = in_each * len(stages)
        ordered = collective in _STARS and bool(self._costs["star_order"])
        pauses = len(stages) if direct else count
        if collective is Collective.PULL or ordered:
            pauses = 1
        rest = template.duration(rest_s / pauses)
        template.sizes.append(timed.step.size_bytes / count)
        size = len(template.sizes) - 1
        cores = [
            Op(
                to.queue(self._cores_name(host)),
                kind=Kind.COPY,
                slot=template.duration(within_s * times.cores[host] / count),
            )
            for host in busy
        ]
        beyond = [
            Op(
                to.queue(self._cores_name(host)),
                kind=Kind.COPY,
                slot=template.duration(beyond_s * times.cores[host]),
            )
            for host in (busy if beyond_s.any() else ())
        ]
        core_names = tuple(self._cores_name(host) for host in busy)
        parts = []
        for number, share in enumerate(stages):
            loaded = [port for port in self._used_ports if share[port] > 0]
            names = tuple(self._ports.name(port) for port in loaded)
            together = 1 if direct else in_each
            ports = tuple(
                Op(
                    self._port(to, port),
                    kind=Kind.SEND,
                    slot=template.duration(times.link_s * share[port] / together),
                    size_slot=size,
                    **self._turns(to, timed, lane, port),
                )
                for port in loaded
            )
            if direct:
                sends = tuple(zip(names, ports, strict=True))
                of_stage = self._representatives(owners[number])
                stage = Stage(in_each, tuple(cores), core_names, rest, sends, of_stage)
            else:
                stage = Stage(in_each, (*ports, *cores), names + core_names, rest)
            parts.append(stage)
        root = timed.root if ordered else NONE
        return Rounds(collective, tuple(parts), lock, tuple(beyond), root)

    def _port(self, to: DfgBuilder, port: int) -> int:
        """Its queue. Connections share a link evenly.

        Without direct exchanges, the rounds of different messages take turns.
        """
        discipline = Discipline.SHARED if self._shared else Discipline.FIFO
        return to.queue(self._ports.name(port), discipline)

    def _representatives(self, owners: BoolArray) -> tuple[int, ...]:
        ranks: list[int] = self._owners[owners[self._owners]].tolist()
        return tuple(ranks)

    def _cores_name(self, host: int) -> str:
        if self._crowd > 0:
            return CORES
        return f"{self._ports.name(host).removesuffix(' out')} cores"

    def _turns(self, to: DfgBuilder, timed: TimedStep, lane: int, port: int) -> dict[str, int]:
        """The channel or lock by which gathers or scatters of both directions of a host take turns.

        Gloo's receiver requests a tensor on the connection that carries tensors the other way, and
        waits behind those. So a host's transfer into a gather waits while the host is the root of
        another gather; for scatters, a transfer to the host waits. This delays the slowest hosts.
        """
        slow = port % self._ports.hosts in self._slow_leaves
        if not slow or port not in self._slowest_ports(timed):
            return {}
        name = f"lane {lane} turns of {self._ports.name(port).rpartition(' ')[0]}"
        if self._shared:
            lock = to.lock(key=name)
            return {"acquires": lock, "releases": lock}
        return {"channel": to.queue(name)}

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
