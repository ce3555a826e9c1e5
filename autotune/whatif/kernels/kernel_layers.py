"""Layers and passes of kernels without an operator, from the sequence of the kernels' names.

Traces of the device alone, and kernels of CUDA graphs, do not state operators. The forward pass is
then a sequence of units: a convolution (all of its kernels), a matrix product, a normalization, an
embedding. Each is a layer, named by its kind and place, and what follows it belongs to it. Autograd
goes through them in the reverse order, so the units of the backward pass are aligned with the
reversed forward pass, such that as many as possible agree in kind (longest common subsequence). A
product has up to two in the backward pass: the gradients of its input and of its weight.

symbol   meaning
K        kernels of a step in the order of execution
F, B     units of the forward pass, of the backward pass
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.arrays import IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.whatif.base import Base
from autotune.whatif.kernels.kernel_classes import KernelClass, class_of
from autotune.whatif.kernels.situations import execution_order

_KINDS = {
    KernelClass.CONVOLUTION: "conv",
    KernelClass.GEMM: "linear",
    KernelClass.BATCH_NORM: "batch_norm",
    KernelClass.LAYER_NORM: "layer_norm",
    KernelClass.EMBEDDING: "embedding",
}
"""Classes of units, and the kinds of their layers."""
_BACKWARD = re.compile(r"[Bb]ackward|_bw_|[dw]grad|threshold_kernel|GammaBeta|layer_norm_grad")
"""Names of kernels that only backward passes have."""
_BEFORE_ITS_UNIT = re.compile(r"[Bb]ackward|threshold_kernel|masked|dropout")
"""Of the backward pass: what an activation behind a unit adds in front of the unit's gradients."""
_HELPER = re.compile(r"splitKreduce|cublasLt::|Memset|\bscal_kernel")
"""Kernels of matrix products that are no product themselves."""
LEAST_KNOWN = 0.5
"""Share of the device's time that operators must explain for kernels' names not to be asked."""
LEAST_MATCHED = 0.75
"""Share of the backward pass's units that must agree with the forward pass."""
MOST_CELLS = 50_000_000


@dataclass(frozen=True)
class _Unit:
    """`first`: place of its first kernel, `kind` as in `_KINDS`."""

    first: int
    kind: KernelClass


@dataclass(frozen=True)
class NamedKernels:
    """`kind` (K,), `layer` (K,): of each kernel; layers are numbers in `names`, NONE for none."""

    kind: IntArray
    layer: IntArray
    names: tuple[str, ...]


def with_kernel_layers(base: Base) -> Base:
    """The base with layers and passes from kernels' names, if operators explain little of it.

    It is unchanged where the passes do not match.
    """
    known = base.on_device & (base.operator != NONE)
    measured_s = float(base.duration_s[base.on_device].sum())
    if not measured_s or base.duration_s[known].sum() >= LEAST_KNOWN * measured_s:
        return base
    chosen = base.on_device & (base.queue != NONE) & (base.kind != Kind.COLLECTIVE)
    order = execution_order(base, chosen)
    named = named_kernels([base.names.ops[op] for op in order.tolist()])
    if named is None:
        return base
    bare = base.operator[order] == NONE
    ops = order[bare]
    kind, layer = base.kind.copy(), base.layer.copy()
    stated = named.kind[bare] != Kind.OTHER
    kind[ops[stated]] = named.kind[bare][stated]
    first = len(base.names.layers)
    inside = (named.layer[bare] != NONE) & (layer[ops] == NONE)
    layer[ops[inside]] = first + named.layer[bare][inside]
    layers = (*base.names.layers, *named.names)
    note = "layers and passes: from the sequence of kernels' names; their operators are unknown"
    return replace(
        base,
        kind=kind,
        layer=layer,
        names=replace(base.names, layers=layers),
        notes=(*base.notes, note),
    )


