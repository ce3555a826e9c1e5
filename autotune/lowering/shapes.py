"""The ops of the messages of one kind, without times: as arrays that many plans share.

| symbol | meaning |
|---|---|
| L, E | ops and edges of one message |
| R, S | rows of durations, of sizes |
| W | columns of `Surroundings` |
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.dfg.graph import NONE, Discipline, Kind
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.durations import Base, base
from autotune.lowering.flows import PARTS, FlowOps, OwnedStep, add_piece
from autotune.lowering.kept import Kept
from autotune.lowering.messages import Batch, TimedStep
from autotune.lowering.scenes import STARS, Scene, is_ordered, slowest_ports
from autotune.lowering.step_times import Flow, StepTimes
from autotune.lowering.template import Connection, Op, Rounds, Row, Stage, StepOps, Template
from autotune.lowering.traffic import DIRECT, Collective, Ports

CORES = "cores"
"""Queue of the cores that all hosts share."""
MAX_ROUNDS = 16
"""More rounds are joined into this many equal ones. Alone, a message takes the same time;
concurrent messages share the links more coarsely."""
STAR_PIECES = 4
"""Pieces of a gather or scatter, whose transfers share a link evenly with other messages.

A direct exchange is cut into as many unless the plan cuts it finer."""
MOST_CONNECTIONS = 8
"""Connections at the port of a star's root that share it evenly with others."""
Queue = tuple[str, Discipline]
Lock = tuple[int, Hashable]
"""Its capacity and its key."""


@dataclass(frozen=True, eq=False)
class Shape:
    """The ops of a message of one kind.

    `columns` (6, L): queue, channel, kind, worker, and the locks acquired and released. Queues and
    locks are numbers of `queues` and `locks`. `slots` (2, L): rows of durations and sizes; the last
    size is 0. `threads`, `ends`: for each lane, (pieces, W) ops of `Template`; empty without
    threads. `first`: ops that start when the message is issued.
    """

    columns: IntArray
    slots: IntArray
    durations: tuple[Row, ...]
    sizes: tuple[Row, ...]
    edges: IntArray
    first: IntArray
    threads: tuple[IntArray, ...]
    ends: tuple[IntArray, ...]
    connections: dict[Connection, tuple[int, int]]
    names: tuple[str, ...]
    queues: tuple[Queue, ...]
    locks: tuple[Lock, ...]

    @property
    def ops(self) -> int:
        return len(self.names)

    def durations_s(self, batch: Batch) -> FloatArray:
        """The durations of a batch of this shape, (R, K)."""
        bases_s = np.concatenate([timed.bases_s for timed in batch.steps])
        rows, factor, divisor = self._duration_rows
        durations_s: FloatArray = bases_s[rows] * factor / divisor
        return durations_s

    def sizes_bytes(self, batch: Batch) -> FloatArray:
        """The sizes, (S + 1, K); the last row is 0."""
        nothing = np.zeros(len(batch.numbers))
        sizes = [batch.steps[row.base].step.size_bytes / row.divisor for row in self.sizes]
        return np.stack([*sizes, nothing])

    @cached_property
    def _duration_rows(self) -> tuple[IntArray, FloatArray, FloatArray]:
        """Bases (R,), factors and divisors (R, 1)."""
        table = np.array(self.durations)
        return table[:, 0].astype(np.int64), table[:, 1:2], table[:, 2:3]


def shape_of(
    batch: Batch, scene: Scene, ports: Ports, costs: RuntimeCosts, known: Kept[Shape] | None = None
) -> Shape:
    """Build the shape of a batch in a scene.

    `known`: shapes of earlier calls by what decides all but their durations and sizes. About half
    of the kinds in a search differ from an earlier one in durations only.
    """
    builder = _ShapeBuilder(batch, scene, ports, costs)
    like = None if known is None else known.get(builder.key)
    if like is not None:
        return replace(like, durations=builder.durations, sizes=builder.sizes)
    shape = builder.shape()
    if known is not None:
        known.put(builder.key, shape.ops, shape)
    return shape


def to_all_hosts(port: str) -> str:
    """The key of the lock by which messages to all hosts follow each other in a shared port."""
    return f"to all hosts at {port}"


