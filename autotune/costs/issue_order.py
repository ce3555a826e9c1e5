"""Synchronization that runs into the next forward pass: how long a step then takes, and the issue order that makes it shortest.

The closed form has one channel, which sends the messages of a plan strictly in its order. (The runtime has one for each step of a message,
so that a server's two directions overlap, and perhaps two messages in flight on each, which only the replay knows.) A forward pass waits
for a variable where it first reads it, and its end waits for whatever is still under way, since the next backward pass fills the same
buffers. So the channel is empty when a backward pass starts, every step is like the one before, and with time 0 at the start of the
backward pass

    end_i  = max(end_(i-1), ready_i) + cost_i
    period = max(start + forward, max over i of (end_i + forward - needed_i))

because waiting for one variable delays all that is computed after it. That is one machine with heads (ready), times (cost) and
tails (forward - needed): 1 | r_j, q_j | C_max. Its order is found by Carlier's branch and bound (European Journal of Operational
Research 11, 1982), whose first node is Schrage's rule: of the messages that are ready, the one that is needed first.

| symbol | meaning | unit |
|---|---|---|
| M | messages | - |
| ready | when the last gradient of a message is ready, from the start of the backward pass, shape (M,) | s |
| cost | how long a message holds the channel, shape (M,) | s |
| needed | when the first variable of a message is read, from the start of the forward pass, shape (M,) | s |
| start | when the next forward pass may start: backward pass and what follows it | s |
| tail | forward - needed: what is still computed once the message is in, shape (M,) | s |
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.costs.sync_cost import message_costs
from autotune.costs.timing import needed_times_s, ready_times_s
from autotune.strategy_space.plan import Plan
from autotune.workload import Workload

NODES = 200
"""Orders that a search looks at; nearly all are proved optimal before."""
CLOSE = 1e-3
"""Share of the period below which a better order is no longer looked for: costs are not known that well."""


@dataclass(frozen=True)
class Ordered:
    """`order` (M,): numbers of the messages in issue order. No order has a shorter period than `bound_s`."""

    order: list[int]
    period_s: float
    bound_s: float


def channel_ends_s(ready_s: FloatArray, cost_s: FloatArray) -> FloatArray:
    """End of every message on one channel in issue order: end_i = max(end_(i-1), ready_i) + cost_i.

    Both inputs and the result have shape (M,). Unrolled, end_i = C_i + max over j <= i of (ready_j - C_(j-1))
    with C the running sum of the costs, which needs no loop.
    """
    total = np.cumsum(cost_s)
    ends: FloatArray = total + np.maximum.accumulate(ready_s - (total - cost_s))
    return ends


def cross_step_period_s(
    ready_s: FloatArray, cost_s: FloatArray, needed_s: FloatArray, start_s: float, forward_s: float
) -> float:
    """The steady state's seconds per step; messages stand in issue order."""
    ends_s = channel_ends_s(ready_s, cost_s)
    return float(max(start_s + forward_s, (ends_s + (forward_s - needed_s)).max(initial=0.0)))


@dataclass(frozen=True)
class MessageTimes:
    """Of the messages of a plan, in its order; `start_s` and `forward_s` of its workload."""

    ready_s: FloatArray
    cost_s: FloatArray
    needed_s: FloatArray
    start_s: float
    forward_s: float

    @staticmethod
    def of(plan: Plan, workload: Workload, cluster: Cluster) -> MessageTimes:
        """Sending is taken to cost the computation nothing: what it takes delays all orders alike."""
        ready_s, needed_s = ready_times_s(workload).tolist(), needed_times_s(workload).tolist()
        members = [
            {workload.index[part.variable] for part in message.slices} for message in plan.messages
        ]
        return MessageTimes(
            np.array([max(ready_s[position] for position in own) for own in members]),
            message_costs(plan, cluster, workload).channel_s,
            np.array([min(needed_s[position] for position in own) for own in members]),
            workload.backward_s + workload.update_s,
            workload.forward_s,
        )

    @property
    def period_s(self) -> float:
        """In the order in which they stand."""
        return cross_step_period_s(
            self.ready_s, self.cost_s, self.needed_s, self.start_s, self.forward_s
        )

    def ordered(self, nodes: int) -> Ordered:
        return planned_order(
            self.ready_s, self.cost_s, self.needed_s, self.start_s, self.forward_s, nodes
        )


def planned_order(
    ready_s: FloatArray,
    cost_s: FloatArray,
    needed_s: FloatArray,
    start_s: float,
    forward_s: float,
    nodes: int = NODES,
) -> Ordered:
    """The issue order with the shortest period that was found in at most `nodes` tries; the same in every process."""
    search = _Carlier(ready_s, cost_s, forward_s - needed_s, start_s + forward_s)
    search.branch(search.ready_s.tolist(), search.tail_s.tolist(), search.least_s, nodes)
    return Ordered(search.order, search.period_s, search.bound_s)