def named_kernels(kernels: Sequence[str]) -> NamedKernels | None:
    """Passes and layers of a step's kernels; None where the passes do not match."""
    classes = [class_of(name) for name in kernels]
    backward = np.array([bool(_BACKWARD.search(name)) for name in kernels], dtype=np.bool_)
    updates = np.array([one is KernelClass.OPTIMIZER for one in classes], dtype=np.bool_)
    if not backward.any():
        return None
    turn = int(np.flatnonzero(backward)[0])
    behind = np.flatnonzero(updates & (np.arange(len(kernels)) > turn))
    end = int(behind[0]) if len(behind) else len(kernels)
    forward = _units(kernels, classes, 0, turn, (KernelClass.LAYOUT, KernelClass.COPY))
    back = _units(kernels, classes, turn, end, (KernelClass.LAYOUT,))
    matched = _aligned(forward, back)
    if not back or np.count_nonzero(matched != NONE) < LEAST_MATCHED * len(back):
        return None
    kind = np.full(len(kernels), Kind.OTHER, dtype=np.int64)
    kind[:turn], kind[turn:end] = Kind.FORWARD, Kind.BACKWARD
    kind[updates] = Kind.UPDATE
    layer = np.full(len(kernels), NONE, dtype=np.int64)
    for number, unit in enumerate(forward):
        layer[unit.first : turn] = number
    _set_backward(layer, kernels, classes, back, matched, (turn, end))
    layer[updates] = NONE
    return NamedKernels(kind, layer, _names(forward))


def _units(
    kernels: Sequence[str],
    classes: Sequence[KernelClass],
    begin: int,
    end: int,
    prepares: Sequence[KernelClass],
) -> list[_Unit]:
    """The units of the kernels from `begin` to before `end`.

    Neighbours of a kind are one unit, except for products. A convolution may contain products,
    changes of layout and memsets. Kernels of the classes `prepares` in front of a unit are of it.
    """
    units: list[_Unit] = []
    open_kind: KernelClass | None = None
    first = begin  # of the kernels that prepare the next unit
    for place in range(begin, end):
        kind = classes[place]
        if kind not in prepares and "Memset" not in kernels[place] and kind not in _KINDS:
            first = place + 1
        helper = bool(_HELPER.search(kernels[place])) or kind is KernelClass.LAYOUT
        in_convolution = open_kind is KernelClass.CONVOLUTION
        if helper or (in_convolution and kind is KernelClass.GEMM):
            first = place + 1 if kind in _KINDS else first
            continue
        if kind not in _KINDS:
            open_kind = None
        elif kind is KernelClass.GEMM or kind is not open_kind:
            units.append(_Unit(first, kind))
            open_kind = kind
        if kind in _KINDS:
            first = place + 1
    return units


def _aligned(forward: Sequence[_Unit], back: Sequence[_Unit]) -> IntArray:
    """(B,) the number of the forward unit that each backward unit belongs to, NONE for none."""
    slots = [
        number
        for number in reversed(range(len(forward)))
        for _ in range(2 if forward[number].kind is KernelClass.GEMM else 1)
    ]
    matched = np.full(len(back), NONE, dtype=np.int64)
    if not slots or not back or len(slots) * len(back) > MOST_CELLS:
        return matched
    codes = {kind: code for code, kind in enumerate(_KINDS)}
    wanted = np.array([codes[forward[number].kind] for number in slots])
    # best[i, j]: most pairs among the first i backward units and the first j slots
    best = np.zeros((len(back) + 1, len(slots) + 1), dtype=np.int32)
    for row, unit in enumerate(back, 1):
        equal = wanted == codes[unit.kind]
        paired = np.maximum(best[row - 1, 1:], best[row - 1, :-1] + equal)
        best[row, 1:] = np.maximum.accumulate(paired)
    row, column = len(back), len(slots)
    while row and column:
        if best[row, column] == best[row - 1, column]:
            row -= 1
        elif best[row, column] == best[row, column - 1]:
            column -= 1
        else:
            row, column = row - 1, column - 1
            matched[row] = slots[column]
    return matched


def _set_backward(
    layer: IntArray,
    kernels: Sequence[str],
    classes: Sequence[KernelClass],
    back: Sequence[_Unit],
    matched: IntArray,
    places: tuple[int, int],
) -> None:
    """Set the layers from the turn to the end of the backward pass: units, and what is between."""
    turn, end = places
    starts = [(unit.first, int(number)) for unit, number in zip(back, matched, strict=True)]
    known = [(first, number) for first, number in starts if number != NONE]
    for (first, number), (until, following) in zip(
        known, [*known[1:], (end, known[-1][1])], strict=True
    ):
        layer[first:until] = number
        for place in range(first + 1, until):
            in_unit = classes[place] in _KINDS
            if following != number and not in_unit and _BEFORE_ITS_UNIT.search(kernels[place]):
                layer[place:until] = following
                break
    layer[turn : known[0][0]] = known[0][1]


def _names(units: Sequence[_Unit]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    names = []
    for unit in units:
        kind = _KINDS[unit.kind]
        names.append(f"{kind}_{counts.get(kind, 0)}")
        counts[kind] = counts.get(kind, 0) + 1
    return tuple(names)
