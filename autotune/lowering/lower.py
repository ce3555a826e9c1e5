"""Lower a plan to the data-flow graph that the runtime would execute (dPRO, sec. 4.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autotune.arrays import FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from autotune.lowering.compute import BufferBroadcast, Worker
from autotune.lowering.contention import contended
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.device_costs import costs_of
from autotune.lowering.halves import NORM_BYTES, Halves
from autotune.lowering.host_costs import HostCosts
from autotune.lowering.joined import ShapeCache
from autotune.lowering.message_cpu import message_cpu_s
from autotune.lowering.messages import Batch, MessageTimer, SliceTable
from autotune.lowering.network import MessageOps, Network
from autotune.lowering.pass_times import PassTimes
from autotune.lowering.scenes import Surroundings
from autotune.lowering.shapes import CORES
from autotune.lowering.step_times import Timing
from autotune.lowering.steps import Step
from autotune.lowering.traffic import Collective, Ports
from autotune.strategy_space.backend import sent_by_torch
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.strategy import CASTS
from autotune.workload import Workload


class Lowering:
    """Lowers many plans of one workload on one cluster, and keeps what the plans share.

    `taken_share`: share of the CPU time of sending that is taken from computation
    (`features.compute_cost.taken_share`). If all hosts are on one machine
    (`Cluster.machine_cores`), messages, packing and compression wait for its cores.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        costs: RuntimeCosts | None = None,
        taken_share: float = 0.0,
        like: Lowering | None = None,
    ) -> None:
        """`like`: a lowering whose messages have the same times and ops, see `retimed`."""
        self.workload = workload
        self.cluster = cluster
        self.costs = costs or costs_of(workload.device, workload.device_name)
        self.taken_share = taken_share
        self.ports: Ports = Ports(cluster) if like is None else like.ports
        self.messages: MessageTimer
        self.shapes: ShapeCache
        if like is None:
            timing = Timing(cluster, self.ports, self.costs)
            self.messages = MessageTimer(timing, self.costs, workload)
            self.shapes = ShapeCache(self.ports, self.costs)
        else:
            timing = like.messages.timing
            self.messages, self.shapes = like.messages, like.shapes
        self.times = PassTimes.of(workload)
        self.broadcast = _broadcast(workload, timing)
        self.norm_exchange_s = _norm_exchange_s(workload, timing)
        # Ranks per core of the shared machine; while each rank has a core, none waits for one.
        crowd = cluster.world_size / cluster.machine_cores if cluster.machine_cores > 0 else 0.0
        self.crowd = crowd if crowd >= 1 else 0.0

    def retimed(self, workload: Workload) -> Lowering:
        """Lower plans of the same variables with other times, such as those of fused kernels.

        Both lowerings share the times and ops of messages, and so what they keep of them.
        """
        costs = self.costs
        same = _message_sizes_key(workload) == _message_sizes_key(self.workload)
        return Lowering(workload, self.cluster, costs, self.taken_share, self if same else None)

    def graph(self, plan: Plan, steps: int = 2, symmetric: bool = True) -> Dfg:
        """`steps` training steps, from the first forward pass to the last update.

        `symmetric`: one of the equal workers and the ports that decide are in the graph; otherwise
        all are. Raises `InvalidInput` below one step, or for a plan of another model or world size.
        """
        return self.graph_with_messages(plan, steps, symmetric)[0]

    def graph_with_messages(
        self, plan: Plan, steps: int, symmetric: bool = True
    ) -> tuple[Dfg, list[MessageOps]]:
        """`graph`, and the ops of each message in every step."""
        if steps < 1:
            raise InvalidInput(f"a graph needs at least 1 step, but {steps} are asked for")
        graph = _PlanGraph(self, plan, symmetric, coarse=False)
        graph.add_steps(steps)
        return self._contended(graph), graph.message_ops

    def period(self, plan: Plan, symmetric: bool = True) -> Dfg:
        """From the start of a backward pass to the next one; its makespan is the steady step time.

        No message is in flight at its ends: the runtime waits for all messages before it fills
        their buffers again. Raises `InvalidInput` as `graph` does.
        """
        return self.period_with_messages(plan, symmetric)[0]

    def period_with_messages(self, plan: Plan, symmetric: bool = True) -> tuple[Dfg, MessageOps]:
        """`period`, and the ops of each message."""
        graph = _PlanGraph(self, plan, symmetric, coarse=True)
        graph.add_period(NONE, last=False)
        return self._contended(graph), graph.message_ops[0]

    def _contended(self, graph: _PlanGraph) -> Dfg:
        return contended(graph.build(), graph.message_ops, self.costs["contention"])

    def norms_s(self, batches: Sequence[Batch], plan: Plan) -> float:
        """From complete sums to known norms: a pass over what a rank owns, and an exchange."""
        passed_bytes = self.messages.most_owned_bytes(batches, plan)
        costs = self.costs
        woken_s = costs["lane_s"] + costs["lane_first_s"]
        return woken_s + costs["pack_s_per_byte"] * passed_bytes + self.norm_exchange_s

    def step_s(self, plan: Plan) -> float:
        """Predicted seconds per step in the steady state."""
        return replay(self.period(plan)).makespan_s

    def message_graph(
        self,
        messages: Sequence[Message],
        ring_order: tuple[int, ...] | None = None,
        limit: int | None = None,
        in_flight: int = 1,
    ) -> Dfg:
        """These messages alone, packed at time 0, until the last arrives.

        `limit` and `in_flight` as in `Plan`.
        """
        batches = self.messages.batches(messages, ring_order)
        to, count = DfgBuilder(), len(messages)
        around = Surroundings.of(
            batches,
            self.costs,
            symmetric=True,
            workers=(0,),
            ranks=self.cluster.world_size,
            hosts=len(self.cluster.hosts),
            limit=limit,
            in_flight=in_flight,
            coarse=True,
            crowd=self.crowd,
        )
        issue_s = self.costs["issue_s"] + _prepared_s(batches, count, around)
        host = to.queue("r0 host")
        first = to.block(
            count,
            lambda number: f"issue {number}",
            duration_s=issue_s,
            queue=host,
            kind=Kind.PACK,
            worker=0,
        )
        issued = first + np.arange(count)
        to.edges(issued[:-1], issued[1:])
        network = Network(batches, self.shapes, around, np.zeros(count, dtype=np.int64))
        network.emit(to, issued[None, :])
        return to.build(("message",))


