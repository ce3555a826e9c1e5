"""What many what-ifs ask of a base: the order of its execution, and whether they apply at all."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from autotune.arrays import BoolArray, IntArray
from autotune.dfg.graph import COMPUTATION, NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base, Steady, steady
from autotune.whatif.primitives import select
from autotune.whatif.question import Question


def execution_order(base: Base, ops: BoolArray) -> IntArray:
    """The numbers of `ops` that a queue executes, in the order of their starts in a steady step."""
    replayed = _steady(base)
    timeline, first = replayed.timeline, base.ops * (replayed.copies - 1)
    chosen = np.flatnonzero(ops & (base.queue != NONE))
    start_s, end_s = (times[first + chosen] for times in (timeline.start_s, timeline.end_s))
    order: IntArray = chosen[np.lexsort((chosen, end_s, start_s))]
    return order


@lru_cache(maxsize=4)
def _steady(base: Base) -> Steady:
    """A what-if asks for the order several times, and in each of its readings."""
    return steady(base)


def kernels(base: Base) -> BoolArray:
    """(N,) computation on a device: no copies to or from the host, no collectives.

    Raises `InvalidInput` if there is none.
    """
    return require(
        select(base, kinds=COMPUTATION, on_device=True),
        "the trace has no kernels of a device; record one of training on a GPU",
    )


def update_runs(base: Base) -> list[IntArray]:
    """The device ops of optimizers in order of launch, apart where a pass is launched in between.

    A step has several runs if it updates several times: the models of a GAN, or iterations.
    """
    kind = base.kind[base.launched]
    passes = np.cumsum(np.isin(kind, (Kind.FORWARD, Kind.BACKWARD)))[kind == Kind.UPDATE]
    update: IntArray = base.launched[kind == Kind.UPDATE]
    return np.split(update, np.flatnonzero(np.diff(passes)) + 1) if len(update) else []


def require_one_update(base: Base, what: str) -> None:
    """Raise `InvalidInput` if a step updates parameters several times; `what` is predicted."""
    count = len(update_runs(base))
    if count > 1:
        raise InvalidInput(
            f"{what} for one update in a step, but the trace's steps have {count}; call "
            "prof.step() after every update"
        )


def require(ops: BoolArray, reason: str) -> BoolArray:
    """`ops` themselves. Raises `InvalidInput` with the reason if no op is among them."""
    if not ops.any():
        raise InvalidInput(reason)
    return ops


def positive_amount(
    question: Question, name: str, unit: str, default: float | None = None
) -> float:
    """The amount for what-if `name`. Raises `InvalidInput` if it is missing or not positive."""
    amount = question.amounts.get(name, default)
    if amount is None:
        raise InvalidInput(f"what-if {name!r} needs an amount, {unit}; state it as {name}=AMOUNT")
    if not 0 < amount < np.inf:
        raise InvalidInput(f"the amount of {name!r}, {unit}, must be above 0, but is {amount}")
    return float(amount)


def stream_neighbours(base: Base) -> tuple[IntArray, IntArray]:
    """(N,) each: the device op before, and the one behind each device op on its stream.

    NONE for a stream's first and last op, and for other ops.
    """
    before, behind = (np.full(base.ops, NONE, dtype=np.int64) for _ in range(2))
    order = execution_order(base, base.on_device)
    for queue in np.unique(base.queue[order]):
        stream = order[base.queue[order] == queue]
        before[stream[1:]] = stream[:-1]
        behind[stream[:-1]] = stream[1:]
    return before, behind
