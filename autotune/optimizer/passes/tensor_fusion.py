"""Tensor fusion by Theorem 2, and its reverse: messages that wait for a late gradient are cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from autotune.optimizer.edits import can_merge, joined, merged, replanned, signature, split
from autotune.optimizer.state import CriticalPath, State
from autotune.optimizer.theorems import end_tensor_fused_s, tensor_fusion_pays

SINGLES = 6
"""Of the places where fusing pays, how many are also proposed alone, the largest gains first."""
CUTS = 3
"""Places proposed at which a message is cut."""

Pair = tuple[int, int]


class TensorFusion:
    """Alg. 1, lines 18 to 21: along the communication on the critical path, fuse a message with the one before where Theorem 2 says so.

    The paper applies all of a sweep at once. Here the whole sweep, its halves and the places that gain most are proposed, and the
    replay chooses: times after the first fusion of a sweep are predictions of the chain and not of the graph.
    """

    name = "tensor fusion"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        gains = self._sweep(path)
        pairs = [pair for pair, _ in gains]
        for chosen in _portions(pairs):
            yield state.with_strategy(merged(state, path.problem, chosen))
        best = sorted(gains, key=lambda entry: -entry[1])
        for chosen in self._singles([pair for pair, _ in best], path):
            yield state.with_strategy(merged(state, path.problem, chosen))

    @staticmethod
    def _sweep(path: CriticalPath) -> list[tuple[Pair, float]]:
        """(pair, seconds that its fusion alone gains by Theorem 2), walking along the chain with what was fused before."""
        messages, found = path.plan.messages, []
        critical = sorted(path.messages)
        for run in _runs(critical):
            number = run[0]
            free_s = float(path.start_s[number])
            held, held_end_s = [messages[number]], float(path.end_s[number])
            for number in run[1:]:
                message, ready_s = messages[number], float(path.ready_s[number])
                t2_s = path.sync_s([message])
                if can_merge(held[-1], message):
                    t12_s = path.sync_s([joined([*held, message])])
                    if tensor_fusion_pays(held_end_s, ready_s, t2_s, t12_s, free_s):
                        fused_s = end_tensor_fused_s(ready_s, free_s, t12_s)
                        found.append(
                            ((number - 1, number), max(held_end_s, ready_s) + t2_s - fused_s)
                        )
                        held.append(message)
                        held_end_s = fused_s
                        continue
                free_s = held_end_s
                held, held_end_s = [message], max(held_end_s, ready_s) + t2_s
        return found

    @staticmethod
    def _singles(pairs: Sequence[Pair], path: CriticalPath) -> Iterable[list[Pair]]:
        """The first places, each alone; with symmetry the same place of every block that repeats it."""
        if not path.problem.speedups.symmetry:
            yield from ([pair] for pair in pairs[:SINGLES])
            return
        signatures = [signature(message) for message in path.plan.messages]
        proposed: set[tuple[object, object]] = set()
        for first, second in pairs:
            key = signatures[first], signatures[second]
            if key in proposed:
                continue
            proposed.add(key)
            alike: list[Pair] = []
            for pair in pairwise(range(len(signatures))):
                free = not alike or pair[0] > alike[-1][1]
                if (
                    free
                    and (signatures[pair[0]], signatures[pair[1]]) == key
                    and can_merge(*(path.plan.messages[n] for n in pair))
                ):
                    alike.append(pair)
            yield alike
            if len(proposed) == SINGLES:
                return


class TensorSplit:
    """The reverse of Theorem 2: a message on the critical path that waited for its last gradient is cut, the first part sent before.

    The cut is where the chain of the two parts ends earliest; by symmetry each message of the same content is cut there, too.
    """

    name = "tensor split"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        messages = path.plan.messages
        waited = [n for n in path.messages if len(messages[n].slices) > 1]
        largest = sorted(waited, key=lambda n: -messages[n].grad_bytes)[:CUTS]
        first = [n for n in waited[:1] if n not in largest]
        signatures = (
            [signature(message) for message in messages] if path.problem.speedups.symmetry else []
        )
        for number in [*first, *largest]:
            alike = [n for n, own in enumerate(signatures) if own == signatures[number]] or [number]
            for cut in self._cuts(number, path):
                found = state.with_strategy(split(state, path.problem, {n: [cut] for n in alike}))
                yield found
                if state.strategy.cross_step:
                    yield found.with_strategy(replanned(found, path.problem))

    @staticmethod
    def _cuts(number: int, path: CriticalPath) -> list[int]:
        """The best place by the chain, and the middle of the bytes; places inside a group of the coarsened view are left out."""
        message = path.plan.messages[number]
        index = path.workload.index
        parts = sorted(message.slices, key=lambda part: (index[part.variable], part.start))
        group = {position: n for n, own in enumerate(path.problem.groups()) for position in own}
        allowed = [
            cut
            for cut in range(1, len(parts))
            if parts[cut].variable == parts[cut - 1].variable
            or group[index[parts[cut].variable]] != group[index[parts[cut - 1].variable]]
        ]
        if not allowed:
            return []
        total = np.cumsum([part.elements for part in parts]) / message.elements
        ready_s = [path.workload.variables[index[part.variable]].ready_s or 0.0 for part in parts]
        whole_s = path.sync_s([message])
        free_s = float(path.start_s[number]) if path.ready_s[number] < path.start_s[number] else 0.0
        ends = []
        for cut in allowed:
            share = float(total[cut - 1])
            first_s = max(free_s, ready_s[cut - 1]) + share * whole_s
            ends.append(max(first_s, ready_s[-1]) + (1 - share) * whole_s)
        best = allowed[int(np.argmin(ends))]
        middle = min(allowed, key=lambda cut: abs(float(total[cut - 1]) - 0.5))
        return list(dict.fromkeys((best, middle)))


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Consecutive numbers together."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _portions(pairs: Sequence[Pair]) -> Iterable[Sequence[Pair]]:
    """All of them, and where there are several the first and the second half."""
    if pairs:
        yield pairs
    if len(pairs) > 1:
        middle = len(pairs) // 2
        yield pairs[:middle]
        yield pairs[middle:]
