"""Predicts the step time under what-ifs, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.errors import InvalidInput
from autotune.whatif.base import Base, Steady, steady
from autotune.whatif.memory import NOT_RECORDED, MemoryOutcome, outcome
from autotune.whatif.messages.shared_cores import on_shared_cores
from autotune.whatif.question import Question, Reading
from autotune.whatif.registry import WhatIf


@dataclass(frozen=True, eq=False)
class Prediction:
    """Step times in seconds.

    - `before_s`, `after_s`: with all waits as recorded and the expected amounts.
    - `speedup_low`, `speedup_high`: of all extreme readings: waits without a known cause stay or
      vanish, uncertain amounts are pessimistic or optimistic, and so is the cost of recording.
    - `base`, `timeline`: of the changed training.
    - `memory`: of what-ifs that change it, else None; also None where the memory is unknown,
      for which `memory_reason` states the cause.
    """

    before_s: float
    after_s: float
    speedup_low: float
    speedup_high: float
    base: Base
    timeline: Steady
    memory: MemoryOutcome | None = None
    memory_reason: str = ""

    @property
    def speedup(self) -> float:
        return self.before_s / self.after_s


def changed(base: Base, what_ifs: Sequence[WhatIf], question: Question) -> Base:
    """The base after all what-ifs, in order. Raises `InvalidInput` where one does not apply.

    On a processor the messages that they added share its cores with computation.
    """
    for one in what_ifs:
        base = one.change(base, question)
    return on_shared_cores(base, question)


def predict(
    base: Base, what_ifs: Sequence[WhatIf], question: Question, others: Sequence[Base] = ()
) -> Prediction:
    """Replay the base before and after; `others`: other readings of the recorded step.

    Raises `InvalidInput` where a what-if does not apply.
    """
    readings = [base, *others]
    if base.unknown_s:
        readings.append(base.without_unknown_waits())
    before_s = [steady(reading).step_s for reading in readings]
    expected = changed(base, what_ifs, question)
    after = steady(expected)
    speedups = [before_s[0] / after.step_s]
    for reading, from_s in zip(readings, before_s, strict=True):
        for amounts in (Reading.OPTIMISTIC, Reading.PESSIMISTIC):
            asked = replace(question, reading=amounts)
            speedups.append(from_s / steady(changed(reading, what_ifs, asked)).step_s)
    memory, reason = _memory(base, what_ifs, question)
    return Prediction(
        before_s=before_s[0],
        after_s=after.step_s,
        speedup_low=min(speedups),
        speedup_high=max(speedups),
        base=expected,
        timeline=after,
        memory=memory,
        memory_reason=reason,
    )


def _memory(
    base: Base, what_ifs: Sequence[WhatIf], question: Question
) -> tuple[MemoryOutcome | None, str]:
    """The memory after all what-ifs, in order, or why it is unknown; neither if none changes it."""
    if all(one.memory is None for one in what_ifs):
        return None, ""
    if unknown := [one.memory_unknown for one in what_ifs if one.memory_unknown]:
        return None, unknown[0]
    if question.memory is None:
        return None, NOT_RECORDED
    memory = question.memory
    try:
        for one in what_ifs:
            if one.memory is not None:
                memory = one.memory(memory, base, question)
            base = one.change(base, question)
    except InvalidInput as error:
        return None, str(error)
    return outcome(question.memory, memory), ""
