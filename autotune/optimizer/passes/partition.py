"""Tensor partition: OPTPARTNUM of Alg. 1, by a grid of partial replays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autotune.optimizer.edits import cut_variables, partition_of, replanned, shards_alone, signature
from autotune.optimizer.state import CriticalPath, State
from autotune.strategy_space.plan import Message
from autotune.strategy_space.strategy import ROOTED, Shard, SparseHandling

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Tried numbers of parts, as far as the variable's rows and the space allow."""
TENSORS = 4
"""Tensors on the critical path that are examined, the largest first."""
URGENT = (2, 4, 8)
"""Parts proposed across steps, so that urgent messages need not wait for a large tensor."""


class Partition:
    """Cut tensors with messages of their own evenly by OPTPARTNUM.

    Parts on servers go to the servers that would finish first. t_sync considers a single tensor.
    Across steps, parts also let urgent messages pass, so some cuts are proposed whatever t_sync is.
    """

    name = "tensor partition"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        tensors = self._tensors(state, path)
        best = {
            position: count
            for position, now in tensors.items()
            if (count := self._optimal(state, path, position, now)) != now
        }
        if best:
            yield state.with_strategy(
                cut_variables(state, path.problem, self._with_repeats(best, state, path))
            )
        if len(best) > 1:
            for position, count in best.items():
                yield state.with_strategy(
                    cut_variables(
                        state, path.problem, self._with_repeats({position: count}, state, path)
                    )
                )
        if state.strategy.cross_step:
            for position, now in list(tensors.items())[:2]:
                for count in URGENT:
                    if count != now and self._parts(state, path, position, count) is not None:
                        cut = cut_variables(state, path.problem, {position: count})
                        parts = state.with_strategy(cut)
                        # in the old order the parts would follow each other and let nothing pass
                        yield parts.with_strategy(replanned(parts, path.problem))

    @staticmethod
    def _tensors(state: State, path: CriticalPath) -> dict[int, int]:
        """Position -> number of parts, of the largest critical dense variables, largest first.

        The variables have messages of their own.
        """
        index, variables = path.problem.workload.index, path.problem.workload.variables
        alone: dict[int, int] = {}
        for number in path.messages:
            message = path.plan.messages[number]
            position = index[message.slices[0].variable]
            if message.sparse is SparseHandling.DENSE and has_own_messages(
                state, variables[position].name
            ):
                alone[position] = len(state.strategy.by_name[variables[position].name].shards)
        largest = sorted(alone, key=lambda position: (-variables[position].grad_bytes, position))
        return {position: alone[position] for position in largest[:TENSORS]}

    def _optimal(self, state: State, path: CriticalPath, position: int, now: int) -> int:
        """k* of the grid; `now`, the present number of parts, if nothing is faster."""
        messages = {
            count: parts
            for count in {*GRID, now}
            if (parts := self._parts(state, path, position, count)) is not None
        }
        times = {count: path.sync_s(parts) for count, parts in sorted(messages.items())}
        if now not in times:  # cut along another axis: leave it
            return now
        best = min(times, key=lambda count: (times[count], count))
        return best if times[best] < times[now] else now

    @staticmethod
    def _parts(state: State, path: CriticalPath, position: int, count: int) -> list[Message] | None:
        name = path.problem.workload.variables[position].name
        shard: Shard = state.strategy.by_name[name].shards[0]
        parts = shards_alone(path.problem, shard, position, count)
        if parts is not None and shard.synchronizer in ROOTED:
            ranks = path.problem.cluster.world_size
            return [replace(part, owner=number % ranks) for number, part in enumerate(parts)]
        return parts

    @staticmethod
    def _with_repeats(wanted: dict[int, int], state: State, path: CriticalPath) -> dict[int, int]:
        """By symmetry, the same for variables at the same place of other blocks that allow it."""
        if not path.problem.speedups.symmetry:
            return wanted
        index = path.problem.workload.index
        alone: dict[tuple[object, ...], list[int]] = {}
        of_position: dict[int, tuple[object, ...]] = {}
        for message in path.plan.messages:
            if message.sparse is SparseHandling.DENSE and has_own_messages(
                state, message.slices[0].variable
            ):
                position = index[message.slices[0].variable]
                of_position.setdefault(position, signature(message))
                alone.setdefault(of_position[position], []).append(position)
        counts = dict(wanted)
        for position, count in wanted.items():
            for other in alone.get(of_position.get(position, ()), ()):
                # equal messages may hold variables of another dtype or shape
                if count == 1 or partition_of(path.problem, other, count) is not None:
                    counts.setdefault(other, count)
        return counts


def has_own_messages(state: State, variable: str) -> bool:
    """Whether no shard of the variable shares a message with another variable."""
    return all(shard.group is None for shard in state.strategy.by_name[variable].shards)
