"""A simple twin of the replay, and random graphs with all features."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from autotune.dfg.build import DfgBuilder, csr
from autotune.dfg.graph import NONE, OP_COLUMNS, Dfg, Discipline, Kind
from benchmarks.replay_throughput.execution_graph import parent_csr


@dataclass
class Twin:
    """Examines every op at every instant.

    An instant repeats three parts until nothing happens: ops become ready (lowest index first),
    locks change hands, queues choose. Ops on queues must last longer than 0. `left`: the service
    that the ops of a shared queue still need.
    """

    dfg: Dfg
    now: float = 0.0
    start: dict[int, float] = field(default_factory=dict)
    end: dict[int, float] = field(default_factory=dict)
    cause: dict[int, int] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)
    line: list[int] = field(default_factory=list)  # ready and with its lock, in that order
    for_lock: list[int] = field(default_factory=list)
    chosen: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    free: dict[int, tuple[float, int]] = field(default_factory=dict)
    releaser: dict[int, int] = field(default_factory=dict)
    left: dict[int, dict[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parents = parent_csr(self.dfg)

    def run(self) -> None:
        while True:
            while self._arrive() or self._locks() or self._choose():
                pass
            ends = [*self.end.values(), *(free_s for free_s, _ in self.free.values())]
            later = [end_s for end_s in ends if end_s > self.now]
            later += [self.now + len(ops) * min(ops.values()) for ops in self.left.values() if ops]
            if not later:
                return
            self._serve(min(later))

    def _serve(self, until_s: float) -> None:
        """Serve all ops of each shared queue evenly; those that need no more end."""
        passed_s, self.now = until_s - self.now, until_s
        for ops in self.left.values():
            each_s = passed_s / max(len(ops), 1)
            for op in list(ops):
                ops[op] -= each_s
                if ops[op] < 1e-9:
                    self.end[op] = self.now
                    del ops[op]

    def _free_s(self, queue: int) -> float:
        return self.free.get(queue, (0.0, NONE))[0]

    def _order(self, op: int) -> tuple[int, float, int]:
        return int(self.dfg.priority[op]), self.since[op], op

    def _parents(self, op: int) -> list[int]:
        start, parent = self.parents
        return parent[start[op] : start[op + 1]].tolist()

    def _arrive(self) -> bool:
        for op in range(self.dfg.ops):
            parents = self._parents(op)
            if op in self.since or any(self.end.get(p, np.inf) > self.now for p in parents):
                continue
            self.since[op] = max((self.end[p] for p in parents), default=0.0)
            if self.since[op] > 0:
                self.cause[op] = next(p for p in parents if self.end[p] == self.since[op])
            if self.dfg.acquires[op] >= 0:
                self.for_lock.append(op)
            else:
                self._go_on(op)
            return True
        return False

    def _go_on(self, op: int) -> None:
        queue = int(self.dfg.queue[op])
        if queue == NONE:
            self._start(op)
        elif self.dfg.discipline[queue] == Discipline.SHARED:
            self.start[op] = self.now
            self.left.setdefault(queue, {})[op] = float(self.dfg.duration_s[op])
        else:
            self.line.append(op)

    def _locks(self) -> bool:
        for op in sorted(self.end):
            lock = int(self.dfg.releases[op])
            if lock >= 0 and op not in self.returned and self.end[op] <= self.now:
                self.returned.add(op)
                self.held[lock] -= 1
                self.releaser[lock] = op
                return True
        for op in sorted(self.for_lock, key=lambda op: (self.dfg.acquires[op], self._order(op))):
            lock = int(self.dfg.acquires[op])
            if self.held.get(lock, 0) < self.dfg.lock_capacity[lock]:
                self.for_lock.remove(op)
                self.held[lock] = self.held.get(lock, 0) + 1
                if self.now > self.since[op]:
                    self.since[op], self.cause[op] = self.now, self.releaser[lock]
                self._go_on(op)
                return True
        return False

    def _choose(self) -> bool:
        for queue in range(self.dfg.queues):
            waiting = [op for op in self.line if self.dfg.queue[op] == queue]
            if self._free_s(queue) <= self.now and queue not in self.chosen and waiting:
                by_priority = self.dfg.discipline[queue] == Discipline.PRIORITY
                self.chosen[queue] = min(waiting, key=self._order) if by_priority else waiting[0]
                self.line.remove(self.chosen[queue])
        able = [op for op in self.chosen.values() if not self._busy(op)]
        if able:
            op = min(able, key=self._order)
            if self.now > self.since[op]:
                freed = [q for q in self._takes(op) if self._free_s(q) == self.now]
                self.cause[op] = self.free[freed[0]][1]
            del self.chosen[int(self.dfg.queue[op])]
            self._start(op)
        return bool(able)

    def _takes(self, op: int) -> list[int]:
        return [int(queue) for queue in (self.dfg.queue[op], self.dfg.channel[op]) if queue >= 0]

    def _busy(self, op: int) -> bool:
        return any(self._free_s(queue) > self.now for queue in self._takes(op))

    def _start(self, op: int) -> None:
        self.start[op] = self.now
        self.end[op] = self.now + float(self.dfg.duration_s[op])
        if self.dfg.queue[op] >= 0:
            self.free[int(self.dfg.queue[op])] = (self.end[op] + float(self.dfg.gap_s[op]), op)
        if self.dfg.channel[op] >= 0:
            self.free[int(self.dfg.channel[op])] = (self.end[op], op)


def relabelled(dfg: Dfg, number: np.ndarray) -> Dfg:
    """The same graph with the new `number` (N,) of each op; names keep their positions."""
    old = np.argsort(number)  # op at each new number
    origin = np.repeat(np.arange(dfg.ops), np.diff(dfg.child_start))
    start, child = csr(dfg.ops, number[origin], number[dfg.child])
    columns: dict[str, Any] = {name: getattr(dfg, name)[old] for name in OP_COLUMNS}
    return replace(dfg, child_start=start, child=child, **columns)


@st.composite
def graphs(draw: st.DrawFn, *, plain: bool = False, shared: bool = False, ops: int = 14) -> Dfg:
    """Random graphs with small whole times, so that events coincide, or with random times.

    In half of the graphs a parent may have a higher number than its child. With `shared` queues all
    times are random.
    """
    builder = DfgBuilder()
    kinds = [Discipline.FIFO] if plain else [Discipline.FIFO, Discipline.PRIORITY]
    of_queue = [
        draw(st.sampled_from([*kinds, *([Discipline.SHARED] * 2 if shared else [])]))
        for _ in range(draw(st.integers(1, 4)))
    ]
    queues = [builder.queue(f"q{i}", kind) for i, kind in enumerate(of_queue)]
    exclusive = [q for q in queues if of_queue[q] != Discipline.SHARED]
    capacities = [] if plain else draw(st.lists(st.integers(1, 2), max_size=2))
    locks = [builder.lock(capacity) for capacity in capacities]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    whole = not shared and draw(st.booleans())
    channels = not plain and draw(st.booleans())
    gaps = draw(st.booleans())

    def time_s() -> float:
        return float(rng.integers(1, 4)) if whole else float(rng.uniform(0.1, 3))

    for op in range(draw(st.integers(0, ops))):
        queue = int(rng.choice([NONE, *queues, *queues]))
        other = [q for q in exclusive if q != queue]
        used, channel = queue >= 0, NONE
        alone = queue in exclusive
        if channels and alone and other and rng.random() < 0.4:
            channel = int(rng.choice(other))
        lock = int(rng.choice([NONE, *locks])) if rng.random() < 0.5 else NONE
        builder.op(
            f"op{op}",
            queue,
            time_s() if used or rng.random() < 0.5 else 0.0,
            Kind(int(rng.integers(1, 14))) if used else Kind.VIRTUAL,
            [p for p in range(op) if rng.random() < 2 / (op + 1)],
            gap_s=time_s() if gaps and alone and rng.random() < 0.3 else 0.0,
            channel=channel,
            priority=int(rng.integers(0, 3)),
            acquires=lock,
            releases=lock,
            worker=int(rng.integers(NONE, 2)),
        )
    built = builder.build()
    return relabelled(built, rng.permutation(built.ops)) if draw(st.booleans()) else built