class _ShapeBuilder:
    """Builds the ops of a message of one batch. Queues and locks are numbered by first use.

    `key`: equal for batches whose shapes differ only in `durations` and `sizes`.
    """

    def __init__(self, batch: Batch, scene: Scene, ports: Ports, costs: RuntimeCosts) -> None:
        self._batch = batch
        self._scene = scene
        self._around = scene.around
        self._ports = ports
        self._costs = costs
        self._template = Template()
        self._queues: dict[Queue, int] = {}
        self._locks: dict[Lock, int] = {}
        lanes = list(enumerate(batch.steps))
        self._owned_steps: list[OwnedStep] = []
        self._steps: list[StepOps] = []
        if batch.owned:
            self._owned_steps = [self._owned_step(timed, lane) for lane, timed in lanes]
        else:
            self._steps = [self._step_ops(timed, lane) for lane, timed in lanes]
        self.durations = tuple(self._template.durations)
        self.sizes = tuple(self._template.sizes)

    @property
    def key(self) -> Hashable:
        resources = tuple(self._queues), tuple(self._locks)
        collectives = tuple([timed.step.collective for timed in self._batch.steps])
        how = collectives, tuple(self._unordered_lanes()), self._batch.pieces, len(self.sizes)
        steps = tuple(self._steps), tuple(self._owned_steps)
        return steps, self._around.columns, how, resources

    def shape(self) -> Shape:
        template = self._template
        self._add_ops()
        ops = np.array(template.ops, dtype=np.int64)
        slots = ops[:, -2:].T.copy()
        slots[1] %= len(template.sizes) + 1  # NONE is the last row
        columns = self._around.columns
        threads, ends = (
            tuple(
                np.array([] if free else lane, dtype=np.int64).reshape(-1, columns)
                for lane, free in zip(lanes, self._unordered_lanes(), strict=True)
            )
            for lanes in (template.threads, template.ends)
        )
        return Shape(
            columns=ops[:, :-2].T.copy(),
            slots=slots,
            durations=self.durations,
            sizes=self.sizes,
            edges=np.array(sorted(template.edges), dtype=np.int64).reshape(-1, 2).T.copy(),
            first=np.array(template.first, dtype=np.int64),
            threads=threads,
            ends=ends,
            connections=template.connections,
            names=tuple(template.names),
            queues=tuple(self._queues),
            locks=tuple(self._locks),
        )

    def _unordered_lanes(self) -> list[bool]:
        """Lanes whose threads keep no order: without a limit, connections order stars."""
        unlimited = self._around.limit is None
        return [unlimited and is_ordered(timed, self._costs) for timed in self._batch.steps]

    def _add_ops(self) -> None:
        template, batch = self._template, self._batch
        template.threads = [[] for _ in batch.steps]
        template.ends = [[] for _ in batch.steps]
        last: list[int] = []
        if batch.owned:
            for _ in range(batch.pieces):
                last += add_piece(template, self._owned_steps)
            template.add("out", Op(), last)
            return
        steps = self._steps
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

    def _queue(self, name: str, discipline: Discipline = Discipline.FIFO) -> int:
        return self._queues.setdefault((name, discipline), len(self._queues))

    def _lock(self, capacity: int, key: Hashable) -> int:
        return self._locks.setdefault((capacity, key), len(self._locks))

    def _step_ops(self, timed: TimedStep, lane: int) -> StepOps:
        """The ops of a step of each piece.

        The thread that issues messages prepares them for lane 0, unless lane 0 has its own.
        """
        template, batch, around = self._template, self._batch, self._around
        threads: list[tuple[str, Op]] = []
        later: list[tuple[str, Op]] = []
        wake = None
        if lane > 0 or around.threaded:
            share = around.crowd / len(around.workers) if around.crowd > 0 else 1.0
            slot = behind = template.duration(base(lane, Base.PREPARE), share)
            if batch.pieces > 1 and around.in_flight > 1:  # which keep the thread awake
                behind = template.duration(base(lane, Base.PREPARE_PIECE), share)
            wake = self._wake(lane)
            cores = self._queue(CORES) if around.crowd > 0 else NONE
            kind = int(Kind.UNPACK if timed.times is None else Kind.PACK)
            for worker in around.workers:
                op = Op(self._queue(f"r{worker} lane {lane}"), cores, kind, worker, slot=slot)
                threads.append((f"lane {lane} of r{worker}", op))
                later.append((f"lane {lane} of r{worker}", op._replace(slot=behind)))
        root = None
        if timed.root_computes:
            queue = self._queue(f"r{timed.root} server")
            slot = template.duration(base(lane, Base.PREPARE_ROOT))
            root = Op(queue, kind=int(Kind.SERVER), worker=timed.root, slot=slot)
        rounds = None
        if timed.times is not None:
            rounds = self._rounds(timed, timed.times, lane)
        return StepOps(tuple(threads), tuple(later), wake, root, rounds, around.columns)

    def _wake(self, lane: int) -> Op | None:
        """Return an op that lasts until sleeping threads of the lane are awake; None without one.

        On shared cores those of all ranks delay each other. The op itself occupies no cores, since
        a message behind another one does not need it.
        """
        if self._costs["lane_first_s"] == 0:
            return None
        slot = self._template.duration(base(lane, Base.WAKE), max(self._around.crowd, 1.0))
        return Op(slot=slot)

    def _owned_step(self, timed: TimedStep, lane: int) -> OwnedStep:
        """A step of each piece of an exchange with one owner, which alone sums."""
        collective, owner = timed.step.collective, self._owner
        threads, later = self._threads(collective, lane)
        wake = self._wake(lane)
        if timed.times is None or collective is None:
            return OwnedStep(lane, None, owner, threads, later, wake)
        times, template = timed.times, self._template
        flows = [self._flow(flow, lane) for flow in times.flows]
        busy = [host for host in self._scene.cores if times.cores[host] > 0]
        names = [self._cores_name(host) for host in busy]
        cores = self._core_ops(times, busy, base(lane, Base.WITHIN), 1)
        beyond: tuple[Op, ...] = ()
        if timed.works_beyond:
            beyond = self._core_ops(times, busy, base(lane, Base.BEYOND), 1)
        return OwnedStep(
            lane,
            collective,
            owner,
            threads,
            later,
            wake,
            flows=tuple(flows),
            cores=tuple(zip(names, cores, strict=True)),
            beyond=tuple(zip(names, beyond, strict=False)),
            rest=template.duration(base(lane, Base.REST)),
        )

    @property
    def _owner(self) -> int:
        """The rank from or to which all transfers of the batch go."""
        times = next(timed.times for timed in self._batch.steps if timed.times is not None)
        return int(times.owners[0].argmax())

    def _threads(
        self, collective: Collective | None, lane: int
    ) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """The ops of all ranks' threads, for the first piece and for others."""
        around, template = self._around, self._template
        share = around.crowd / around.columns if around.crowd > 0 else 1.0
        in_flight = self._batch.pieces > 1 and around.in_flight > 1  # which keep threads awake
        cores = self._queue(CORES) if around.crowd > 0 else NONE
        threads: list[Op] = []
        later: list[Op] = []
        for rank in range(around.columns):
            computes = collective is not Collective.PULL or rank == self._owner
            whole, piece = (Base.PASS, Base.PASS_PIECE)
            if computes:
                whole, piece = (Base.PREPARE, Base.PREPARE_PIECE)
            op = Op(
                self._queue(f"r{rank} lane {lane}"),
                cores,
                int(Kind.UNPACK if collective is None else Kind.PACK),
                rank if rank in around.workers else NONE,
                slot=template.duration(base(lane, whole), share),
            )
            threads.append(op)
            if in_flight:
                op = op._replace(slot=template.duration(base(lane, piece), share))
            later.append(op)
        return tuple(threads), tuple(later)

    def _flow(self, flow: Flow, lane: int) -> FlowOps:
        template = self._template
        parts = []
        for part in PARTS:
            template.sizes.append(Row(lane, divisor=1 / part))
            ops = tuple(
                Op(
                    self._queue(self._ports.name(port), self._discipline),
                    kind=int(Kind.SEND),
                    slot=template.duration(base(lane, Base.LINK), share * part),
                    size_slot=len(template.sizes) - 1,
                )
                for port, share in flow.ports
            )
            parts.append(ops)
        names = tuple(self._ports.name(port) for port, _ in flow.ports)
        return FlowOps(flow.source, flow.target, names, tuple(parts))

    @property
    def _discipline(self) -> Discipline:
        """Transfers to different hosts share a link evenly, or messages follow each other."""
        return Discipline.SHARED if self._around.shared else Discipline.FIFO

    def _rounds(self, timed: TimedStep, times: StepTimes, lane: int) -> Rounds:
        """The rounds of a collective for each piece."""
        template, collective = self._template, timed.step.collective
        assert collective is not None
        direct = collective in DIRECT
        ordered = is_ordered(timed, self._costs)
        rounds, stages, owners = self._stages(times, collective)
        if ordered and not times.cores.any():
            rounds = 1
        lock = NONE
        if self._around.queued or (self._around.limit != 1 and not direct):
            threads = int(self._costs["star_threads" if collective in STARS else "threads"])
            lock = self._lock(threads, (lane, timed.group, threads))
        in_each = max(rounds // len(stages), 1)
        count = in_each * len(stages)
        pauses = len(stages) if direct else count
        if collective is Collective.PULL or ordered:
            pauses = 1
        rest = template.duration(base(lane, Base.REST), divisor=pauses)
        template.sizes.append(Row(lane, divisor=count))
        size = len(template.sizes) - 1
        busy = [host for host in self._scene.cores if times.cores[host] > 0]
        cores = self._core_ops(times, busy, base(lane, Base.WITHIN), count)
        beyond: tuple[Op, ...] = ()
        if timed.works_beyond:
            beyond = self._core_ops(times, busy, base(lane, Base.BEYOND), 1)
        core_names = tuple(self._cores_name(host) for host in busy)
        parts = []
        for number, share in enumerate(stages):
            loaded = [port for port in self._scene.ports if share[port] > 0]
            names = tuple(self._ports.name(port) for port in loaded)
            together = 1 if direct or ordered else in_each
            sends = self._sends(timed, share, loaded, together, lane, size)
            if ordered:
                named = self._connections(times, loaded, sends)
                stage = Stage(in_each, cores, core_names, rest, named, (timed.root,))
            elif direct:
                named = tuple(zip(names, sends, strict=True))
                of_stage = tuple(rank for rank in self._scene.owners if owners[number][rank])
                stage = Stage(in_each, cores, core_names, rest, named, of_stage)
            else:
                stage = Stage(in_each, (*sends, *cores), names + core_names, rest)
            parts.append(stage)
        return Rounds(collective, tuple(parts), lock, beyond)

    def _connections(
        self, times: StepTimes, loaded: Sequence[int], sends: Sequence[Op]
    ) -> tuple[tuple[str, Op], ...]:
        """The ops of the connections of a star at each loaded port; `sends`: all of a port."""
        named = []
        for port, op in zip(loaded, sends, strict=True):
            count = min(max(int(times.connections[port]), 1), MOST_CONNECTIONS)
            row = self._template.durations[op.slot]
            slot = self._template.duration(row.base, row.factor, row.divisor * count)
            name = self._ports.name(port)
            names = [f"{name} {number}" for number in range(count)] if count > 1 else [name]
            named += [(each, op._replace(slot=slot)) for each in names]
        return tuple(named)

    def _stages(
        self, times: StepTimes, collective: Collective
    ) -> tuple[int, tuple[FloatArray, ...], tuple[BoolArray, ...]]:
        """(rounds, loads of the ports in each stage, owners in each stage)."""
        rounds = min(times.rounds, MAX_ROUNDS)
        if times.rounds == 1 and collective is not Collective.ALL_TO_ALL:
            rounds = -(-STAR_PIECES // self._batch.pieces)
        if self._scene.coarse:
            rounds = 1
        if rounds < len(times.stages):  # pieces overlap each other
            owners = (np.logical_or.reduce(times.owners),) if times.owners else ()
            return rounds, (times.ports,), owners
        return rounds, times.stages, times.owners

    def _core_ops(
        self, times: StepTimes, busy: Sequence[int], which: int, rounds: int
    ) -> tuple[Op, ...]:
        return tuple(
            Op(
                self._queue(self._cores_name(host)),
                kind=int(Kind.COPY),
                slot=self._template.duration(which, float(times.cores[host]), rounds),
            )
            for host in busy
        )

    def _sends(
        self,
        timed: TimedStep,
        share: FloatArray,
        loaded: Sequence[int],
        rounds: int,
        lane: int,
        size: int,
    ) -> tuple[Op, ...]:
        """The ops of the loaded ports in one round."""
        slowest = slowest_ports(timed, self._around, self._ports, self._costs)
        waiting = [p for p in slowest if p % self._ports.hosts in self._scene.slow_hosts]
        return tuple(
            Op(
                self._queue(self._ports.name(port), self._discipline),
                kind=int(Kind.SEND),
                slot=self._template.duration(base(lane, Base.LINK), float(share[port]), rounds),
                size_slot=size,
                **(self._turns(lane, port) if port in waiting else self._behind(timed, port)),
            )
            for port in loaded
        )

    def _behind(self, timed: TimedStep, port: int) -> dict[str, int]:
        """The lock by which messages to all hosts follow each other in a shared port."""
        if not self._around.shared or timed.step.collective in STARS:
            return {}
        lock = self._lock(1, to_all_hosts(self._ports.name(port)))
        return {"acquires": lock, "releases": lock}

    def _cores_name(self, host: int) -> str:
        if self._around.crowd > 0:
            return CORES
        return f"{self._ports.name(host).removesuffix(' out')} cores"

    def _turns(self, lane: int, port: int) -> dict[str, int]:
        """The channel or lock by which gathers or scatters of both directions of a host take turns.

        Gloo's receiver requests a tensor on the connection that carries tensors the other way, and
        waits behind those. So a host's transfer into a gather waits while the host is the root of
        another gather; for scatters, a transfer to the host waits. This delays the slowest hosts.
        """
        name = f"lane {lane} turns of {self._ports.name(port).rpartition(' ')[0]}"
        if self._around.shared:
            lock = self._lock(1, name)
            return {"acquires": lock, "releases": lock}
        return {"channel": self._queue(name)}
