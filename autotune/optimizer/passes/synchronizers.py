"""The synchronizer of each message, by the time of the message alone (partial replay)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autotune.optimizer.edits import like
from autotune.optimizer.state import CriticalPath, State
from autotune.strategy_space.builders.direct import pieces_by_size
from autotune.strategy_space.owners import by_bandwidth
from autotune.strategy_space.plan import Message
from autotune.strategy_space.strategy import ROOTED, Shard, SparseHandling, Synchronizer

SIZES = 8
"""Sizes at which an option is replayed."""


class Synchronizers:
    """Propose the synchronizer with the shortest t_sync, by message and for all messages."""

    name = "synchronizer"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        dense = [
            n
            for n, message in enumerate(path.plan.messages)
            if message.sparse is SparseHandling.DENSE
        ]
        options = self._options(path)
        if len(options) < 2 or not dense:
            return
        times = self._times(path, dense, options)
        each = {n: options[seconds.index(min(seconds))] for n, seconds in times.items()}
        changed = {
            n: self._shard(state, path, n, each[n])
            for n in dense
            if not self._is(path.plan.messages[n], each[n])
        }
        if changed:
            yield state.with_strategy(like(state, path.problem, changed))
        critical = {n: shard for n, shard in changed.items() if n in set(path.messages)}
        if critical and len(critical) < len(changed):
            yield state.with_strategy(like(state, path.problem, critical))
        totals = [sum(each_s) for each_s in zip(*times.values(), strict=True)]
        for number in sorted(range(len(options)), key=lambda at: (totals[at], at))[:2]:
            yield state.with_strategy(
                like(
                    state,
                    path.problem,
                    {n: self._shard(state, path, n, options[number]) for n in dense},
                )
            )

    @staticmethod
    def _options(path: CriticalPath) -> list[Shard]:
        problem = path.problem
        levels = (False, True) if problem.space.hierarchy_for(problem.cluster) else (False,)
        owners = {level: by_bandwidth(problem.cluster, level) for level in levels}
        return [
            Shard(
                kind,
                placement=0 if kind in ROOTED else None,
                hierarchical=level,
                shares=owners[level] if kind is Synchronizer.DIRECT_EXCHANGE else None,
            )
            for kind in problem.space.synchronizers
            for level in levels
        ]

    def _times(
        self, path: CriticalPath, dense: Sequence[int], options: Sequence[Shard]
    ) -> dict[int, list[float]]:
        """t_sync of every message by every option: replayed at some sizes, linear between them."""
        kinds: dict[object, list[int]] = {}
        for number in dense:
            message = path.plan.messages[number]
            kinds.setdefault(
                (message.compressor, message.dtype, message.ratio, message.rank), []
            ).append(number)
        times: dict[int, list[float]] = {}
        for numbers in kinds.values():
            by_size = sorted(numbers, key=lambda n: path.plan.messages[n].elements)
            sizes = np.array([path.plan.messages[n].elements for n in by_size], dtype=np.float64)
            steps = np.linspace(0.0, 1.0, SIZES)
            spread = sizes[0] ** (1 - steps) * sizes[-1] ** steps  # equal ratios
            probed = np.unique(np.clip(np.searchsorted(sizes, spread), 0, len(by_size) - 1))
            seconds = [
                np.interp(
                    sizes,
                    sizes[probed],
                    [
                        self._seconds(path, path.plan.messages[by_size[at]], option)
                        for at in probed.tolist()
                    ],
                )
                for option in options
            ]
            for at, n in enumerate(by_size):
                times[n] = [float(of_option[at]) for of_option in seconds]
        return times

    @staticmethod
    def _is(message: Message, option: Shard) -> bool:
        return (
            message.synchronizer is option.synchronizer
            and message.hierarchical == option.hierarchical
        )

    @staticmethod
    def _seconds(path: CriticalPath, message: Message, option: Shard) -> float:
        return path.sync_s(
            [
                replace(
                    message,
                    synchronizer=option.synchronizer,
                    hierarchical=option.hierarchical,
                    owner=option.placement,
                    shares=option.shares,
                    pieces=_pieces(message, option),
                )
            ]
        )

    @staticmethod
    def _shard(state: State, path: CriticalPath, number: int, option: Shard) -> Shard:
        """The option with the message's compressor."""
        message = path.plan.messages[number]
        return replace(
            option,
            compressor=message.compressor,
            ratio=message.ratio,
            rank=message.rank,
            pieces=_pieces(message, option),
        )


def _pieces(message: Message, option: Shard) -> int:
    """Pieces of a direct exchange by the message's size."""
    direct = option.synchronizer is Synchronizer.DIRECT_EXCHANGE
    return pieces_by_size(message) if direct else 1
