"""What-ifs of training on a processor, where ops of the host compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np

from autotune.arrays import IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.changes.kernel_times import inputs_text, tensor_text
from autotune.whatif.changes.measured_file import read_times
from autotune.whatif.kernels.autocast import FLOAT, MATRIX, Autocast, Dims, autocast
from autotune.whatif.kernels.precisions import UNKNOWN_MEMORY, Precision, refuse_precision
from autotune.whatif.primitives import insert_calls, scale
from autotune.whatif.question import Factor, Question
from autotune.whatif.registry import what_if

COLUMNS, TIMES = ("operator", "inputs"), ("float32_s", "bfloat16_s")
CAST = "cast"
"""The operator in rows of casts: of a float32 tensor, and of its gradient in bfloat16."""
MEMORY = Factor(
    expected=0.5,
    optimistic=0.5,
    pessimistic=1.0,
    source="bytes of bfloat16 over those of float32; pessimistically memory takes as long",
)
BF16_MATRIX = Factor(
    expected=0.65,
    optimistic=0.35,
    pessimistic=0.95,
    source="about the middle of what the four examples showed without and with the change, on two "
    "loaded cores of an AMD EPYC (benchmarks.whatif_truth.cpu); single ones lay outside the range",
)
CAST_CALL_S, CAST_ELEMENT_S = 5e-6, 1.7e-10
"""A cast, and each of its elements, on a core of an AMD EPYC (recordings under autocast)."""
CAST_RANGE = Factor(expected=1.0, optimistic=0.5, pessimistic=3.0, source="assumed")


def require_processor(base: Base) -> None:
    """Raise `InvalidInput` for a trace with work of a device."""
    if base.on_device.any():
        raise InvalidInput(
            "this what-if is of training on a processor, but the trace has work of a device; use "
            "the one without _cpu"
        )


@what_if(
    "amp_cpu",
    title="autocast to bfloat16 on a processor",
    source="Daydream, Alg. 3, with times measured on this machine, or assumed",
    enact='with torch.autocast("cpu", torch.bfloat16): loss = ...',
    memory_unknown=UNKNOWN_MEMORY,
)
def amp_cpu(base: Base, question: Question) -> Base:
    """Operators that then compute in bfloat16 take a share of their time, and casts are added.

    Times are measured on this machine (`amp_cpu=FILE.bf16.csv`, which `--measure` writes: a row for
    each operator and its inputs, and for each cast). Operators without a row keep their time. What
    an operator takes beyond its measured time in float32 is for memory (`MEMORY`).
    Without a file, operators that multiply matrices take `BF16_MATRIX`, which is a guess: a
    processor without instructions for bfloat16 is slower in it than in float32.

    With recorded shapes, which operators compute in bfloat16 and what is cast follows from the
    rules of `autotune.whatif.kernels.autocast`. Without them, casts are left out.
    """
    require_processor(base)
    names = np.array([bool(MATRIX.search(name)) for name in base.names.ops], dtype=np.bool_)
    chosen = names & (base.kind != Kind.UPDATE) & (base.queue != NONE)
    if not chosen.any():
        raise InvalidInput(
            "autocast speeds up matrix products and convolutions, but the trace shows none"
        )
    refuse_precision(base, chosen, Precision.HALF)
    affected = autocast(base)
    path = question.files.get("amp_cpu")
    if path is None:
        note = f"bfloat16 on this processor: {BF16_MATRIX.source}; measure it with --measure"
        changed = scale(base, chosen, BF16_MATRIX.at(question.reading))
        changed = replace(changed, precision=Precision.HALF, notes=(*base.notes, note))
        return _with_casts(changed, affected, HalfTimes(), CAST_RANGE.at(question.reading))
    times = read_half_times(Path(path))
    shares = np.ones(len(base.names.operators) + 1)  # NONE is the last one
    recorded_s = np.bincount(
        base.operator[base.operator != NONE], base.duration_s[base.operator != NONE], len(shares)
    )
    for number in affected.half:
        one = base.names.operators[number]
        shares[number] = times.share(
            (one.name, inputs_text(one)), float(recorded_s[number]), MEMORY.at(question.reading)
        )
    duration_s = base.duration_s * shares[base.operator]
    changed = replace(base, precision=Precision.HALF, duration_s=duration_s)
    return _with_casts(changed, affected, times, 1.0)


@dataclass(frozen=True)
class HalfTimes:
    """Times that a file of `--measure` lists.

    - `operators`: (operator, inputs) -> seconds in float32 and in bfloat16, by itself.
    - `casts`: tensor -> seconds of its cast, and of the cast of its gradient.
    """

    operators: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    casts: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def share(self, key: tuple[str, str], recorded_s: float, memory: float) -> float:
        """The share of its recorded time that an operator takes in bfloat16.

        By itself it writes memory that it has written before. What it takes longer in a training is
        for memory, and takes the share `memory`.
        """
        if key not in self.operators:
            return 1.0
        single_s, half_s = self.operators[key]
        if recorded_s <= single_s:
            return half_s / single_s
        return (half_s + memory * (recorded_s - single_s)) / recorded_s

    def cast_s(self, dims: Dims) -> tuple[float, float]:
        """Seconds of a cast, and of that of the gradient; assumed where the file has none."""
        assumed_s = CAST_CALL_S + CAST_ELEMENT_S * prod(dims)
        return self.casts.get(tensor_text(FLOAT, dims), (assumed_s, assumed_s))


def read_half_times(path: Path) -> HalfTimes:
    """The times of a file that `--measure` wrote. Raises `InvalidInput`."""
    operators: dict[tuple[str, str], tuple[float, float]] = {}
    casts: dict[str, tuple[float, float]] = {}
    for (operator, inputs), (single_s, half_s) in read_times(path, COLUMNS, TIMES):
        if operator == CAST:
            casts[inputs] = single_s, half_s
        else:
            operators[operator, inputs] = single_s, half_s
    return HalfTimes(operators, casts)


def _with_casts(base: Base, affected: Autocast, times: HalfTimes, factor: float) -> Base:
    """The base with the casts behind the first op of their calls, and of their gradients' nodes."""
    first: dict[int, int] = {}
    for queue in np.unique(base.queue[base.queue != NONE]):
        for op in base.queue_order(int(queue)).tolist():
            first.setdefault(int(base.operator[op]), op)
    last_s: dict[int, float] = {}
    backward: IntArray = np.flatnonzero((base.kind == Kind.BACKWARD) & (base.queue != NONE))
    for cast in affected.casts:
        forward_s, backward_s = times.cast_s(cast.dims)
        op = first[cast.operator]
        last_s[op] = last_s.get(op, 0.0) + factor * forward_s
        if cast.back and len(backward):
            op = first.get(cast.node, int(backward[-1]))
            last_s[op] = last_s.get(op, 0.0) + factor * cast.back * backward_s
    if not last_s:
        return base
    after = np.array(list(last_s), dtype=np.int64)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        ops = after[(base.kind[after] == Kind.BACKWARD) == (kind == Kind.BACKWARD)]
        seconds = np.array([last_s[op] for op in ops.tolist()])
        base, _ = insert_calls(base, ops, seconds, ["casts of autocast"] * len(ops), kind)
    return base
