"""The messages of a plan as arrays: when they are complete, what they wait for, and the ports that they load.

| symbol | meaning |
|---|---|
| M | messages of the plan, in issue order |
| V | variables, in backward order |
| K | messages of one kind |
| R | steps with a collective, over all kinds |
| P | ports |
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.costs.row_traffic import RowTraffic
from autotune.errors import InvalidInput
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.step_times import StepTimes, Timing
from autotune.lowering.steps import Circle, Step, sizes_of, steps_of
from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.strategy import Compressor
from autotune.workload import Workload

_CLOSELY_COMPARED = 64
"""Ports up to which each is compared with every other."""


@dataclass(frozen=True, eq=False)
class SendStep:
    """One step of the K messages of a kind. `times` is None where it only computes. `root`: the rank that `prepare_root_s` is of."""

    step: Step
    times: StepTimes | None
    prepare_s: FloatArray
    prepare_root_s: FloatArray
    size_bytes: FloatArray
    root: int
    circle_key: Hashable


@dataclass(frozen=True, eq=False)
class Batch:
    """Messages of one kind: `numbers` (K,) within the plan, ascending."""

    numbers: IntArray
    steps: tuple[SendStep, ...]


@dataclass(frozen=True, eq=False)
class Members:
    """Which variables are in which messages. `variable`, `message`, `elements`: of every slice. `last` (M,): backward position."""

    variable: IntArray
    message: IntArray
    elements: IntArray
    last: IntArray

    @staticmethod
    def of(plan: Plan, workload: Workload) -> Members:
        """Raises `InvalidInput` where the plan is another model's."""
        if plan.workload_id != workload.id:
            raise InvalidInput(
                f"a plan is lowered with its own model, but it is for {plan.workload_id} and the workload is {workload.id}; "
                "plan the strategy for this workload"
            )
        index = workload.index
        rows = [
            (index[part.variable], number, part.elements)
            for number, each in enumerate(plan.messages)
            for part in each.slices
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        last = np.full(len(plan.messages), -1, dtype=np.int64)
        np.maximum.at(last, table[:, 1], table[:, 0])
        return Members(table[:, 0], table[:, 1], table[:, 2], last)


class Sender:
    """Finds the steps of the messages of a workload's plans on one cluster."""

    def __init__(self, timing: Timing, costs: RuntimeCosts, workload: Workload) -> None:
        self.timing, self.costs, self.cluster, self.traffic = (
            timing,
            costs,
            timing.cluster,
            RowTraffic(workload),
        )
        host_of = timing.ports.host_of_rank
        self._hosts = tuple(
            tuple(np.flatnonzero(host_of == host).tolist())
            for host in range(len(self.cluster.hosts))
        )
        self._world = tuple(range(self.cluster.world_size))
        self._kinds: dict[
            Hashable, tuple[tuple[Step, ...], dict[Circle, tuple[tuple[int, ...], ...]]]
        ] = {}

    def batches(
        self, messages: Sequence[Message], ring_order: tuple[int, ...] | None = None
    ) -> list[Batch]:
        """By kind; no message is in two of them."""
        grouped: dict[Hashable, list[int]] = {}
        for number, message in enumerate(messages):
            grouped.setdefault(_kind(message), []).append(number)
        return [
            self._batch([messages[number] for number in numbers], ring_order, kind, numbers)
            for kind, numbers in grouped.items()
        ]

    def _batch(
        self,
        messages: Sequence[Message],
        ring_order: tuple[int, ...] | None,
        kind: Hashable,
        numbers: Sequence[int],
    ) -> Batch:
        key = (kind, ring_order)
        if key not in self._kinds:
            self._kinds[key] = self._steps(messages[0], ring_order)
        steps, circles = self._kinds[key]
        sizes = sizes_of(messages, self.traffic, self.cluster.world_size)
        made = []
        for step in steps:
            size_bytes = step.size(sizes)
            times = (
                self.timing.of(step, size_bytes, circles[step.circle])
                if step.collective is not None
                else None
            )
            root = _root(step, circles[step.circle])
            circle_key = (
                (step.circle, circles[step.circle])
                if step.circle is not Circle.HOSTS
                else step.circle
            )
            made.append(
                SendStep(
                    step,
                    times,
                    step.prepare(sizes),
                    step.prepare_root(sizes),
                    size_bytes,
                    root,
                    circle_key,
                )
            )
        return Batch(np.array(numbers, dtype=np.int64), tuple(made))

    def cpu_s(self, plan: Plan) -> FloatArray:
        """CPU time of every message on one rank by the probed fits, shape (M,); 0 where the primitive was not probed."""
        fits = {
            synchronizer: self.cluster.fit(synchronizer.operation, plan.world_size)
            for synchronizer in {m.synchronizer for m in plan.messages}
        }
        sizes_bytes = self.traffic.collective_bytes(plan.messages, plan.world_size).tolist()
        sized = zip(plan.messages, sizes_bytes, strict=True)
        return np.array(
            [
                fit.cpu_s(size) if (fit := fits[message.synchronizer]) else 0.0
                for message, size in sized
            ]
        )

    def _steps(
        self, message: Message, ring_order: tuple[int, ...] | None
    ) -> tuple[tuple[Step, ...], dict[Circle, tuple[tuple[int, ...], ...]]]:
        world = message.ranks or ring_order or self._world
        hosts = (
            tuple(
                own
                for part in self._hosts
                if (own := tuple(rank for rank in part if rank in set(world)))
            )
            if message.hierarchical
            else ()
        )
        two_level = len(hosts) > 1 and max(map(len, hosts)) > 1
        circles = {Circle.WORLD: (world,), Circle.HOSTS: hosts}
        if two_level:
            chosen = {message.owner if message.owner in part else min(part) for part in hosts}
            circles[Circle.LEADERS] = (tuple(rank for rank in world if rank in chosen),)
        members = len(circles[Circle.LEADERS if two_level else Circle.WORLD][0])
        return steps_of(message, members, two_level, self.costs), circles


def _kind(message: Message) -> Hashable:
    """What tells messages apart but for their sizes."""
    single = message.compressor is Compressor.POWER_SGD and all(
        part.rows < 2 for part in message.slices
    )
    return (
        message.synchronizer,
        message.compressor,
        message.owner,
        message.hierarchical,
        message.sparse,
        message.ranks,
        message.dtype,
        message.ratio,
        (message.rank, message.wire_bytes >= message.grad_bytes) if not single else None,
    )


def _root(step: Step, parts: tuple[tuple[int, ...], ...]) -> int:
    if step.root is not None:
        return step.root
    return parts[0][0] if parts and parts[0] else 0


def kept_ports(batches: Sequence[Batch], fold: bool) -> IntArray:
    """The ports that decide when something ends, ascending.

    A port that no step loads is none. With `fold`, nor is one that every step loads no more than a certain other port: both serve
    the same ops in the same order, so by induction it is free no later and finishes none later. So of n hosts alike one is left,
    and of a ring through unlike hosts the slowest; that is exact.
    """
    return _kept(
        [step.times.ports for batch in batches for step in batch.steps if step.times is not None],
        fold,
    )


def kept_cores(batches: Sequence[Batch], fold: bool) -> IntArray:
    """The hosts whose cores decide, in the same way."""
    return _kept(
        [step.times.cores for batch in batches for step in batch.steps if step.times is not None],
        fold,
    )


def _kept(rows: list[FloatArray], fold: bool) -> IntArray:
    if not rows:
        return np.zeros(0, dtype=np.int64)
    loads = np.stack(list({row.tobytes(): row for row in rows}.values()))
    kept = np.flatnonzero(loads.any(axis=0))
    if not fold or len(kept) < 2:
        return kept
    first = {
        column.tobytes(): port
        for port, column in zip(
            kept[::-1].tolist(), np.ascontiguousarray(loads[:, kept].T)[::-1], strict=True
        )
    }
    kept = np.array(sorted(first.values()), dtype=np.int64)
    if len(kept) > _CLOSELY_COMPARED:
        return kept
    columns = loads[:, kept]
    below: BoolArray = np.all(
        columns[:, :, None] <= columns[:, None, :], axis=0
    )  # [p, q]: p nowhere above q
    np.fill_diagonal(below, False)
    return kept[~below.any(axis=1)]