def _prepared_s(batches: Sequence[Batch], messages: int, around: Surroundings) -> FloatArray:
    """Seconds of the issuing thread before the first step of each message, (M,).

    0 if lane 0 has a thread, which prepares them.
    """
    prepared_s = np.zeros(messages)
    if not around.threaded:
        for batch in batches:
            prepared_s[batch.numbers] = batch.pieces * batch.steps[0].step.prepare_s
    return prepared_s


def _message_sizes_key(workload: Workload) -> list[tuple[object, ...]]:
    """Return the properties of the variables that determine the sizes of messages."""
    return [
        (each.name, each.shape, each.dtype, each.sparse, each.touched_share)
        for each in workload.variables
    ]


def _broadcast(workload: Workload, timing: Timing) -> BufferBroadcast:
    """The broadcast of the module's buffers by DDP before a forward pass; its ports are unknown."""
    if not workload.buffer_bytes:
        return BufferBroadcast(0.0)
    size_bytes = np.array(workload.buffer_bytes, dtype=np.float64)
    nothing = np.zeros(len(size_bytes))
    step = Step(Collective.BROADCAST, size_bytes, prepare_s=nothing, prepare_root_s=nothing)
    world = tuple(range(timing.cluster.world_size))
    times = timing.of(step, (world,))
    alone_s, link_s = float(times.alone_s.sum()), float(times.link_s.sum())
    return BufferBroadcast(alone_s, times.rounds, min(link_s, alone_s) / times.rounds)


def _norm_exchange_s(workload: Workload, timing: Timing) -> float:
    """The exchange of all norms."""
    ranks = timing.cluster.world_size
    size_bytes = np.array([NORM_BYTES * len(workload.variables)])
    nothing = np.zeros(1)
    step = Step(Collective.ALL_REDUCE, size_bytes, prepare_s=nothing, prepare_root_s=nothing)
    return float(timing.of(step, (tuple(range(ranks)),)).alone_s[0])


