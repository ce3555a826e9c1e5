"""How the messages of a graph are sent: what surrounds them, and which ports and cores decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.deciding import deciding, distinct
from autotune.lowering.messages import Batch, TimedStep
from autotune.lowering.traffic import IN, OUT, Collective, Ports

STARS = (Collective.GATHER, Collective.SCATTER)


@dataclass(frozen=True)
class Surroundings:
    """How messages are sent in one graph.

    `symmetric`: only the ports that decide are in the graph. `limit`: messages in flight on a lane
    (`Plan.limit`). `in_flight`: pieces of direct exchanges in flight in each of their rounds.
    `threaded`: lane 0 has a thread, on which all messages start. `queued`: the device queues the
    steps, and no lane has a limit. `coarse`: a message without competitors is one round. `shared`:
    whether transfers to different hosts share a port evenly (`shares_ports`).
    `crowd`: ranks per core of the machine that they share; 0 if every rank has cores enough. With
    shared cores, other work delays a message round by round. `columns`: threads of a lane that keep
    an order of their own: those of all ranks if some exchange has one owner, otherwise of the
    `workers`.
    """

    symmetric: bool
    workers: tuple[int, ...]
    limit: int | None
    in_flight: int
    threaded: bool
    queued: bool
    coarse: bool
    shared: bool
    crowd: float
    columns: int

    @staticmethod
    def of(
        batches: Sequence[Batch],
        costs: RuntimeCosts,
        *,
        symmetric: bool,
        workers: tuple[int, ...],
        ranks: int,
        hosts: int,
        limit: int | None,
        in_flight: int,
        coarse: bool,
        crowd: float,
    ) -> Surroundings:
        """Those of a graph of these messages on this many `ranks` and `hosts`."""
        owned = any(batch.owned for batch in batches)
        queued = bool(costs["queued"])
        limited = limit is not None or any(batch.direct for batch in batches)
        return Surroundings(
            symmetric=symmetric,
            workers=workers,
            limit=limit,
            in_flight=in_flight,
            threaded=limited and not queued,
            queued=queued,
            coarse=coarse,
            shared=shares_ports(batches, costs, hosts, limit),
            crowd=crowd,
            columns=ranks if owned else len(workers),
        )

    def limit_of(self, direct: bool) -> int | None:
        """Messages, or pieces of direct exchanges, in flight on a lane.

        None: as many as the library starts, or as a device queues.
        """
        if self.queued:
            return None
        return self.in_flight if direct else self.limit

    @property
    def folded(self) -> bool:
        """Whether the ports that decide stand for the others: an owner's ports differ from them."""
        return self.symmetric and self.columns == len(self.workers)


@dataclass(frozen=True)
class Scene:
    """The ports, cores and owners that decide, determined by all messages of a graph.

    `slow_hosts`: those whose transfers into gathers and from scatters take turns. `coarse`: a
    message is one round, since none competes with it.
    """

    around: Surroundings
    ports: tuple[int, ...]
    cores: tuple[int, ...]
    owners: tuple[int, ...]
    slow_hosts: frozenset[int]
    coarse: bool

    @staticmethod
    def of(
        batches: Sequence[Batch], around: Surroundings, ports: Ports, costs: RuntimeCosts
    ) -> Scene:
        timed_steps = [timed for batch in batches for timed in batch.steps]
        times = [timed.times for timed in timed_steps if timed.times is not None]
        # The busiest device of a host may differ between stages, which then exceed their whole.
        loads = [loads for step in times for loads in (*step.stages, step.ports)]
        alone = around.limit == 1 and all(len(batch.steps) == 1 for batch in batches)
        alone &= not around.queued or len({timed.group for timed in timed_steps}) == 1
        slow_hosts = {
            port % ports.hosts
            for timed in timed_steps
            for port in slowest_ports(timed, around, ports, costs)
            if port != root_port(timed, ports)
        }
        return Scene(
            around=around,
            ports=tuple(deciding(loads, around.folded).tolist()),
            cores=tuple(deciding([step.cores for step in times], around.symmetric).tolist()),
            owners=tuple(distinct([mask for step in times for mask in step.owners]).tolist()),
            slow_hosts=frozenset(slow_hosts),
            coarse=around.coarse and alone and around.crowd == 0,
        )


def shares_ports(
    batches: Sequence[Batch], costs: RuntimeCosts, hosts: int, limit: int | None
) -> bool:
    """Whether some messages of a graph go to one host only, and share a port with others.

    A port serves its targets in turns, and the messages to one of them in the order of arrival. So
    messages to all hosts follow each other, as any do between two hosts. Stars share ports across
    the step, where there is a `limit`; within it, the order of arrival is nearer to measured steps.
    """
    steps = [timed for batch in batches for timed in batch.steps]
    if any(is_ordered(timed, costs) for timed in steps):
        return True
    stars = any(timed.step.collective in STARS for timed in steps)
    owned = any(batch.owned for batch in batches)
    return hosts > 2 and (owned or (stars and limit is not None))


def is_ordered(timed: TimedStep, costs: RuntimeCosts) -> bool:
    """Whether the step is a star each of whose connections carries one tensor after the other."""
    return timed.step.collective in STARS and bool(costs["star_order"])


def slowest_ports(
    timed: TimedStep, around: Surroundings, ports: Ports, costs: RuntimeCosts
) -> list[int]:
    """The slowest ports of a gather or scatter: the root's, or those of other hosts.

    Empty for other steps.
    """
    star = timed.step.collective in STARS
    if timed.times is None or around.limit == 1 or not star or not costs["star_turns"]:
        return []
    slowest: list[int] = np.flatnonzero(timed.times.ports >= 1 - 1e-9).tolist()
    at_root = root_port(timed, ports)
    if at_root in slowest:
        return [at_root]
    return [port for port in slowest if port < 2 * ports.hosts]


def root_port(timed: TimedStep, ports: Ports) -> int:
    side = IN if timed.step.collective is Collective.GATHER else OUT
    return side * ports.hosts + int(ports.host_of_rank[timed.root])
