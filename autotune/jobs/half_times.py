"""Times a trace's matrix operators in both precisions on this machine, for what-if `amp_cpu`.

Processors differ in this by more than an order of magnitude: some have instructions for bfloat16,
others convert each element. So a factor from another machine says little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.jobs.operator_times import working_operators, write_means
from autotune.whatif.base import Base, Operator
from autotune.whatif.changes.processor import MATRIX

SINGLE, HALF = "float", "c10::BFloat16"
SUFFIX = ".bf16.csv"
TURNS = 3
"""Both precisions take turns; the shortest time of each met the least other work."""


@dataclass(frozen=True)
class HalfTime:
    """Seconds of an operator's call in float32 and in bfloat16, the least median of a few turns.

    `step_s`: what its calls take in a step of the trace.
    """

    operator: Operator
    single_s: float
    half_s: float
    step_s: float


def half_times(base: Base, budget_s: float) -> Iterator[HalfTime]:
    """Time each matrix operator of a CPU's trace in both precisions, the longest first.

    Operators that cannot be called by themselves are left out. Needs torch.
    """
    from runtime_rewriter.probe.operators import Invocation, operator_times

    chosen = [
        (operator, step_s)
        for operator, step_s in working_operators(base).items()
        if operator.inputs is not None
        and SINGLE in operator.inputs.types
        and MATRIX.search(operator.name)
    ]
    calls: list[Invocation] = []
    for operator, _ in chosen:
        inputs = operator.inputs
        assert inputs is not None
        single = Invocation(operator.name, inputs.dims, inputs.types, inputs.values)
        types = tuple(HALF if one == SINGLE else one for one in inputs.types)
        calls += [single, replace(single, types=types)] * TURNS
    times = operator_times(calls, "cpu", budget_s)
    for operator, step_s in chosen:
        taken_s = [one.seconds for one in islice(times, 2 * TURNS)]
        single_s, half_s = ([one for one in taken_s[place::2] if one] for place in (0, 1))
        if single_s and half_s:
            yield HalfTime(operator, min(single_s), min(half_s), step_s)


def write_half_times(path: Path, measured: Sequence[HalfTime]) -> int:
    """Write the CSV file that `amp_cpu` reads; return its number of rows.

    Raises `InvalidInput` if nothing was timed.
    """
    if not measured:
        raise InvalidInput("no matrix operator of the trace could be timed in both precisions")
    factors = [(one.operator, one.half_s / one.single_s) for one in measured]
    return write_means(path, "factor", factors, "the factors of bfloat16")
