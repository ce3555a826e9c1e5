"""The calls that autocast to bfloat16 affects on a processor, and the casts that it adds.

A trace states shapes, but not which tensor an operator reads. So the types of tensors follow from
the order of the calls, by rules:

- An operator reads the newest tensor of its input's number of elements, or else one of the newest
  type. A tensor that is cast before a parameter is read is part of the batch and has no gradient.
- Operators of `LOWER` cast their inputs to bfloat16, those of `SINGLE` to float32 (torch 2.13,
  "Autocast Op Reference", CPU). All others keep the type of their first input, whatever the types
  of their parameters. Concatenations keep the newest type.
- An input with the shape of an accumulated gradient is a parameter. A pass casts each one once.
- A sum of two tensors of equal size adds the newest one to what the last such sum left, as residual
  connections do. If their types differ, it is in float32 and casts the other one.
- The gradient of a cast is a cast. A node of the backward pass has the type of the last call of its
  operator and size whose gradient was not computed yet.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from autotune.dfg.graph import NONE, Kind
from autotune.profiling.graph.host_units import ACCUMULATE
from autotune.whatif.base import Base, Operator

FLOAT = "float"
LOWER = re.compile(
    r"aten::(?:_convolution|addbmm|addmm|baddbmm|bmm|conv\dd|conv_tbc|conv_transpose\dd|"
    r"linalg_vecdot|linear|matmul|mkldnn_rnn_layer|mm|prelu)$"
)
SINGLE = re.compile(
    r"aten::(?:\w+_loss|\w+_loss2d|binary_cross_entropy(?:_with_logits)?|cdist|fft_\w+|kl_div|"
    r"linalg_(?!vecdot)\w+|mse_loss|polar|prod|quantile|stft|trace|\w+_pool3d|\w+_pad[12]d)$"
)
MATRIX = re.compile(r"mm$|addmm|linear|conv|lstm|rnn|matmul|attention")
"""Names of operators that multiply matrices."""
RECURRENT = "aten::mkldnn_rnn_layer"
"""Its backward pass returns float32 gradients, which autograd casts to bfloat16 and back."""
FIRST_STATE = 5
"""The place of the first state among its inputs, which has no gradient where it is zero."""
EMBEDDING = "aten::embedding"
_LEARNED = re.compile(r"embedding|norm")
"""Operators other than products that read parameters."""
_VIEW = re.compile(
    r"aten::(?:alias|as_strided|chunk|detach|empty\w*|expand|narrow|permute|reshape|resolve_\w+|"
    r"select|slice|split|squeeze|t|transpose|unbind|unsqueeze|view|_unsafe_view|zeros\w*|ones\w*)$"
)
_SUM = re.compile(r"aten::(?:add|sub)_?$")
_NODE = re.compile(r"(\w+)Backward\d*$")
Dims = tuple[int, ...]


@dataclass(frozen=True)
class Cast:
    """A cast of a tensor at a call of the forward pass.

    `operator`: the number of the call. `node`: that of its node in the backward pass, NONE if it is
    unknown. `back`: how many casts the gradient takes.
    """

    operator: int
    node: int
    dims: Dims
    back: int


@dataclass
class Autocast:
    """`half`: the numbers of operators that compute in bfloat16 then; `casts`: what is added."""

    half: set[int] = field(default_factory=set)
    casts: list[Cast] = field(default_factory=list)


def autocast(base: Base) -> Autocast:
    """What autocast changes in the step of a processor whose trace states shapes."""
    calls = list(_calls(base))
    operators = base.names.operators
    parameters = Counter(
        one.inputs.dims[0] for one in operators if one.name == ACCUMULATE and one.inputs is not None
    )
    forward = _Forward(parameters)
    for number, kind in calls:
        if kind == Kind.FORWARD:
            forward.call(number, operators[number])
    changes = Autocast(forward.half)
    nodes = _backward(base, calls, forward, changes.half)
    for call, dims, back in forward.casts:
        changes.casts.append(Cast(call, nodes.get(call, NONE), dims, back))
    return changes


def _calls(base: Base) -> Iterator[tuple[int, int]]:
    """The numbers of operators in the order in which their threads begin them, and their kinds."""
    seen: set[int] = set()
    for queue in np.unique(base.queue[base.queue != NONE]).tolist():
        for op in base.queue_order(queue).tolist():
            call = int(base.operator[op])
            if call != NONE and call not in seen:
                seen.add(call)
                yield call, int(base.kind[op])


class _Forward:
    """Walks through the calls of the forward pass.

    `is_half`: number of elements -> whether the newest tensor with it is in bfloat16. `sums`: that
    of the newest sum, or of the first tensor. `made`: by calls of an operator (name, elements).
    """

    def __init__(self, parameters: Counter[Dims]) -> None:
        self.half: set[int] = set()
        self.casts: list[tuple[int, Dims, int]] = []
        self.made: dict[tuple[str, int], list[tuple[int, bool]]] = {}
        self.is_half: dict[int, bool] = {}
        self.sums: dict[int, bool] = {}
        self.parameters = parameters
        self.casts_left = parameters.copy()
        self.product = False  # the call before is a product, whose size is unknown
        self.newest = False  # whether the newest tensor is in bfloat16
        self.learned = False  # whether a parameter was read

    def call(self, number: int, one: Operator) -> None:
        if any(LOWER.match(name) or SINGLE.match(name) for name in one.around):
            if any(LOWER.match(name) for name in one.around):
                self._note(number, one, half=True)
            return
        tensors = _tensors(one)
        if not tensors:
            return
        learned = self.learned
        if LOWER.match(one.name) or _LEARNED.search(one.name):
            self.learned |= any(dims in self.parameters for dims in tensors)
        size = math.prod(tensors[0])
        if self.product and not LOWER.match(one.name):
            self.is_half[size], self.product = True, False
        if LOWER.match(one.name):
            self._lower(number, one, tensors, learned)
        elif SINGLE.match(one.name):
            if self.is_half.get(size, False):
                self.casts.append((number, tensors[0], 1))
            self.newest = False
        elif one.name == EMBEDDING and one.inputs is not None:
            rows = math.prod(math.prod(dims) for dims in one.inputs.dims[1:2])
            self.is_half[rows * tensors[0][-1]] = self.newest = False
        elif not _VIEW.match(one.name):
            self._keep(number, one, tensors)

    def _lower(self, number: int, one: Operator, tensors: list[Dims], learned: bool) -> None:
        twice = 2 if one.name == RECURRENT else 1
        for place, dims in enumerate(tensors):
            size = math.prod(dims)
            if dims in self.parameters:
                if self.casts_left[dims] > 0:
                    self.casts_left[dims] -= 1
                    self.casts.append((number, dims, twice))
            elif not self.is_half.get(size, self.newest):
                state = one.name == RECURRENT and place >= FIRST_STATE
                self.casts.append((number, dims, twice if learned and not state else 0))
        self._note(number, one, half=True)
        self.newest = True
        size_out = _product_size(one.name, tensors)
        self.product = size_out is None
        if size_out is not None:
            self.is_half[size_out] = True
            self.sums.setdefault(size_out, True)

    def _keep(self, number: int, one: Operator, tensors: list[Dims]) -> None:
        size = math.prod(tensors[0])
        half = self.is_half.get(size, False)
        if _SUM.match(one.name) and len(tensors) > 1 and math.prod(tensors[1]) == size:
            other = self.sums.get(size, half)
            if other != half:
                self.casts.append((number, tensors[0], 1))
                half = False
            self.sums[size] = half
        self.sums.setdefault(size, half)
        self.is_half[size] = self.newest = half
        self._note(number, one, half)

    def _note(self, number: int, one: Operator, half: bool) -> None:
        if half:
            self.half.add(number)
        for dims in _tensors(one)[:1]:
            key = _plain(one.name), math.prod(dims)
            self.made.setdefault(key, []).append((number, half))


def _backward(
    base: Base, calls: list[tuple[int, int]], forward: _Forward, half: set[int]
) -> dict[int, int]:
    """Add the operators of the backward pass to `half`; forward call -> its node, where known."""
    nodes: dict[int, int] = {}
    is_half = False
    for number, kind in calls:
        one = base.names.operators[number]
        if kind != Kind.BACKWARD:
            continue
        node = _NODE.match(one.name)
        if node is not None:
            tensors = _tensors(one)
            key = _plain(node[1]), math.prod(tensors[0]) if tensors else 0
            of_key = forward.made.get(key, [])
            call, is_half = of_key.pop() if of_key else (NONE, False)
            nodes[call] = number
        elif not any(map(_NODE.search, one.around)):
            is_half = False
        if is_half or MATRIX.search(one.name):
            half.add(number)
    return nodes


def _tensors(one: Operator) -> list[Dims]:
    """The sizes of the float32 tensors among an operator's inputs."""
    if one.inputs is None:
        return []
    sizes = zip(one.inputs.dims, one.inputs.types, strict=True)
    return [dims for dims, kind in sizes if kind == FLOAT and dims]


def _product_size(name: str, tensors: list[Dims]) -> int | None:
    """Elements of a product of matrices; None for other operators."""
    if name == "aten::linear" and len(tensors) > 1:
        return math.prod(tensors[0]) // max(tensors[1][-1], 1) * math.prod(tensors[1][:-1])
    first = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}.get(name)
    if first is None or len(tensors) < first + 2:
        return None
    return math.prod(tensors[first][:-1]) * tensors[first + 1][-1]


def _plain(name: str) -> str:
    """`aten::native_batch_norm` and `NativeBatchNorm` as one name."""
    return name.removeprefix("aten::").replace("_", "").lower()