class _PlanGraph:
    """The graph of one plan. `message_ops`: those of each period."""

    def __init__(self, lowering: Lowering, plan: Plan, symmetric: bool, coarse: bool) -> None:
        cluster = lowering.cluster
        if plan.world_size != cluster.world_size:
            raise InvalidInput(
                "a plan is lowered on its own cluster: "
                f"it is for {plan.world_size} ranks, but cluster {cluster.name!r} has "
                f"{cluster.world_size}; plan the strategy for this cluster"
            )
        self.plan = plan
        self.to = DfgBuilder()
        self.message_ops: list[MessageOps] = []
        self.workload = lowering.workload
        self.slices = SliceTable.of(plan, lowering.workload)
        batches = lowering.messages.batches(plan.messages, plan.ring_order)
        self.norms_s = 0.0
        self.halves: Halves | None = None
        if plan.results is not None:
            self.halves = Halves.of(batches, plan)
            self.norms_s = lowering.norms_s(batches, plan)
        workers = [0] if symmetric else list(range(cluster.world_size))
        around = Surroundings.of(
            batches,
            lowering.costs,
            symmetric=symmetric,
            workers=tuple(workers),
            ranks=cluster.world_size,
            hosts=len(cluster.hosts),
            limit=plan.limit,
            in_flight=plan.in_flight,
            coarse=coarse,
            crowd=lowering.crowd,
        )
        host_costs = self._host_costs(lowering, batches, around)
        self.network, self.results = self._networks(batches, lowering.shapes, around)
        self.workers = self._new_workers(lowering, host_costs, workers)

    def _host_costs(
        self, lowering: Lowering, batches: Sequence[Batch], around: Surroundings
    ) -> HostCosts:
        plan, workload = self.plan, self.workload
        taken_s = np.zeros(len(plan.messages))
        if lowering.taken_share > 0:
            taken_s = lowering.taken_share * message_cpu_s(
                plan, lowering.messages.cluster, lowering.messages.traffic
            )
        return HostCosts.of(
            lowering.times,
            self.slices,
            cast=np.array([message.compressor in CASTS for message in plan.messages]),
            prepare_s=_prepared_s(batches, len(plan.messages), around),
            taken_s=taken_s,
            costs=lowering.costs,
            buckets=sent_by_torch(plan, workload.variables, workload.library),
            results=0 if self.halves is None else len(self.halves.sent),
        )

    def _networks(
        self, batches: Sequence[Batch], shapes: ShapeCache, around: Surroundings
    ) -> tuple[Network, Network | None]:
        """The networks of the messages, or of their sums, and of results behind the norms."""
        layer = self.slices.last
        if self.halves is None:
            return Network(batches, shapes, around, layer), None
        sums = Network(self.halves.sums, shapes, around, layer)
        if not len(self.halves.sent):
            return sums, None
        behind = replace(around, threaded=True)  # no lane of results is the first one
        sent = layer[self.halves.sent]
        return sums, Network(self.halves.results, shapes, behind, sent)

    def _new_workers(
        self, lowering: Lowering, host_costs: HostCosts, workers: Sequence[int]
    ) -> list[Worker]:
        broadcast = lowering.broadcast
        if broadcast.alone_s > 0:
            broadcast = replace(broadcast, ports=self.network.ports(self.to))
        shares_cores = lowering.crowd > 0
        cores = self.to.queue(CORES) if shares_cores else NONE
        return [
            Worker(
                self.to,
                rank,
                lowering.times,
                host_costs,
                cores=cores,
                share=lowering.crowd / len(workers) if shares_cores else 1.0,
                # One broadcast reaches all of them, so one of them occupies the ports.
                broadcast=broadcast if rank == workers[0] else replace(broadcast, ports=()),
            )
            for rank in workers
        ]

    def add_steps(self, count: int) -> None:
        starts = [worker.forward(NONE) for worker in self.workers]
        start = self._join("begin backward", starts)
        for number in range(count):
            start = self.add_period(start, last=number == count - 1)

    def add_period(self, start: int, last: bool) -> int:
        """From one backward pass to the next, or to the last update; its last op."""
        issued = np.stack([worker.backward(start) for worker in self.workers])
        message_ops, norms = self._messages(issued)
        self.message_ops.append(message_ops)
        arrivals = message_ops.ends
        if not self.plan.cross_step or last:
            arrived = self._join("arrived", arrivals.tolist())
            ends = [worker.update(arrived) for worker in self.workers]
            if not last:
                ends = [worker.forward(end) for worker, end in zip(self.workers, ends, strict=True)]
            return self._join("begin backward", ends)
        behind = arrivals.tolist()
        for worker in self.workers:
            worker.defer(self.slices, arrivals, norms)
            behind += worker.forward_waiting(self.slices, arrivals)
        return self._join("begin backward", behind)

    def _messages(self, issued: IntArray) -> tuple[MessageOps, int]:
        """Add the messages; their ops, and the op that ends with known norms, or NONE."""
        sums = self.network.emit(self.to, issued)
        if self.halves is None:
            return sums, NONE
        # Lanes run in issue order, so every message of the backward pass precedes the results.
        summed = self._join("sums", [*sums.ends.tolist(), *issued[:, -1].tolist()])
        norms = self.to.op("norms", NONE, self.norms_s, Kind.RECV, (summed,))
        if self.results is None:
            return sums, norms
        results = self.results.emit(self.to, np.full((len(issued), len(self.halves.sent)), norms))
        return sums.followed_by(results, self.halves.sent), norms

    def build(self) -> Dfg:
        return self.to.build(tuple(variable.name for variable in self.workload.variables))

    def _join(self, name: str, after: Iterable[int]) -> int:
        return self.to.op(name, NONE, 0.0, Kind.VIRTUAL, after)
