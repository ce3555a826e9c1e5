"""The groups of ranks that sum a plan's messages, and two-level sums.

A hierarchical message is a reduce inside each host to its leader, the message's own synchronizer
among the leaders, and a broadcast inside each host (AutoSync, supplement sec. 2, I_p). The leader
of the owner's host is the owner. The leader of any other host is its lowest rank.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from autotune.strategy_space.plan import Message, Plan
from autotune.strategy_space.shares import shares_of_hosts
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.exchange.compressed import flat_exchange
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.ranks import RankGroups
from runtime_rewriter.pytorch.exchange.residuals import Feedback
from runtime_rewriter.pytorch.exchange.sums import Chain, Exchange, broadcast, reduce


@dataclass(frozen=True)
class PlanGroups:
    """The groups of one plan: the world in ring order, and the hosts if a message needs them.

    The ring order is the order of the ranks in their process groups. Gloo's ring collectives
    (all-reduce, reduce-scatter, all-gather) send from a rank to its neighbour, so they follow it
    exactly. Gloo's trees (reduce, broadcast) and stars (gather, scatter) have other shapes. NCCL
    takes the order as its numbering of the ranks, and chooses its rings by the machines' topology:
    between hosts it mostly follows the numbering, without a promise.
    """

    world: RankGroups
    hosts: RankGroups | None = None

    @staticmethod
    def of(plan: Plan, lanes: Lanes) -> PlanGroups:
        """Collective. Raises `InvalidStrategy` if the plan needs hosts and they are unknown."""
        world = RankGroups.world(lanes.ranks.size)
        if plan.ring_order is not None:
            world = RankGroups((plan.ring_order,))
        needs_hosts = any(message.hierarchical for message in plan.messages)
        return PlanGroups(world, lanes.hosts() if needs_hosts and lanes.ranks.size > 1 else None)

    def two_level(self, message: Message) -> bool:
        """Whether the message is hierarchical, and some of several hosts holds several ranks."""
        parts = self.hosts.parts if self.hosts is not None else ()
        return message.hierarchical and len(parts) > 1 and max(map(len, parts)) > 1

    def leaders(self, owner: int | None) -> RankGroups:
        """One rank of each host, in the order of the world's ring."""
        assert self.hosts is not None
        leaders = {owner if owner in part else min(part) for part in self.hosts.parts}
        return RankGroups((tuple(rank for rank in self.world.parts[0] if rank in leaders),))

    def owned_by_leaders(self, message: Message) -> Message:
        """The two-level message with the shares of each host's ranks given to its leader."""
        assert self.hosts is not None
        leaders = self.leaders(message.owner).parts[0]
        return replace(message, shares=shares_of_hosts(message.shares, self.hosts.parts, leaders))

    def multiple(self, message: Message) -> int:
        """The number of the message's values must be a multiple of this."""
        if message.synchronizer is Synchronizer.DIRECT_EXCHANGE:
            return 1
        among = self.leaders(message.owner) if self.two_level(message) else self.world
        return len(among.parts[0])


def sum_of(
    message: Message,
    values: Tensor,
    lanes: Lanes,
    plan_groups: PlanGroups,
    feedback: Feedback,
    first_lane: int = 0,
) -> Exchange:
    """Build the message's sum over all ranks; `values` have `padded_elements`. Collective.

    Only the leaders of hosts compress, so only they have residuals of a hierarchical message.
    """
    if not plan_groups.two_level(message):
        return flat_exchange(message, values, lanes, plan_groups.world, feedback, first_lane)
    hosts = plan_groups.hosts
    assert hosts is not None
    leaders = plan_groups.leaders(message.owner)
    roots = leaders.parts[0]
    message = plan_groups.owned_by_leaders(message)
    inside = reduce(values, lanes, hosts, roots, first_lane)
    among = flat_exchange(message, values, lanes, leaders, feedback, first_lane + 1)
    after = among.steps()[-1][0] + 1
    owned = None
    if among.owned is not None:
        owned = replace(among.owned, steps=1 + among.owned.steps)
    return Chain(inside, among, broadcast(values, lanes, hosts, roots, after), owned=owned)
