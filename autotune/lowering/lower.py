"""From a plan to the data-flow graph that the runtime would execute (dPRO, sec. 4.1), and the step time that its replay predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autotune.cluster import Cluster
from autotune.dfg.build import DfgBuilder
from autotune.dfg.graph import NONE, Dfg, Kind
from autotune.dfg.replay import replay
from autotune.errors import InvalidInput
from autotune.lowering.compute import Duties, Passes, Worker
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.messages import Members, Sender
from autotune.lowering.network import CORES, Network, Sent
from autotune.lowering.step_times import Timing
from autotune.lowering.steps import Step
from autotune.lowering.traffic import Collective, Ports
from autotune.strategy_space.backend import sent_by_torch
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.strategy import CASTS
from autotune.workload import Workload

BUFFERS = Step(Collective.BROADCAST, lambda sizes: sizes.wire_bytes)
"""What DDP sends before a forward pass, where the module has buffers."""


class Lowering:
    """Lowers many plans of one workload on one cluster. What plans share is worked out once and kept here.

    `taken_share`: how much of the CPU time of sending is taken from computation (`features.compute_cost.taken_share`).
    Where all hosts stand on one machine (`Cluster.machine_cores`), messages, packing and compression wait for its cores.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        costs: RuntimeCosts | None = None,
        taken_share: float = 0.0,
    ) -> None:
        self.workload, self.cluster, self.costs, self.taken_share = (
            workload,
            cluster,
            costs or RuntimeCosts(),
            taken_share,
        )
        self._passes = Passes.of(workload)
        self._ports = Ports(cluster)
        timing = Timing(cluster, self._ports, self.costs)
        self._sender = Sender(timing, self.costs, workload)
        sizes = np.array(workload.buffer_bytes, dtype=np.float64)
        self._buffers_s = (
            float(timing.of(BUFFERS, sizes, (tuple(range(cluster.world_size)),)).alone_s.sum())
            if len(sizes)
            else 0.0
        )
        # Side by side all ranks want the cores of their one machine; while each has one to itself, none waits for it.
        crowd = cluster.world_size / cluster.machine_cores if cluster.machine_cores > 0 else 0.0
        self._crowd = crowd if crowd >= 1 else 0.0

    def graph(self, plan: Plan, steps: int = 2, symmetric: bool = True) -> Dfg:
        """`steps` training steps, from the first forward pass to the last update. Raises `InvalidInput`.

        `symmetric`: workers are alike, so one is written down, with the ports that decide; otherwise all of both.
        """
        if steps < 1:
            raise InvalidInput(f"a graph needs at least 1 step, but {steps} are asked for")
        return _Drawing(self, plan, symmetric, coarse=False).steps(steps)

    def period(self, plan: Plan, symmetric: bool = True) -> Dfg:
        """From the start of a backward pass to the start of the next one, whose replay is the steady state's step.

        Nothing is under way at its ends: the runtime waits for all messages before it fills their buffers again.
        """
        return _Drawing(self, plan, symmetric, coarse=True).period()

    def drawn(self, plan: Plan, symmetric: bool = True) -> tuple[Dfg, Sent]:
        """`period`, and which of its ops are whose message's."""
        drawing = _Drawing(self, plan, symmetric, coarse=True)
        return drawing.period(), drawing.sent

    def step_s(self, plan: Plan) -> float:
        """Predicted seconds per step in the steady state."""
        return replay(self.period(plan)).makespan_s

    def message_graph(
        self,
        messages: Sequence[Message],
        ring_order: tuple[int, ...] | None = None,
        limit: int | None = None,
    ) -> Dfg:
        """These messages alone, all of whose gradients are packed at time 0, until the last has arrived. For partial replay.

        `limit`: as in `Plan`.
        """
        batches = self._sender.batches(messages, ring_order)
        to, count = DfgBuilder(), len(messages)
        issue_s = np.full(count, self.costs["issue_s"])
        for batch in batches:
            issue_s[batch.numbers] += 0.0 if limit is not None else batch.steps[0].prepare_s
        first = to.block(
            count,
            lambda number: f"issue {number}",
            duration_s=issue_s,
            queue=to.queue("r0 host"),
            kind=Kind.PACK,
            worker=0,
        )
        issued = first + np.arange(count)
        to.edges(issued[:-1], issued[1:])
        layer = np.zeros(count, dtype=np.int64)
        network = Network(
            batches, True, self._ports, self.costs, [0], limit, layer, True, self._crowd
        )
        network.emit(to, issued[None, :])
        return to.build(("message",))

    def sync_s(self, message: Message, parts: int = 1, limit: int | None = None) -> float:
        """How long the message takes alone if it is cut into so many messages of about the same size (dPRO's OPTPARTNUM)."""
        if parts < 1:
            raise InvalidInput(
                f"a message can be cut into at least 1 part, but {parts} are asked for"
            )
        elements = message.elements
        sizes = [
            elements * (number + 1) // parts - elements * number // parts for number in range(parts)
        ]
        first = message.slices[0]
        rows = [max(first.rows * size // max(elements, 1), 1) for size in sizes]
        cut = [
            replace(message, slices=(replace(first, elements=size, rows=own),))
            for size, own in zip(sizes, rows, strict=True)
            if size
        ]
        return replay(self.message_graph(cut or [message], limit=limit)).makespan_s


class _Drawing:
    """One graph."""

    def __init__(self, lowering: Lowering, plan: Plan, symmetric: bool, coarse: bool) -> None:
        cluster = lowering.cluster
        if plan.world_size != cluster.world_size:
            raise InvalidInput(
                f"a plan is lowered on its own cluster: it is for {plan.world_size} ranks, but cluster {cluster.name!r} has "
                f"{cluster.world_size}; plan the strategy for this cluster"
            )
        self.plan, self.to, self.workload = plan, DfgBuilder(), lowering.workload
        self.members = Members.of(plan, lowering.workload)
        batches = lowering._sender.batches(plan.messages, plan.ring_order)
        ranks = [0] if symmetric else list(range(cluster.world_size))
        count = len(plan.messages)
        prepare_s, taken_s = np.zeros(count), np.zeros(count)
        for batch in batches:
            if not plan.cross_step:
                prepare_s[batch.numbers] = batch.steps[0].prepare_s
        if lowering.taken_share > 0:
            taken_s = lowering.taken_share * lowering._sender.cpu_s(plan)
        cast = np.array([message.compressor in CASTS for message in plan.messages])
        buckets = sent_by_torch(plan, lowering.workload.variables)
        duties = Duties.of(
            lowering._passes, self.members, cast, prepare_s, taken_s, lowering.costs, buckets
        )
        self.network = Network(
            batches,
            symmetric,
            lowering._ports,
            lowering.costs,
            ranks,
            plan.limit,
            self.members.last,
            coarse,
            lowering._crowd,
        )
        cores = self.to.queue(CORES) if lowering._crowd > 0 else NONE
        share = lowering._crowd / len(ranks) if lowering._crowd > 0 else 1.0
        self.workers = [
            Worker(self.to, rank, lowering._passes, duties, cores, share, lowering._buffers_s)
            for rank in ranks
        ]

    def steps(self, count: int) -> Dfg:
        starts = [worker.forward(NONE) for worker in self.workers]
        start = self._join("begin backward", starts)
        for number in range(count):
            start = self._block(start, last=number == count - 1)
        return self._built()

    def period(self) -> Dfg:
        self._block(NONE, last=False)
        return self._built()

    def _block(self, start: int, last: bool) -> int:
        """From one backward pass to the next, or to the update; its end."""
        issued = np.stack([worker.backward(start) for worker in self.workers])
        self.sent = sent = self.network.emit(self.to, issued)
        if not self.plan.cross_step or last:
            arrived = self._join("arrived", sent.ends)
            ends = [worker.update(arrived) for worker in self.workers]
            if not last:
                ends = [worker.forward(end) for worker, end in zip(self.workers, ends, strict=True)]
            return self._join("begin backward", ends)
        behind = list(sent.ends)
        for worker in self.workers:
            worker.defer()
            behind += worker.forward_waiting(self.members, sent.ends)
        return self._join("begin backward", behind)

    def _join(self, name: str, after: list[int] | np.ndarray) -> int:
        number = self.to.block(1, lambda _: name, kind=Kind.VIRTUAL)
        self.to.edges(np.array(after), number)
        return number

    def _built(self) -> Dfg:
        return self.to.build(tuple(variable.name for variable in self.workload.variables))


def lower(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    steps: int = 2,
    symmetric: bool = True,
    costs: RuntimeCosts | None = None,
) -> Dfg:
    """The graph of one plan; for many, keep a `Lowering`."""
    return Lowering(workload, cluster, costs).graph(plan, steps, symmetric)


def replayed_step_s(
    plan: Plan, workload: Workload, cluster: Cluster, costs: RuntimeCosts | None = None
) -> float:
    """Predicted seconds per step of one plan; for many, keep a `Lowering`."""
    return Lowering(workload, cluster, costs).step_s(plan)
