"""Tensor fusion by Theorem 2, and the reverse: cut messages that wait for a late gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from autotune.arrays import FloatArray
from autotune.costs.timing import ready_times_s
from autotune.optimizer.edits import can_merge, joined, merged, replanned, signature, split
from autotune.optimizer.state import CriticalPath, State
from autotune.optimizer.theorems import end_tensor_fused_s, tensor_fusion_pays

SINGLES = 6
"""Fusions that are also proposed alone, the largest gains first."""
CUTS = 3
"""Messages that are proposed for a cut."""

Pair = tuple[int, int]


class TensorFusion:
    """Alg. 1, lines 18 to 21: fuse critical messages with the one before by Theorem 2.

    The paper applies a whole sweep at once. Here the sweep, its halves and the largest gains are
    proposed, and the replay chooses: after the first fusion of a sweep, times are predictions of
    the chain and not of the graph.
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
        """(pair, gain of its fusion in seconds), along the chain with earlier fusions."""
        messages = path.plan.messages
        gains: list[tuple[Pair, float]] = []
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
                        gain_s = max(held_end_s, ready_s) + t2_s - fused_s
                        gains.append(((number - 1, number), gain_s))
                        held.append(message)
                        held_end_s = fused_s
                        continue
                free_s = held_end_s
                held, held_end_s = [message], max(held_end_s, ready_s) + t2_s
        return gains

    @staticmethod
    def _singles(pairs: Sequence[Pair], path: CriticalPath) -> Iterable[list[Pair]]:
        """The first pairs, each alone; with symmetry, the same place of every repeated block."""
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
            repeats: list[Pair] = []
            for pair in pairwise(range(len(signatures))):
                free = not repeats or pair[0] > repeats[-1][1]
                equal = (signatures[pair[0]], signatures[pair[1]]) == key
                if free and equal and can_merge(*(path.plan.messages[n] for n in pair)):
                    repeats.append(pair)
            yield repeats
            if len(proposed) == SINGLES:
                return


class TensorSplit:
    """The reverse of Theorem 2: cut a critical message that waits for its last gradient.

    The chain of the two parts ends earliest with this cut. By symmetry, each message of the same
    content gets the same cut.
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
        ready_of_variable_s = ready_times_s(path.workload)
        for number in [*first, *largest]:
            repeats = [n for n, each in enumerate(signatures) if each == signatures[number]]
            for cut in self._cuts(number, path, ready_of_variable_s):
                cuts = {n: [cut] for n in repeats or [number]}
                parts = state.with_strategy(split(state, path.problem, cuts))
                yield parts
                if state.strategy.cross_step:
                    yield parts.with_strategy(replanned(parts, path.problem))

    @staticmethod
    def _cuts(number: int, path: CriticalPath, ready_of_variable_s: FloatArray) -> list[int]:
        """The best cut by the chain, and the middle of the bytes; groups are never cut.

        `ready_of_variable_s`: when the gradient of each variable is ready, shape (V,).
        """
        message = path.plan.messages[number]
        index = path.workload.index
        parts = sorted(message.slices, key=lambda part: (index[part.variable], part.start))
        groups = enumerate(path.problem.groups())
        group = {position: n for n, positions in groups for position in positions}
        allowed = [
            cut
            for cut in range(1, len(parts))
            if parts[cut].variable == parts[cut - 1].variable
            or group[index[parts[cut].variable]] != group[index[parts[cut - 1].variable]]
        ]
        if not allowed:
            return []
        total = np.cumsum([part.elements for part in parts]) / message.elements
        ready_s = ready_of_variable_s[[index[part.variable] for part in parts]]
        whole_s = path.sync_s([message])
        # a message starts later than it is ready on a free channel, too: it is packed and issued
        before_s = path.end_s[:number].max(initial=0.0)
        free_s = min(float(path.start_s[number]), float(before_s))
        ends = []
        for cut in allowed:
            share = float(total[cut - 1])
            first_s = max(free_s, ready_s[cut - 1]) + share * whole_s
            ends.append(max(first_s, ready_s[-1]) + (1 - share) * whole_s)
        best = allowed[int(np.argmin(ends))]
        middle = min(allowed, key=lambda cut: abs(float(total[cut - 1]) - 0.5))
        return list(dict.fromkeys((best, middle)))


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Runs of consecutive numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _portions(pairs: Sequence[Pair]) -> Iterable[Sequence[Pair]]:
    """All pairs, then the first and the second half of several."""
    if pairs:
        yield pairs
    if len(pairs) > 1:
        middle = len(pairs) // 2
        yield pairs[:middle]
        yield pairs[middle:]
