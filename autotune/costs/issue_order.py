"""Synchronization across steps: the step's length, and the issue order that makes it shortest.

The closed form has one channel that sends a plan's messages strictly in order. (The runtime has one
per step of a message, so a server's two directions overlap, and perhaps two messages in flight on
each; only the replay models this.) A forward pass waits for a variable where it first reads it. Its
end waits for everything still being sent, because the next backward pass fills the same buffers. So
the channel is empty when a backward pass starts, and all steps are equal. With time 0 at the start
of the backward pass

    end_i  = max(end_(i-1), ready_i) + cost_i
    period = max(start + forward, max over i of (end_i + forward - needed_i))

because waiting for a variable delays all computation after it. This is one machine with heads
(ready), times (cost) and tails (forward - needed): 1 | r_j, q_j | C_max. Carlier's branch and bound
finds its order (European Journal of Operational Research 11, 1982). The first node is Schrage's
rule: of the ready messages, send the one that is needed first.

| symbol | meaning | unit |
|---|---|---|
| M | messages | - |
| ready | when a message's last gradient is ready, from the start of the backward pass, (M,) | s |
| cost | how long a message holds the channel, (M,) | s |
| needed | when a message's first variable is read, from the start of the forward pass, (M,) | s |
| start | earliest start of the next forward pass: backward pass and what follows it | s |
| tail | forward - needed: computation left once the message has arrived, (M,) | s |
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
"""Orders that a search tries; nearly all searches prove their optimum earlier."""
CLOSE = 1e-3
"""Share of the period below which no better order is sought: costs are less certain than this."""


@dataclass(frozen=True)
class Ordered:
    """`order` (M,): message numbers in issue order. No order has a period below `bound_s`."""

    order: list[int]
    period_s: float
    bound_s: float


def channel_ends_s(ready_s: FloatArray, cost_s: FloatArray) -> FloatArray:
    """End of each message on one channel in issue order: end_i = max(end_(i-1), ready_i) + cost_i.

    Inputs and result have shape (M,). Unrolled, end_i = C_i + max over j <= i of (ready_j -
    C_(j-1)) with C the running sum of the costs, which needs no loop.
    """
    total = np.cumsum(cost_s)
    ends: FloatArray = total + np.maximum.accumulate(ready_s - (total - cost_s))
    return ends


def cross_step_period_s(
    ready_s: FloatArray, cost_s: FloatArray, needed_s: FloatArray, start_s: float, forward_s: float
) -> float:
    """Seconds per step in the steady state, with messages in issue order."""
    ends_s = channel_ends_s(ready_s, cost_s)
    return float(max(start_s + forward_s, (ends_s + (forward_s - needed_s)).max(initial=0.0)))


def half_crossing_period_s(
    ready_s: FloatArray,
    cost_s: FloatArray,
    needed_s: FloatArray,
    step_s: tuple[float, float, float],
    results: Sequence[int],
) -> float:
    """Seconds per step if results, half of each message, wait for the norms of all gradients.

    `step_s`: backward pass, update, and forward pass. `results` (M,): messages, by number, in the
    order in which the second halves are sent.
    """
    backward_s, update_s, forward_s = step_s
    norms_s = float(channel_ends_s(ready_s, cost_s / 2)[-1])
    order = np.array(results, dtype=np.int64)
    return cross_step_period_s(
        np.full(len(order), norms_s),
        cost_s[order] / 2,
        needed_s[order],
        max(backward_s, norms_s) + update_s,
        forward_s,
    )


@dataclass(frozen=True)
class MessageTimes:
    """Times of a plan's messages, in its order; `start_s` and `forward_s` of its workload."""

    ready_s: FloatArray
    cost_s: FloatArray
    needed_s: FloatArray
    start_s: float
    forward_s: float

    @staticmethod
    def of(plan: Plan, workload: Workload, cluster: Cluster) -> MessageTimes:
        """Sending is assumed to cost no computation time, because it delays all orders equally.

        The update is assumed to pass before the forward pass (`early_update` = 1).
        """
        ready_s, needed_s = ready_times_s(workload).tolist(), needed_times_s(workload).tolist()
        members = [{workload.index[p.variable] for p in m.slices} for m in plan.messages]
        return MessageTimes(
            np.array([max(ready_s[at] for at in positions) for positions in members]),
            message_costs(plan, cluster, workload).channel_s,
            np.array([min(needed_s[at] for at in positions) for positions in members]),
            workload.backward_s + workload.update_s,
            workload.forward_s,
        )

    @property
    def period_s(self) -> float:
        """The period in the present order."""
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
    """Return the order with the shortest period found in at most `nodes` tries.

    It is the same in every process.
    """
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
        """Explore the open node with the lowest bound first: (bound, number, heads, tails)."""
        opened = [(bound_s, 0, ready_s, tail_s)]
        count = 0
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
            ends_s = min(first_s, ready_s[other]), min(after_s, tail_s[other])
            with_other_s = ends_s[0] + taken_s + self.costs[other] + ends_s[1]
            bound_s = max(bound_s, within_s, with_other_s)
            before = list(tail_s)  # `other` goes before the block
            before[other] = max(before[other], taken_s + after_s)
            behind = list(ready_s)  # or behind it
            behind[other] = max(behind[other], first_s + taken_s)
            for heads, tails in ((ready_s, before), (behind, tail_s)):
                count += 1
                child_s = max(bound_s, heads[other] + self.costs[other] + tails[other])
                if child_s < self.period_s:
                    heapq.heappush(opened, (child_s, count, heads, tails))
        self.bound_s = min(self.period_s, opened[0][0]) if opened else self.period_s

    def _keep(self, order: list[int]) -> None:
        ends_s = channel_ends_s(self.ready_s[order], self.cost_s[order])
        period_s = float(max(self.least_s, (ends_s + self.tail_s[order]).max(initial=0.0)))
        if period_s < self.period_s:
            self.order, self.period_s = order, period_s

    def _critical(
        self, order: list[int], ready_s: list[float], tail_s: list[float]
    ) -> tuple[list[int], int] | None:
        """Return (messages after the interfering one in the critical block, the interfering one),
        or None.

        The block is sent without a gap and ends with the message that determines the period. The
        interfering message is the last one in it with a shorter tail than that message: it was sent
        too early.
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
    """The order on one link that is never idle while a message is ready.

    It sends the ready message with the lowest `urgency`, then the first. All inputs have shape
    (M,): when each message is ready, how long it takes, and its urgency.
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
