"""The ops of an exchange with one owner: every rank goes on by itself, and sends flow by flow.

A rank that sends to the owner has done its part when its socket has taken the bytes, and issues the
next piece at once. Only the owner waits until all parts have arrived. So a limit of pieces in
flight bounds each owner's own pieces, and pieces of different owners overlap. In the second round,
each rank waits for the sums that it receives.

A transfer passes the sender's port, then the receiver's: what has not left the one cannot occupy
the other. It is cut into `PARTS` for this, so that both ports work at once. Small first and last
parts keep the delay of a transfer alone small.

| symbol | meaning |
|---|---|
| n | ranks of the world: the columns of threads and ends |
| x, o | a member; the owner |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.lowering.template import Op, Template
from autotune.lowering.traffic import Collective

PARTS = (0.125, 0.375, 0.375, 0.125)
"""Shares of a transfer, which pass the ports one after the other."""


@dataclass(frozen=True)
class FlowOps:
    """The transfer from rank `source` to `target`: for each part, the ops of the ports it passes.

    `names`: of the one or two ports.
    """

    source: int
    target: int
    names: tuple[str, ...]
    parts: tuple[tuple[Op, ...], ...]


@dataclass(frozen=True)
class OwnedStep:
    """One step of a piece on lane `lane`. A step without a collective only computes.

    `threads`, `later` (n,): ops of the ranks' threads for the first piece, and for others. `wake`:
    as in `StepOps`, for each rank. `cores`: the work of cores beside the flows; `beyond`: behind
    them. `rest`: slot of the rest.
    """

    lane: int
    collective: Collective | None
    owner: int
    threads: tuple[Op, ...]
    later: tuple[Op, ...]
    wake: Op | None
    flows: tuple[FlowOps, ...] = ()
    cores: tuple[tuple[str, Op], ...] = ()
    beyond: tuple[tuple[str, Op], ...] = ()
    rest: int = 0


def add_piece(template: Template, steps: Sequence[OwnedStep]) -> list[int]:
    """Add the ops of one piece; the last op of each rank."""
    ranks = range(len(steps[0].threads))
    behind: list[list[int]] = [[] for _ in ranks]
    posted: list[list[int]] = [[] for _ in ranks]
    for step in steps:
        ops = step.later if template.threads[step.lane] else step.threads
        if step.wake is not None and ops == step.threads:
            name = f"wake lane {step.lane} of r"
            behind = [[template.add(f"{name}{r}", step.wake, behind[r])] for r in ranks]
        threads = [
            template.add(f"lane {step.lane} of r{rank}", ops[rank], behind[rank]) for rank in ranks
        ]
        ends = list(threads)
        if step.collective is Collective.PUSH:
            posted = [[thread] for thread in threads]  # with the receives of both rounds
        if step.collective is not None:
            _add_flows(template, step, threads, posted, ends)
        template.threads[step.lane].append(threads)
        template.ends[step.lane].append(ends)
        behind = [[end] for end in ends]
    return [end for (end,) in behind]


def _add_flows(
    template: Template,
    step: OwnedStep,
    threads: Sequence[int],
    posted: Sequence[Sequence[int]],
    ends: list[int],
) -> None:
    """Add the transfers of a round; the ends of those who wait for them replace their `ends`."""
    entry = threads[step.owner]
    busy = [template.add(f"{step.collective} {name}", op, [entry]) for name, op in step.cores]
    arrived: dict[int, list[int]] = {}
    for flow in step.flows:
        after = [*posted[flow.target], threads[flow.source]]
        connection = (step.lane, f"{flow.source} to {flow.target}", step.owner)
        for number, part in enumerate(flow.parts):
            name = f"{step.collective} {flow.source} to {flow.target} {number}"
            sent = template.send(f"{name} {flow.names[0]}", part[0], after, [connection])
            after = [sent]
            for port, op in zip(flow.names[1:], part[1:], strict=True):
                sent = template.add(f"{name} {port}", op, [sent])
            arrived.setdefault(flow.target, []).append(sent)
    for rank, parts in arrived.items():
        ends[rank] = template.add(
            f"{step.collective} arrived r{rank}", Op(slot=step.rest), [*parts, *busy]
        )
    for name, op in step.beyond:
        template.add(f"{step.collective} beyond {name}", op, [ends[max(arrived, default=0)]])


def flow_s(inwards: Sequence[float], outwards: Sequence[float]) -> float:
    """Seconds until the last of these transfers has arrived, if they meet at one port.

    `inwards`: of each at the port where they meet; `outwards`: at its other port, or 0.
    """
    small = min(PARTS[0], PARTS[-1])
    meeting_s = sum(inwards) + small * min(outwards)
    return max(meeting_s, *(a + small * b for a, b in zip(outwards, inwards, strict=True)))
