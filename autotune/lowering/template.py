"""The ops of one message, as a template that all messages of a kind share.

A template knows no time: its durations are rows, by which each message's are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from autotune.dfg.graph import NONE, Kind
from autotune.lowering.traffic import Collective

Connection = tuple[int, str, int]
"""(lane, port, owner): the connections at a port on which a lane sends to or from an owner, in a
direct exchange or as the root of a star. Each carries one tensor after the other."""


class Row(NamedTuple):
    """A duration or size: that of number `base`, times `factor`, by `divisor`.

    The bases of durations are numbered by `durations.base`, those of sizes are steps.
    """

    base: int
    factor: float = 1.0
    divisor: float = 1.0


class Op(NamedTuple):
    """One op of a message. `slot`, `size_slot`: rows of the template's durations and sizes.

    Queues, channels and locks are numbers of the template's own resources. `kind` is a plain
    number, since numpy examines members of enumerations one by one.
    """

    queue: int = NONE
    channel: int = NONE
    kind: int = int(Kind.VIRTUAL)
    worker: int = NONE
    acquires: int = NONE
    releases: int = NONE
    slot: int = 0
    size_slot: int = NONE


@dataclass
class Template:
    """The ops of one message of a kind.

    Row 0 of the `durations` is 0. For each lane and piece, by column of `Surroundings`: `threads`
    are the ops of the lane's thread, `ends` those that the step ends with. `connections`: the first
    and the last op of each.
    """

    durations: list[Row] = field(default_factory=lambda: [Row(0, factor=0.0)])
    ops: list[Op] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    sizes: list[Row] = field(default_factory=list)
    threads: list[list[list[int]]] = field(default_factory=list)
    ends: list[list[list[int]]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)  # ops that start when the message is issued
    connections: dict[Connection, tuple[int, int]] = field(default_factory=dict)

    def add(self, name: str, op: Op, after: Sequence[int]) -> int:
        number = len(self.ops)
        self.names.append(name)
        self.ops.append(op)
        self.edges.extend((parent, number) for parent in after)
        if not after:
            self.first.append(number)
        return number

    def send(
        self, name: str, op: Op, after: Sequence[int], connections: Sequence[Connection]
    ) -> int:
        """Add an op that sends behind what the connections have carried before."""
        known = {self.connections[each][1] for each in connections if each in self.connections}
        number = self.add(name, op, sorted(known.union(after)))
        for each in connections:
            self.connections[each] = self.connections.get(each, (number,))[0], number
        return number

    def duration(self, base: int, factor: float = 1.0, divisor: float = 1.0) -> int:
        self.durations.append(Row(base, factor, divisor))
        return len(self.durations) - 1


@dataclass(frozen=True)
class Stage:
    """Equal rounds. In each, every port sends its share, then the `rest` passes.

    `ports`: ops of one round, with their `names`. `rest`: the slot of a round's rest. In a direct
    exchange, `sends` to or from `owners` run beside all rounds, each on the port that it names, and
    the rest passes once, behind both.
    """

    count: int
    ports: tuple[Op, ...]
    names: tuple[str, ...]
    rest: int
    sends: tuple[tuple[str, Op], ...] = ()
    owners: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rounds:
    """The rounds of a collective, in its stages. Only direct exchanges have several.

    `lock`: held from the first round to the last. `beyond`: work of cores after the end.
    """

    collective: Collective
    stages: tuple[Stage, ...]
    lock: int
    beyond: tuple[Op, ...]

    def add(
        self, template: Template, lane: int, behind: Sequence[int], parts: Sequence[int]
    ) -> list[int]:
        """Add all rounds; the last op of each stage. The last one gives the lock back.

        Each port goes through the stages one after another, whatever the others do. In a pull, each
        stage follows the op of `parts` with which its owners have their parts.
        """
        entries: list[int] = []
        ends: list[int] = []
        before: dict[str, int] = {}
        for number, stage in enumerate(self.stages):
            lock = self.lock if number == 0 else NONE
            after = [*behind, *parts[number : number + 1]]
            if self.lock != NONE:
                after += entries[:1]  # no stage begins before the lock is held
            entry = template.add(f"{self.collective} in", Op(acquires=lock), after)
            entries.append(entry)
            sends = [
                template.send(
                    f"{self.collective} {name}",
                    op,
                    [entry],
                    [(lane, name, owner) for owner in stage.owners],
                )
                for name, op in stage.sends
            ]
            start = len(template.ops) - 1
            pause = Op() if stage.owners else Op(slot=stage.rest)
            template.ops += [*stage.ports, pause] * stage.count
            template.ops[-1] = Op(slot=stage.rest)
            template.names += round_names(self.collective, stage.names, stage.count)
            template.edges += [
                (start + parent if parent else entry, start + child)
                for parent, child in round_edges(len(stage.names), stage.count)
            ]
            last = len(template.ops) - 1
            template.edges += [(op, last) for op in sends]
            if not parts:
                template.edges += [
                    (before[name], start + 1 + place)
                    for place, name in enumerate(stage.names)
                    if name in before
                ]
                first = last - len(stage.names)
                before |= {name: first + place for place, name in enumerate(stage.names)}
            if not parts or self.lock != NONE:
                template.edges += [(end, last) for end in ends[-1:]]
            ends.append(last)
        template.ops[-1] = Op(slot=self.stages[-1].rest, releases=self.lock)
        for op in self.beyond:
            template.add(f"{self.collective} beyond", op, ends[-1:])
        return ends


@dataclass(frozen=True)
class StepOps:
    """The ops of a step of each piece.

    `threads`: of the lane's thread, by worker; `behind`: the same for all pieces but the first,
    which differ if other pieces keep the thread awake. `wake`: until a sleeping thread has woken
    up, beside what it still does for earlier messages; None if that takes no time. `root`:
    computation of the root.
    """

    threads: tuple[tuple[str, Op], ...]
    behind: tuple[tuple[str, Op], ...]
    wake: Op | None
    root: Op | None
    rounds: Rounds | None
    columns: int

    def add(self, template: Template, lane: int, behind: list[int], parts: list[int]) -> list[int]:
        """Add the ops of a piece behind those of the step before; the ops that they end with.

        `parts`: the ends of the stages of a push, directly before its pull.
        """
        ops = self.behind if template.threads[lane] else self.threads
        after = parts[:1] or behind
        if self.wake is not None and ops == self.threads:
            after = [template.add(f"wake lane {lane}", self.wake, after)]
        threads = [template.add(name, op, after) for name, op in ops]
        behind = threads or behind
        if self.root is not None:
            behind = [template.add("sum", self.root, behind)]
        if self.rounds is not None:
            behind = self.rounds.add(template, lane, behind, parts)
        template.threads[lane].append(_widened(threads, self.columns))
        alone = self.rounds is not None or len(behind) == 1
        ends = behind[-1:] if alone else behind
        template.ends[lane].append(_widened(ends, self.columns))
        return behind


def _widened(ops: list[int], columns: int) -> list[int]:
    """One op for each column: those of one worker stand for all ranks."""
    return ops * (columns // len(ops)) if ops else ops


@lru_cache(maxsize=1024)
def round_names(collective: Collective, ports: tuple[str, ...], rounds: int) -> tuple[str, ...]:
    return tuple(
        f"{collective} {number} {name}" for number in range(rounds) for name in (*ports, "wait")
    )


@lru_cache(maxsize=256)
def round_edges(ports: int, rounds: int) -> tuple[tuple[int, int], ...]:
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
