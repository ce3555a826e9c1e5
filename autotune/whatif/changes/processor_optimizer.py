"""What-if: one fused operator updates all parameters of an optimizer on a processor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from autotune.arrays import BoolArray
from autotune.dfg.graph import NONE, Kind
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.changes.measured_file import read_times
from autotune.whatif.changes.optimizer import FUSED_OPERATOR
from autotune.whatif.changes.processor import require_processor
from autotune.whatif.question import Factor, Question
from autotune.whatif.registry import what_if

FUSABLE = ("Adagrad", "Adam", "AdamW", "SGD")
"""Optimizers of torch.optim that take `fused=True` on a processor (torch 2.13)."""
FUSED_OPTIMIZER = Factor(
    expected=0.4,
    optimistic=0.2,
    pessimistic=0.7,
    source="0.34 to 0.47 in recordings of the four examples with and without, on two quiet cores "
    "of an AMD EPYC; widened for other processors and sizes",
)
COLUMNS, TIMES = ("optimizer",), ("unfused_s", "fused_s")


@what_if(
    "fused_adam_cpu",
    title="a fused optimizer on a processor",
    source="Daydream, Alg. 4, with the share measured on this machine, or assumed",
    enact="torch.optim.Adam(model.parameters(), fused=True)",
)
def fused_adam_cpu(base: Base, question: Question) -> Base:
    """The steps of optimizers that have a fused version take a share of their time.

    The share is measured on this machine (`fused_adam_cpu=FILE.fused.csv`, which `--measure`
    writes: a row for each class of optimizer, timed on parameters of the recorded shapes), or else
    `FUSED_OPTIMIZER`. It applies to the operators of a step and to the script's time between them.
    An optimizer without a fused version stays as it is, and a note names it.
    """
    require_processor(base)
    mask = (base.kind == Kind.UPDATE) & (base.queue != NONE)
    if not mask.any():
        raise InvalidInput(
            "a fused optimizer changes the ops of the optimizer, but the trace shows none; record "
            "with torch.profiler, which marks Optimizer.step"
        )
    classes = np.array([one.optimizer for one in base.names.operators] + [""], dtype=np.object_)
    of_op = classes[base.operator]  # NONE is the last one
    optimizers = sorted(set(of_op[mask].tolist()) - {""}) or [""]
    shares = _shares(base, optimizers, question)
    spent_s = [base.duration_s.copy(), base.gap_s.copy()]
    for name, share in shares.items():
        ops = mask & (of_op == name) if name else mask
        spent_s[0][ops] *= share
        spent_s[1][_inner_gaps(base, ops)] *= share
    left = [name for name in optimizers if name not in shares]
    notes = [f"{' and '.join(left)} has no fused version on processors and stays"] if left else []
    return replace(
        base,
        duration_s=spent_s[0],
        gap_s=spent_s[1],
        unknown_gap_s=np.minimum(base.unknown_gap_s, spent_s[1]),
        notes=(*base.notes, *notes),
    )


def _shares(base: Base, names: list[str], question: Question) -> dict[str, float]:
    """Optimizer -> share of its time that it takes fused; without those that cannot be fused.

    `names` is [""] where the trace names no optimizer. Raises `InvalidInput` if none can be fused,
    or if the file does not know one.
    """
    fusable = [name for name in names if name in ("", *FUSABLE)]
    if not fusable:
        raise InvalidInput(
            f"a fused optimizer on a processor must be {', '.join(FUSABLE[:-1])} or {FUSABLE[-1]} "
            f"of torch.optim, but the trace has {' and '.join(names)}"
        )
    fused = [name for name in fusable if is_fused(base, name)]
    if fused:
        raise InvalidInput(f"the trace's {' and '.join(fused) or 'optimizer'} is fused already")
    path = question.files.get("fused_adam_cpu")
    if path is None:
        return dict.fromkeys(fusable, FUSED_OPTIMIZER.at(question.reading))
    known = {
        name: after / before for (name,), (before, after) in read_times(Path(path), COLUMNS, TIMES)
    }
    unknown = [name or "an optimizer without a name" for name in fusable if name not in known]
    if unknown:
        raise InvalidInput(
            f"{path} must state the times of the trace's {' and '.join(unknown)}, but states those "
            f"of {', '.join(known) or 'none'}; write it with --measure"
        )
    return {name: known[name] for name in fusable}


def is_fused(base: Base, optimizer: str) -> bool:
    """Whether an optimizer of the trace, "" for any, has one operator for all parameters."""
    return any(
        FUSED_OPERATOR.match(one.name) and optimizer in ("", one.optimizer)
        for one in base.names.operators
    )


def _inner_gaps(base: Base, ops: BoolArray) -> BoolArray:
    """(N,) the ops of a mask that another one of it follows on their thread."""
    inner = np.zeros(base.ops, dtype=np.bool_)
    for queue in np.unique(base.queue[ops]):
        order = base.queue_order(int(queue))
        inner[order[:-1][ops[order[:-1]] & ops[order[1:]]]] = True
    return inner
