"""The issue order, and synchronization across the step; either alone gains little.

Carlier's search (`costs.issue_order`) finds the best order for one channel with heads and tails.
Here it gets the durations from the replay. Moves around the message that ends last correct it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from autotune.costs.issue_order import planned_order
from autotune.costs.timing import needed_times_s
from autotune.optimizer.edits import draft_of, reordered
from autotune.optimizer.state import CriticalPath, State

NODES = 60
"""Orders that one search examines."""
MOVES = 6
"""Proposed moves of one message around the end of the critical path."""


class CrossStep:
    """Send across the step in the best order, with one or more messages in flight, or within it."""

    name = "cross-step overlap"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        if not path.problem.space.cross_step:
            return
        draft = draft_of(state, path.problem)
        counts = range(1, path.problem.space.most_in_flight + 1)
        if draft.cross_step:
            for count in counts:
                if count != state.strategy.in_flight:
                    yield state.with_strategy(replace(state.strategy, in_flight=count))
            draft.cross_step, draft.in_ready_order = False, True
            yield state.with_strategy(draft.written())
            return
        draft.cross_step = True
        draft.order_by_need()
        # the present number suits direct exchanges, which may have more in flight
        for draft.in_flight in sorted({*counts, state.strategy.in_flight}):
            yield state.with_strategy(draft.written())


class IssueOrder:
    """Reorder the messages of a plan across steps."""

    name = "issue order"

    def propose(self, state: State, path: CriticalPath) -> Iterable[State]:
        count = len(path.plan.messages)
        if not state.strategy.cross_step or count < 2:
            return
        if path.plan.results is not None:
            return  # priorities have no effect
        needed_s = self._needed_s(path)
        workload = path.workload
        taken_s = np.maximum(path.end_s - np.maximum(path.start_s, path.ready_s), 0.0)
        apart_s = np.array([path.sync_s([message]) for message in path.plan.messages])
        for cost_s in (apart_s, np.minimum(taken_s, apart_s)):
            start_s = workload.backward_s + workload.update_s
            order = planned_order(
                path.ready_s, cost_s, needed_s, start_s, workload.forward_s, NODES
            ).order
            if order != list(range(count)):
                yield state.with_strategy(reordered(state, path.problem, order))
        yield from self._moves(state, path, workload.forward_s - needed_s)

    @staticmethod
    def _needed_s(path: CriticalPath) -> np.ndarray:
        """When the first variable of each message is read in the forward pass, shape (M,)."""
        needed_s, index = needed_times_s(path.workload), path.workload.index
        return np.array(
            [
                min(needed_s[index[part.variable]] for part in message.slices)
                for message in path.plan.messages
            ]
        )

    @staticmethod
    def _moves(state: State, path: CriticalPath, tail_s: np.ndarray) -> Iterable[State]:
        """Move the message that determines the period before a less urgent one, or vice versa."""
        last = int(np.argmax(path.end_s + tail_s))
        before = [n for n in range(last - 1, -1, -1) if tail_s[n] < tail_s[last]]
        order = list(range(len(tail_s)))
        for number in before[: MOVES // 2]:
            rest = [n for n in order if n != number]
            at = rest.index(last) + 1
            yield state.with_strategy(
                reordered(state, path.problem, [*rest[:at], number, *rest[at:]])
            )
        step = max(1, len(before) // (MOVES // 2))
        for number in before[::step][: MOVES // 2]:
            rest = [n for n in order if n != last]
            at = rest.index(number)
            yield state.with_strategy(
                reordered(state, path.problem, [*rest[:at], last, *rest[at:]])
            )