class _Carlier:
    """The best order so far, and the branch and bound that improves it."""

    def __init__(
        self, ready_s: FloatArray, cost_s: FloatArray, tail_s: FloatArray, least_s: float
    ) -> None:
        self.ready_s, self.cost_s, self.tail_s, self.least_s = ready_s, cost_s, tail_s, least_s
        self.costs: list[float] = cost_s.tolist()
        self.order: list[int] = []
        self.period_s = float("inf")
        self.bound_s = least_s

    def branch(self, ready_s: list[float], tail_s: list[float], bound_s: float, nodes: int) -> None:
        """Best first: of the open nodes the one with the lowest bound; each is (bound, number, heads, tails)."""
        opened = [(bound_s, 0, ready_s, tail_s)]
        made = 0
        while opened and nodes > 0:
            bound_s, _, ready_s, tail_s = heapq.heappop(opened)
            if bound_s >= self.period_s * (1 - CLOSE):
                heapq.heappush(opened, (bound_s, 0, ready_s, tail_s))
                break
            nodes -= 1
            order = issue_order(ready_s, self.costs, [-tail for tail in tail_s])
            self._keep(order)
            critical = self._critical(order, ready_s, tail_s)
            if critical is None:
                continue  # Schrage's rule is optimal here
            block, other = critical
            first_s, after_s = min(ready_s[j] for j in block), min(tail_s[j] for j in block)
            taken_s = sum(self.costs[j] for j in block)
            within_s = first_s + taken_s + after_s
            with_other_s = (
                min(first_s, ready_s[other])
                + taken_s
                + self.costs[other]
                + min(after_s, tail_s[other])
            )
            bound_s = max(bound_s, within_s, with_other_s)
            before = list(tail_s)  # `other` goes before the block
            before[other] = max(before[other], taken_s + after_s)
            behind = list(ready_s)  # or behind it
            behind[other] = max(behind[other], first_s + taken_s)
            for heads, tails in ((ready_s, before), (behind, tail_s)):
                made += 1
                own_s = max(bound_s, heads[other] + self.costs[other] + tails[other])
                if own_s < self.period_s:
                    heapq.heappush(opened, (own_s, made, heads, tails))
        self.bound_s = min(self.period_s, opened[0][0]) if opened else self.period_s

    def _keep(self, order: list[int]) -> None:
        ends_s = channel_ends_s(self.ready_s[order], self.cost_s[order])
        period_s = float(max(self.least_s, (ends_s + self.tail_s[order]).max(initial=0.0)))
        if period_s < self.period_s:
            self.order, self.period_s = order, period_s

    def _critical(
        self, order: list[int], ready_s: list[float], tail_s: list[float]
    ) -> tuple[list[int], int] | None:
        """(messages behind the interfering one in the critical block, the interfering one); None if there is none.

        The block is sent without a gap and ends with the message that determines the period. The last message in it with a shorter
        tail than that one's was sent too early.
        """
        heads, tails = np.array(ready_s)[order], np.array(tail_s)[order]
        costs = self.cost_s[order]
        ends_s = channel_ends_s(heads, costs)
        last = int(np.argmax(ends_s + tails))
        starts_s = ends_s - costs
        gaps = np.flatnonzero(starts_s[1 : last + 1] > ends_s[:last] + 1e-12 * (1 + ends_s[last]))
        first = int(gaps[-1]) + 1 if len(gaps) else 0
        shorter = np.flatnonzero(tails[first:last] < tails[last])
        if not len(shorter):
            return None
        at = first + int(shorter[-1])
        return order[at + 1 : last + 1], order[at]


def issue_order(
    ready_s: Sequence[float], taken_s: Sequence[float], urgency: Sequence[float]
) -> list[int]:
    """The order of messages on one link that is never idle while one is ready: of those the lowest `urgency`, then the first.

    All three have shape (M,): when each message is ready, how long it takes, and how urgent it is.
    """
    arrivals = sorted(range(len(ready_s)), key=lambda number: (ready_s[number], number))
    waiting: list[tuple[float, int]] = []
    order: list[int] = []
    now_s, following = 0.0, 0
    while len(order) < len(arrivals):
        if not waiting:
            now_s = max(now_s, ready_s[arrivals[following]])
        while following < len(arrivals) and ready_s[arrivals[following]] <= now_s:
            heapq.heappush(waiting, (urgency[arrivals[following]], arrivals[following]))
            following += 1
        _, number = heapq.heappop(waiting)
        order.append(number)
        now_s += taken_s[number]
    return order
