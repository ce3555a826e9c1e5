"""The steps of a traced job: their measured times, and each as a data-flow graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from autotune.arrays import FloatArray
from autotune.dfg.graph import Dfg
from autotune.errors import InvalidInput
from autotune.profiling.alignment.result import Alignment
from autotune.profiling.formats.rank_trace import TracedStep, listed_numbers
from autotune.profiling.graph.device_order import launched_before_trace
from autotune.profiling.graph.global_graph import RankPart, build_dfg
from autotune.profiling.graph.rank_ops import RankOps, hidden_before
from autotune.profiling.graph.stated_ops import stated_ops
from autotune.profiling.graph.step_ops import step_ops
from autotune.profiling.traces.job import TraceJob

StepChoice = int | Literal["median"]


@dataclass(eq=False)
class TracedSteps:
    """The steps of `job` on the clock of `aligned`; without it, on the ranks' own clocks.

    A step is chosen by its number, or as "median": the step whose measured time is the lower
    median. Methods raise `InvalidInput` for a step that not every rank has.
    """

    job: TraceJob
    aligned: Alignment | None = None
    _ops: dict[tuple[int, int], RankOps] = field(default_factory=dict)
    _spans: dict[int, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def chosen(self, step: StepChoice) -> int:
        """Return the number of the chosen step."""
        if step == "median":
            times_s = [self.measured_s(number) for number in self.job.steps]
            return self.job.steps[int(np.argsort(times_s, kind="stable")[(len(times_s) - 1) // 2])]
        if step not in self.job.steps:
            numbers = listed_numbers(self.job.steps)
            raise InvalidInput(f"the step must be one of {numbers}, but is {step}")
        return step

    def measured_s(self, step: StepChoice = "median") -> float:
        """Seconds over all ranks from the step's first op to its last end.

        Where devices lag behind their hosts, a step's work is launched while the step before still
        runs. The time then counts from the last end of the step before. The replay of `dfg` must
        give this time.
        """
        number = self.chosen(step)
        shifts_s = self.shifts_s(number)
        begins_s, ends_s = self._spans_s(number, shifts_s)
        return float(ends_s.max() - max(begins_s.min(), self._floor_s(number, shifts_s)))

    def dfg(self, step: StepChoice = "median") -> Dfg:
        """One step of all ranks."""
        return build_dfg(self.parts(step), self.job.joints)

    def rank_dfg(self, rank: int, step: StepChoice = "median") -> Dfg:
        """One step of one rank; its collectives keep their measured time, waiting included."""
        return TracedSteps(self.job.alone(rank)).dfg(step)

    def parts(self, step: StepChoice = "median") -> list[RankPart]:
        """(R,) ops of every rank, without what the step before hides."""
        number = self.chosen(step)
        shifts_s = self.shifts_s(number)
        floor_s = self._floor_s(number, shifts_s)
        parts = []
        for place, rank in enumerate(self.job.rank_numbers):
            shift_s = float(shifts_s[place])
            ops = hidden_before(self.rank_ops(place, number), floor_s - shift_s)
            trace, joint_of = self.job.ranks[place], self.job.joint_of[place]
            parts.append(RankPart(rank, trace, ops, shift_s, joint_of))
        return parts

    def rank_ops(self, place: int, number: int) -> RankOps:
        """The ops of one rank in one step.

        They are cached until another step is requested: the ops of many steps would not fit.
        """
        if (place, number) not in self._ops:
            for other in [key for key in self._ops if key[1] != number]:
                del self._ops[other]
            self._ops[place, number] = self._ops_of(place, self._step(place, number))
        return self._ops[place, number]

    def _ops_of(self, place: int, step: TracedStep) -> RankOps:
        trace, collectives = self.job.ranks[place], self.job.collectives[place]
        if self.job.graph is not None:
            return stated_ops(trace, step.start_s, step.end_s, collectives, self.job.graph)
        return step_ops(trace, step.start_s, step.end_s, collectives)

    def shifts_s(self, number: int) -> FloatArray:
        """(R,) seconds to add to each rank's times for the common clock.

        Clocks that drift keep the offset of the step's middle throughout the step.
        """
        shift_s = self.job.shift_s
        if self.aligned is None:
            return shift_s
        steps = [self._step(place, number) for place in range(len(self.job.ranks))]
        middle_s = np.array([(step.start_s + step.end_s) / 2 for step in steps])
        corrected_s: FloatArray = shift_s + self.aligned.correction_s(shift_s + middle_s)
        return corrected_s

    def _step(self, place: int, number: int) -> TracedStep:
        for step in self.job.ranks[place].steps:
            if step.number == number:
                return step
        numbers = listed_numbers(self.job.steps)
        raise InvalidInput(f"the step must be one of {numbers}, but is {number}")

    def _spans_s(self, number: int, shifts_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(R,) first start and last end of the step's ops on every rank."""
        if number not in self._spans:
            ops = [self.rank_ops(place, number) for place in range(len(self.job.ranks))]
            begins_s = np.array([rank.begin_s for rank in ops])
            self._spans[number] = begins_s, np.array([rank.end_s for rank in ops])
        begins_s, ends_s = self._spans[number]
        return begins_s + shifts_s, ends_s + shifts_s

    def _floor_s(self, number: int, shifts_s: FloatArray) -> float:
        """When the step before ended; minus infinity where the traces do not contain that step."""
        place = self.job.steps.index(number)
        if place and self.job.steps[place - 1] == number - 1:
            return float(self._spans_s(number - 1, shifts_s)[1].max())
        if place:
            return -np.inf
        earlier_s = [
            trace.end_s[launched_before_trace(trace)].max(initial=-np.inf)
            for trace in self.job.ranks
        ]
        return float((np.array(earlier_s) + shifts_s).max())
