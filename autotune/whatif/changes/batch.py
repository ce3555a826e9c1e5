"""Other batches, and gradients that accumulate over several passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autotune.arrays import BoolArray, FloatArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.kernels.factors import FactorTable
from autotune.whatif.kernels.h100_factors import H100
from autotune.whatif.kernels.parameters import gradient_bytes
from autotune.whatif.kernels.situations import require_one_update
from autotune.whatif.memory import ReplicaMemory
from autotune.whatif.primitives import insert
from autotune.whatif.question import Question, Reading
from autotune.whatif.recording.repetition import passes, repeat
from autotune.whatif.registry import what_if

MOST_PARTS = 64
USUAL_PARTS = 2.0


def _factor(question: Question) -> float:
    return question.amounts.get("batch", 2.0)


def _batch_memory(memory: ReplicaMemory, base: Base, question: Question) -> ReplicaMemory:
    return memory.with_batch(_factor(question))


@what_if(
    "batch",
    title="a larger or smaller batch (amount: its factor)",
    source="Daydream, sec. 4.3 (scale)",
    enact="DataLoader(dataset, batch_size=...)",
    memory=_batch_memory,
    samples=_factor,
)
def batch(base: Base, question: Question, table: FactorTable = H100) -> Base:
    """Every operator of the two passes has a part that grows with the batch, and a fixed part.

    - The amount is the factor on the batch, 2 if none is given. The step takes longer and does
      more: compare the samples per second.
    - The fixed part is a measured time, or all of the time if that is shorter. One end of the
      interval has none: time proportional to the batch.
    - The host's work, the update and kernels of unknown passes do not depend on the batch.
    """
    base = table.noted(base)
    factor = _factor(question)
    if not 0 < factor < np.inf:
        raise InvalidInput(f"a batch needs a factor above 0, but it is {factor}")
    return _scaled(base, factor, table, question.reading)


def _scaled(base: Base, factor: float, table: FactorTable, reading: Reading) -> Base:
    ops = passes(base) & base.on_device
    # of a smaller batch a long fixed part is the pessimistic reading, of a larger one a short one
    turned = {
        Reading.OPTIMISTIC: Reading.PESSIMISTIC,
        Reading.PESSIMISTIC: Reading.OPTIMISTIC,
        Reading.EXPECTED: Reading.EXPECTED,
    }
    asked = turned[reading] if factor > 1 else reading
    longest_s = 0.0 if asked is Reading.OPTIMISTIC else table.fixed_s.at(asked)
    fixed_s = np.minimum(longest_s * _share(base, ops), base.duration_s)
    scaled_s = fixed_s + (base.duration_s - fixed_s) * factor
    return replace(base, duration_s=np.where(ops, scaled_s, base.duration_s))


def _share(base: Base, ops: BoolArray) -> FloatArray:
    """(N,) the share of each of `ops` in the device time of its operator, 1 if it has none."""
    share = np.ones(base.ops)
    known = np.flatnonzero(ops & (base.operator != NONE))
    seconds = np.bincount(base.operator[known], weights=base.duration_s[known])
    share[known] = base.duration_s[known] / np.maximum(seconds[base.operator[known]], 1e-12)
    return share


def _accumulated_memory(memory: ReplicaMemory, base: Base, question: Question) -> ReplicaMemory:
    return memory.in_parts(int(question.amounts.get("accumulate", USUAL_PARTS)))


@what_if(
    "accumulate",
    title="gradients accumulate over parts of the batch (amount: their number)",
    source="Daydream, sec. 4.3 (insert); the batch stays as it is",
    enact="for part in batch.chunk(2): (loss(part) / 2).backward()",
    memory=_accumulated_memory,
)
def accumulate(base: Base, question: Question, table: FactorTable = H100) -> Base:
    """Both passes run once for each part of the batch, and the update once.

    - The amount is the number of parts, 2 if none is given. Kernels of a part follow `batch`.
    - Gradients of later parts are added to those before: a kernel per parameter that reads two
      tensors and writes one. They are modelled as one op of their total time.
    - The host does for each part what it did for the whole batch.
    """
    base = table.noted(base)
    parts = question.amounts.get("accumulate", USUAL_PARTS)
    if parts != int(parts) or not 2 <= parts <= MOST_PARTS:
        raise InvalidInput(
            f"gradients accumulate over 2 to {MOST_PARTS} parts, but the amount is {parts}"
        )
    require_one_update(base, "accumulation of gradients is predicted")
    sizes = gradient_bytes(base, question)
    add_s = np.maximum(3 * sizes / table.cast_bytes_per_s, table.each_s).sum()
    ops = passes(base)
    grown = _scaled(base, 1 / parts, table, question.reading)
    for _ in range(int(parts) - 1):
        grown, copy = repeat(grown, ops)
        ops = np.zeros(grown.ops, dtype=np.bool_)
        ops[copy[copy >= 0]] = True
        backward = grown.launched[
            ops[grown.launched] & (grown.kind[grown.launched] == Kind.BACKWARD)
        ]
        if len(backward):
            grown = insert(
                grown, backward[-1:], np.array([add_s]), ["accumulate gradients"], Kind.BACKWARD
            )
            ops = np.append(ops, [False, False])
    return grown
