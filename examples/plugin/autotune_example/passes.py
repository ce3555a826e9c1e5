"""A pass of the optimizer: the largest critical message through a server."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.optimizer.edits import like
from autotune.optimizer.state import CriticalPath, State
from autotune.strategy_space.strategy import Shard, Synchronizer


class LargestThroughServer:
    """Propose to send the largest message on the critical path through a server on rank 0."""

    name = "largest through a server"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        synchronizers = path.problem.space.synchronizers
        if not path.messages or Synchronizer.PARAMETER_SERVER not in synchronizers:
            return
        largest = max(path.messages, key=lambda number: path.plan.messages[number].grad_bytes)
        server = Shard(Synchronizer.PARAMETER_SERVER, placement=0)
        yield state.with_strategy(like(state, path.problem, {largest: server}))
