"""Ways to update parameters: one kernel for all (Daydream, Alg. 4), for many, or for each."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from autotune.arrays import IntArray
from autotune.dfg.graph import NONE
from autotune.errors import InvalidInput
from autotune.whatif.base import Base
from autotune.whatif.kernels.factors import FactorTable
from autotune.whatif.kernels.h100_factors import H100
from autotune.whatif.kernels.parameters import gradient_bytes
from autotune.whatif.kernels.situations import require_one_update, update_runs
from autotune.whatif.primitives import remove
from autotune.whatif.question import Question
from autotune.whatif.registry import what_if

FOREACH = "multi_tensor_apply"
FUSED = re.compile(r"Fused(?:Adam|Sgd|Adagrad)|(?:Adam|Sgd|SGD)Functor")
"""Kernels of torch's fused optimizers, and of Apex's."""
FUSED_OPERATOR = re.compile(r"aten::_fused_(?:adamw?|sgd|adagrad)_?$")


@what_if(
    "fused_adam",
    title="a fused optimizer",
    source="Daydream, Alg. 4 (which must remove the launches, too)",
    enact="torch.optim.Adam(model.parameters(), fused=True)",
)
def fused_adam(base: Base, question: Question, table: FactorTable = H100) -> Base:
    """One kernel updates all parameters, whatever the optimizer; one for each update of a step.

    - It takes a measured share of the time of all kernels that it replaces, because it reads and
      writes every tensor once. The paper takes the whole sum.
    - The launches of the others go, and the host's work between the first launch and the last one.
    """
    base = table.noted(base)
    updates = _updates(base)
    _refuse_fused(base, np.concatenate(updates))
    duration_s = base.duration_s.copy()
    gone = np.zeros(base.ops, dtype=np.bool_)
    for update in updates:
        first, rest = update[:1], update[1:]
        total_s = float(base.duration_s[update].sum())
        duration_s[first] = total_s * table.fused.at(question.reading) if len(rest) else total_s
        gone[rest] = True
        gone[_between_launches(base, update)] = True
    return remove(replace(base, duration_s=duration_s), gone)


@what_if(
    "foreach_optimizer",
    title="an optimizer with kernels for many tensors",
    source="Daydream, Alg. 4",
    enact="torch.optim.Adam(model.parameters(), foreach=True)",
)
def foreach_optimizer(base: Base, question: Question, table: FactorTable = H100) -> Base:
    """Kernels for many tensors replace those for each one; the traffic stays.

    - Applies to optimizers with a kernel per parameter and operation. Each saves the fixed time of
      its kernel, and its launch with the host's work for it; one in `MANY` stays.
    """
    base = table.noted(base)
    updates = _updates(base)
    if any(FOREACH in base.names.ops[op] for update in updates for op in update.tolist()):
        raise InvalidInput("the trace's optimizer already has kernels for many tensors")
    duration_s = base.duration_s.copy()
    gone = np.zeros(base.ops, dtype=np.bool_)
    for update in updates:
        launched = update[::MANY]
        saved_s = table.each_s * (len(update) - len(launched))
        total_s = max(float(base.duration_s[update].sum()) - saved_s, 0.0)
        duration_s[launched] = total_s / len(launched)
        gone[update] = True
        gone[_between_launches(base, update)] = True
        gone[launched] = False
        gone[base.launch[launched]] = False
    return remove(replace(base, duration_s=duration_s), gone)


MANY = 30
"""Tensors that torch's kernels for many take at once, about; their limit depends on the kernel."""


@what_if(
    "for_each_optimizer",
    title="an optimizer with a kernel for each tensor",
    source="Daydream, Alg. 4, backwards",
    enact="torch.optim.Adam(model.parameters(), foreach=False)",
)
def for_each_optimizer(base: Base, question: Question, table: FactorTable = H100) -> Base:
    """A kernel per parameter and operation replaces those for many; the traffic stays.

    - Each takes at least the time of a small kernel, and a call of its own on the host.
    - The kernels of an operation are modelled as one op of their total time.
    """
    base = table.noted(base)
    require_one_update(base, "kernels for each tensor are predicted")
    (update,) = _updates(base)
    if not all(FOREACH in base.names.ops[op] for op in update.tolist()):
        raise InvalidInput(
            "the change replaces kernels for many tensors, but the trace's optimizer has others"
        )
    tensors = gradient_bytes(base, question)
    calls: dict[int, list[int]] = {}
    for op in update.tolist():
        calls.setdefault(int(base.operator[op]), []).append(op)
    share = tensors / tensors.sum()
    duration_s = base.duration_s.copy()
    for ops in calls.values():
        total_s = float(base.duration_s[ops].sum())
        each_s = np.maximum(total_s * share, table.each_s).sum()
        duration_s[ops] = each_s / len(ops)
        launches = base.launch[ops]
        host_s = len(tensors) * table.each_host_s.at(question.reading)
        duration_s[launches[launches != NONE]] = host_s / len(ops)
    return replace(base, duration_s=duration_s)


def _updates(base: Base) -> list[IntArray]:
    """The device ops of each update in order of launch. Raises `InvalidInput` if none is known."""
    updates = update_runs(base)
    if not updates:
        raise InvalidInput(
            "a change of the optimizer needs to know its kernels, but the trace shows none; record "
            "with torch.profiler, which marks Optimizer.step"
        )
    return updates


def _refuse_fused(base: Base, update: IntArray) -> None:
    """Raise `InvalidInput` if an operator or a kernel of the update is a fused one."""
    for op in update.tolist():
        call = int(base.operator[op])
        operator = None if call == NONE else base.names.operators[call]
        names = () if operator is None else (operator.name, *operator.around)
        if any(FUSED_OPERATOR.match(name) for name in names) or FUSED.search(base.names.ops[op]):
            raise InvalidInput(
                "a fused optimizer replaces kernels of an unfused one, but the trace's optimizer "
                f"is fused already: it launches {base.names.ops[op][:100]!r}"
            )


def _between_launches(base: Base, update: IntArray) -> IntArray:
    """Host ops from the first to the last launch of the update, without the first one."""
    calls = base.launch[update]
    order = base.queue_order(int(base.queue[calls[0]]))
    places = np.flatnonzero(np.isin(order, calls))
    between: IntArray = order[places[0] + 1 : places[-1] + 1]
    return between
