"""Who takes part in the messages of a plan: the world along its ring, or each host on its own and one leader of each.

A hierarchical message is a reduce inside each host to its leader, the message's primitive among the leaders, and a broadcast
inside (AutoSync, supplement sec. 2, I_p).  The leader of the owner's host is the owner, that of the others their lowest rank.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from autotune.strategy_space.plan import Message, Plan
from runtime_rewriter.pytorch.exchange.compressed import flat_exchange
from runtime_rewriter.pytorch.exchange.lanes import Lanes
from runtime_rewriter.pytorch.exchange.ranks import RankGroups
from runtime_rewriter.pytorch.exchange.residuals import Feedback
from runtime_rewriter.pytorch.exchange.sums import Broadcast, Chain, Exchange, Reduce


@dataclass(frozen=True)
class PlanGroups:
    """The plan_groups of one plan. `hosts` is None where no message asks for them.

    A ring order is the order of the ranks in their process groups.  Gloo's ring collectives (all-reduce, reduce-scatter,
    all-gather) only send from a rank of the group to its neighbour, so they follow it exactly; its trees (reduce, broadcast)
    and the star of gather and scatter have another shape.  NCCL takes the order as its numbering of the ranks, and chooses
    its rings by the machines' topology itself: between hosts it mostly follows the numbering, but does not promise to.
    """

    world: RankGroups
    hosts: RankGroups | None = None

    @staticmethod
    def of(plan: Plan, lanes: Lanes) -> PlanGroups:
        """Collective: every rank calls it with the same plan. Raises `InvalidStrategy` where hosts are needed and unknown."""
        world = (
            RankGroups.world(lanes.ranks.size)
            if plan.ring_order is None
            else RankGroups((plan.ring_order,))
        )
        asked = any(message.hierarchical for message in plan.messages) and lanes.ranks.size > 1
        return PlanGroups(world, lanes.hosts() if asked else None)

    def two_level(self, message: Message) -> bool:
        """Hierarchy means something only between hosts of which one holds several ranks."""
        parts = self.hosts.parts if self.hosts is not None else ()
        return message.hierarchical and len(parts) > 1 and max(map(len, parts)) > 1

    def leaders(self, owner: int | None) -> RankGroups:
        """One rank of each host, in the order of the world's ring."""
        assert self.hosts is not None
        chosen = {owner if owner in part else min(part) for part in self.hosts.parts}
        return RankGroups((tuple(rank for rank in self.world.parts[0] if rank in chosen),))

    def multiple(self, message: Message) -> int:
        """The number of a message's values must be a multiple of this."""
        return (
            len(self.leaders(message.owner).parts[0])
            if self.two_level(message)
            else len(self.world.parts[0])
        )


def sum_of(
    message: Message,
    values: Tensor,
    lanes: Lanes,
    plan_groups: PlanGroups,
    feedback: Feedback,
    first_lane: int = 0,
) -> Exchange:
    """The sum of `values` over all ranks, in the way that the message says. Collective; `values` as `padded_elements` says.

    Only the leaders of hosts compress what they send, so that only they have residuals of a hierarchical message.
    """
    if not plan_groups.two_level(message):
        return flat_exchange(message, values, lanes, plan_groups.world, feedback, first_lane)
    assert plan_groups.hosts is not None
    leaders = plan_groups.leaders(message.owner)
    inside = Reduce(values, lanes, plan_groups.hosts, leaders.parts[0], first_lane)
    among = flat_exchange(message, values, lanes, leaders, feedback, first_lane + 1)
    outside = Broadcast(
        values, lanes, plan_groups.hosts, leaders.parts[0], among.steps()[-1][0] + 1
    )
    return Chain(inside, among, outside)
