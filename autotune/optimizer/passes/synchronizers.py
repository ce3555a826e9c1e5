"""Which primitive carries a message, by its time alone (partial replay)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autotune.optimizer.edits import like
from autotune.optimizer.state import CriticalPath, State
from autotune.strategy_space.plan import PRIMITIVE_OF, Message
from autotune.strategy_space.strategy import ROOTED, Shard, SparseHandling


class Synchronizers:
    """For the messages on the critical path the primitive with the shortest t_sync; for all messages the one that is shortest in sum."""

    name = "synchronizer"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        dense = [n for n, message in enumerate(path.plan.messages) if message.sparse is SparseHandling.DENSE]
        options = self._options(path)
        if len(options) < 2 or not dense:
            return
        times = {n: [self._seconds(path, path.plan.messages[n], option) for option in options] for n in dense}
        each = {n: options[own.index(min(own))] for n, own in times.items()}
        changed = {n: self._shard(state, path, n, each[n]) for n in dense if not self._is(path.plan.messages[n], each[n])}
        if changed:
            yield state.with_strategy(like(state, path.problem, changed))
        critical = {n: shard for n, shard in changed.items() if n in set(path.messages)}
        if critical and len(critical) < len(changed):
            yield state.with_strategy(like(state, path.problem, critical))
        totals = [sum(own[number] for own in times.values()) for number in range(len(options))]
        for number in sorted(range(len(options)), key=lambda at: (totals[at], at))[:2]:
            yield state.with_strategy(like(state, path.problem, {n: self._shard(state, path, n, options[number]) for n in dense}))

    @staticmethod
    def _options(path: CriticalPath) -> list[Shard]:
        problem = path.problem
        levels = (False, True) if problem.space.hierarchy_for(problem.cluster) else (False,)
        return [
            Shard(kind, placement=0 if kind in ROOTED else None, hierarchical=level)
            for kind in problem.space.synchronizers
            for level in levels
        ]

    @staticmethod
    def _is(message: Message, option: Shard) -> bool:
        return message.primitive is PRIMITIVE_OF[option.synchronizer] and message.hierarchical == option.hierarchical

    @staticmethod
    def _seconds(path: CriticalPath, message: Message, option: Shard) -> float:
        return path.sync_s(
            [
                replace(
                    message,
                    primitive=PRIMITIVE_OF[option.synchronizer],
                    hierarchical=option.hierarchical,
                    owner=None if option.placement is None else (message.owner or 0),
                )
            ]
        )

    @staticmethod
    def _shard(state: State, path: CriticalPath, number: int, option: Shard) -> Shard:
        """The option with the compressor that the message has."""
        message = path.plan.messages[number]
        return replace(option, compressor=message.compressor, ratio=message.ratio, rank=message.rank)
