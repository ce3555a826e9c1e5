"""What if a compiler fused chains of elementwise kernels?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autotune.arrays import BoolArray, FloatArray, IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.whatif.base import Base
from autotune.whatif.kernels.layer_roles import output_elements
from autotune.whatif.kernels.situations import execution_order, require
from autotune.whatif.primitives import remove
from autotune.whatif.question import Question, Reading
from autotune.whatif.registry import what_if

ELEMENTWISE = re.compile(r"elementwise|Pointwise|fused_dropout|masked_scale", re.IGNORECASE)
COMPILED = re.compile(r"triton_")
"""Kernels that a compiler has already fused."""
_TENSORS = re.compile(r"(?:std::array|at::detail::Array)<char ?\*, (\d+)")
_ONE_INPUT = re.compile(
    r"Unary|OnSelf|copy_kernel|clamp_scalar|pow_tensor_scalar|GeluCUDA|tanh_kernel"
)
MOST_TENSORS = 16


@what_if(
    "fused_elementwise",
    title="fused chains of elementwise kernels",
    source="torch.compile (ASPLOS 2024), sec. 4; DisCo, sec. 4.2",
    enact="model = torch.compile(model)",
)
def fused_elementwise(base: Base, question: Question) -> Base:
    """Neighbouring elementwise kernels of a stream become one kernel with one launch.

    A chain is of the forward or the backward pass, and nothing on another queue waits for its inner
    results. Recorded sizes of its kernels' results are equal; where they are unknown, neighbours of
    the same name are taken for the same work on other tensors. Assumes that each kernel passes its
    result to the next one and that time follows the bytes beyond the time of the shortest
    elementwise kernel, which every kernel takes. A fused kernel neither reads inner results, nor
    writes them outside the forward pass, which keeps them for the backward pass. (Optimistic: it
    never writes them. Pessimistic: it always does.) Compilation and guards cost nothing.
    """
    chains = list(_chains(base))
    members = np.zeros(base.ops, dtype=np.bool_)
    for chain in chains:
        members[chain] = True
    require(members, "the trace has no two neighbouring elementwise kernels on a stream")
    fixed_s = 0.0
    if question.reading is not Reading.PESSIMISTIC:
        fixed_s = float(base.duration_s[_elementwise(base)].min())
    duration_s, gone = base.duration_s.copy(), np.zeros(base.ops, dtype=np.bool_)
    for chain in chains:
        duration_s[chain[0]] = _fused_s(base, chain, fixed_s, question.reading)
        gone[chain[1:]] = True
    return remove(replace(base, duration_s=duration_s), gone | _hosts_of(base, gone))


def _elementwise(base: Base) -> BoolArray:
    is_elementwise = {
        name: bool(ELEMENTWISE.search(name)) and not COMPILED.match(name)
        for name in set(base.names.ops)
    }
    named = np.array([is_elementwise[name] for name in base.names.ops], dtype=np.bool_)
    computing = np.isin(base.kind, (Kind.FORWARD, Kind.BACKWARD))
    launched = base.launch != NONE
    chosen: BoolArray = named & base.on_device & computing & launched & ~_accumulating(base)
    return chosen


def _accumulating(base: Base) -> BoolArray:
    """(N,) kernels that add up gradients or scale them for a reducer: one for each parameter."""
    of_operator = [bool(re.search("AccumulateGrad", one.outer)) for one in base.names.operators]
    mask: BoolArray = np.append(np.array(of_operator, dtype=np.bool_), False)[base.operator]
    return mask


def _chains(base: Base) -> Iterator[IntArray]:
    fusible, shared = _elementwise(base), _tied_to_other_queues(base)
    for queue in np.unique(base.queue[fusible]):
        order = execution_order(base, base.queue == queue)
        chain = [int(order[0])]
        for first, second in pairwise(order.tolist()):
            linked = fusible[first] and fusible[second] and _linked(base, first, second)
            if linked and not shared[0][first] and not shared[1][second]:
                chain.append(second)
                continue
            if len(chain) > 1:
                yield np.array(chain)
            chain = [second]
        if len(chain) > 1:
            yield np.array(chain)


def _linked(base: Base, first: int, second: int) -> bool:
    if base.kind[first] != base.kind[second]:
        return False
    sizes = [_elements(base, op) for op in (first, second)]
    if None in sizes:
        return base.names.ops[first] != base.names.ops[second]
    return sizes[0] == sizes[1]


def _elements(base: Base, op: int) -> int | None:
    """Elements of the op's result, None if they are unknown."""
    number = int(base.operator[op])
    return None if number == NONE else output_elements(base.names.operators[number])


def _tied_to_other_queues(base: Base) -> tuple[BoolArray, BoolArray]:
    """(N,) ops for which another queue waits, and ops that wait for one that does not launch it."""
    waited, waits = np.zeros(base.ops, dtype=np.bool_), np.zeros(base.ops, dtype=np.bool_)
    other = base.queue[base.parent] != base.queue[base.child]
    launching = base.launch[base.child] == base.parent
    waited[base.parent[other]] = True
    waits[base.child[other & ~launching]] = True
    return waited, waits


def _fused_s(base: Base, chain: IntArray, fixed_s: float, reading: Reading) -> float:
    """The kernels' times without the traffic that fusion avoids; `fixed_s` counts once."""
    moving_s: FloatArray = np.maximum(base.duration_s[chain] - fixed_s, 0.0)
    tensors = np.array([tensors_touched(base.names.ops[op]) for op in chain])
    avoided = np.zeros(len(chain))
    avoided[1:] += 1  # the read of what the kernel before computed
    writes_inner = reading is Reading.PESSIMISTIC or (
        reading is Reading.EXPECTED and base.kind[chain[0]] == Kind.FORWARD
    )
    if not writes_inner:
        avoided[:-1] += 1
    left = np.maximum(tensors - avoided, 0) / tensors
    return fixed_s + float((moving_s * left).sum())


def tensors_touched(name: str) -> int:
    """How many tensors an elementwise kernel reads and writes, from the types in its name.

    Three, as an addition does, where the name does not state it.
    """
    if match := _TENSORS.search(name):
        return min(max(int(match.group(1)), 1), MOST_TENSORS)
    if "FillFunctor" in name:
        return 1
    return 2 if _ONE_INPUT.search(name) else 3


def _hosts_of(base: Base, gone: BoolArray) -> BoolArray:
    """(N,) host ops of the operators whose kernels all go."""
    count = len(base.names.operators)
    known = base.operator != NONE
    stays, goes = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    stays[base.operator[known & base.on_device & ~gone]] = True
    goes[base.operator[known & gone]] = True
    operators = np.append(goes & ~stays, False)
    hosts: BoolArray = ~base.on_device & operators[base.operator] & (base.queue != NONE)
    return hosts
