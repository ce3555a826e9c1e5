"""Sets of ops of a training graph that may pay as one kernel each.

Source: DisCo, sec. 2.2: an op is fused with one that reads it, again and again. Here the pair with
the largest tensor between them comes first, because a fused kernel saves that tensor's way through
memory. A set is convex at any time. It stays within one phase of the step, so no set waits for
messages, and no forward op waits for the backward pass. All its ops depend on the same feeds: XLA
takes a fed value of a session over gRPC for one that may be missing, and compiles no kernel of ops
that may be missing together with others. DisCo's duplicate fusion, which computes an
op inside a set and again outside, has no scope in TensorFlow.

| symbol | meaning | unit |
|---|---|---|
| inner_bytes | size of the tensors that only ops of the set read | bytes |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef

from runtime_rewriter.tensorflow.graph_view import GraphView, TensorName, control_inputs
from runtime_rewriter.tensorflow.op_fusion import compilable_ops
from runtime_rewriter.tensorflow.training_graph import TrainingGraph, Types

MOST_OPS = 64
"""Ops of one set: XLA's time to compile grows with them."""
MOST_SETS = 64
"""Proposed sets, those with the largest inner tensors."""
MOST_MERGES = 1000
"""Pairs of neighbours that are tried."""
LEAST_INNER_BYTES = 1 << 16
"""Starting a kernel took 52 us in a trace (docs/results/speed.md); smaller tensors cost less."""

# fmt: off
_ELEMENTWISE = frozenset({
    "Abs", "Add", "AddN", "AddV2", "BiasAdd", "Cast", "Ceil", "Cos", "Div", "DivNoNan", "Elu",
    "EluGrad", "Equal", "Erf", "Erfc", "Exp", "Expm1", "Floor", "Greater", "GreaterEqual",
    "Identity", "Inv", "InvGrad", "IsFinite", "LeakyRelu", "LeakyReluGrad", "Less", "LessEqual",
    "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mul",
    "MulNoNan", "Neg", "NotEqual", "OnesLike", "Pow", "RealDiv", "Reciprocal", "ReciprocalGrad",
    "Relu", "Relu6", "Relu6Grad", "ReluGrad", "Rsqrt", "RsqrtGrad", "Select", "SelectV2", "Selu",
    "SeluGrad", "Sigmoid", "SigmoidGrad", "Sign", "Sin", "Softplus", "SoftplusGrad", "Softsign",
    "SoftsignGrad", "Sqrt", "SqrtGrad", "Square", "SquaredDifference", "Sub", "Tan", "Tanh",
    "TanhGrad", "Xdivy", "Xlogy", "ZerosLike",
})
_AROUND = frozenset({
    "BiasAddGrad", "BroadcastTo", "ExpandDims", "LogSoftmax", "Max", "Mean", "Min", "Prod",
    "Reshape", "Softmax", "Squeeze", "Sum", "Tile",
})
"""Reductions, broadcasts and new shapes, which XLA fuses with elementwise ops next to them."""
# fmt: on
_BACKWARD = ("gradient_tape", "gradients")


class Phase(StrEnum):
    """The part of a step to which an op belongs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True)
class FusibleSet:
    """Names of the ops, in topological order."""

    phase: Phase
    ops: tuple[str, ...]
    inner_bytes: int


def concrete_types(training: TrainingGraph, shapes: Mapping[str, tuple[int, ...]]) -> Types:
    """The types of all tensors of one replica, whose feeds have these `shapes`."""
    graph_def = GraphDef()
    graph_def.CopyFrom(training.graph_def)
    of_node = {feed.tensor.node: shapes[feed.name] for feed in training.feeds}
    for node in graph_def.node:
        if node.name in of_node:
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(of_node[node.name]).as_proto())
    return Types.of(graph_def)


def phase_of_ops(training: TrainingGraph) -> dict[str, Phase]:
    """The phase of each node that a step runs."""
    view = training.view
    compute = view.upstream([one.values.node for one in training.gradients])
    phases = {
        name: Phase.BACKWARD if any(part in name for part in _BACKWARD) else Phase.FORWARD
        for name in compute
    }
    for name in view.upstream(training.targets) - compute:
        phases[name] = Phase.UPDATE
    return phases


def fed_from(training: TrainingGraph, phases: Mapping[str, Phase]) -> dict[str, int]:
    """The feeds and averaged gradients on which each node depends, as bits of a number.

    An averaged gradient depends on the feeds of all replicas.
    """
    view = training.view
    bits = {feed.tensor.node: 1 << number for number, feed in enumerate(training.feeds)}
    averaged = {
        one.values: 1 << len(bits) + number for number, one in enumerate(training.gradients)
    }
    fed = {name: bits.get(name, 0) for name in view.nodes}
    changed = True
    while changed:  # a second time for control edges against the order of the data
        changed = False
        for name in view.topological:
            reached = fed[name]
            for tensor in view.inputs[name]:
                reads_average = phases.get(name) is Phase.UPDATE and tensor in averaged
                reached |= averaged[tensor] if reads_average else fed[tensor.node]
            for source in control_inputs(view.nodes[name]):
                reached |= fed[source]
            changed |= reached != fed[name]
            fed[name] = reached
    return fed


def fusible_sets(training: TrainingGraph, types: Types, device: str) -> tuple[FusibleSet, ...]:
    """Sets that XLA can compile for `device`, those with the largest inner tensors first.

    Sets of elementwise ops alone are proposed, too, since XLA's reductions may be slow. So sets can
    overlap. `types`: those of `concrete_types`. Tensors without a known size count as empty.
    """
    kept = {str(one) for one in training.fetches.values()}
    phases = phase_of_ops(training)
    fed = fed_from(training, phases)
    sets = sets_of_graph(training.view, types, phases, kept, device, fed)
    return tuple(one for one in sets if one.inner_bytes >= LEAST_INNER_BYTES)[:MOST_SETS]


def sets_of_graph(
    view: GraphView,
    types: Types,
    phases: Mapping[str, Phase],
    kept: Collection[str],
    device: str,
    fed: Mapping[str, int] = {},
) -> list[FusibleSet]:
    """All sets of the nodes in `phases`, as `fusible_sets` finds them.

    `kept`: tensors that are results of the graph. `fed`: see `fed_from`.
    """
    compilable = compilable_ops(device)
    distinct = {
        one: None
        for kinds in (_ELEMENTWISE | _AROUND, _ELEMENTWISE)
        for one in _Growing(view, types, phases, kept, compilable & kinds, fed).sets()
    }
    return sorted(distinct, key=lambda one: (-one.inner_bytes, one.ops))


class _Growing:
    def __init__(
        self,
        view: GraphView,
        types: Types,
        phases: Mapping[str, Phase],
        kept: Collection[str],
        usable: frozenset[str],
        fed: Mapping[str, int],
    ) -> None:
        self._view, self._types, self._phases, self._kept = view, types, phases, kept
        self._fed = fed
        self._eligible = {name for name in self._phases if self._is_eligible(name, usable)}
        self._readers: dict[str, set[str]] = {name: set() for name in self._view.nodes}
        for name, node in self._view.nodes.items():
            for source in self._sources(name, control_inputs(node)):
                self._readers[source].add(name)
        self._place = {name: name for name in self._eligible}
        self._members = {name: {name} for name in self._eligible}

    def sets(self) -> list[FusibleSet]:
        for _, source, reader in self._pairs()[:MOST_MERGES]:
            first, second = self._place[source], self._place[reader]
            if first != second and self._can_merge(first, second):
                self._members[first] |= self._members.pop(second)
                self._place.update(dict.fromkeys(self._members[first], first))
        described = [self._described(members) for members in self._members.values()]
        return [one for one in described if len(one.ops) > 1]

    def _sources(self, name: str, control: Iterable[str] = ()) -> set[str]:
        return {tensor.node for tensor in self._view.inputs[name]} | set(control)

    def _is_eligible(self, name: str, usable: frozenset[str]) -> bool:
        if self._view.nodes[name].op not in usable:
            return False
        tensors = [*self._view.inputs[name], TensorName(name, 0)]
        dtypes = [self._types.dtypes[tensor] for tensor in tensors]
        return "resource" not in dtypes and "float" in dtypes[-1] + dtypes[0]

    def _bytes(self, tensor: TensorName) -> int:
        shape = self._types.shapes[tensor]
        if shape is None or None in shape:
            return 0
        extents = [extent for extent in shape if extent is not None]
        return math.prod(extents) * int(tf.as_dtype(self._types.dtypes[tensor]).size)

    def _pairs(self) -> list[tuple[int, str, str]]:
        """(-bytes between, op, its reader) of neighbours of one phase; small tensors are left."""
        pairs = [
            (-self._bytes(tensor), tensor.node, reader)
            for reader in self._eligible
            for tensor in set(self._view.inputs[reader])
            if tensor.node in self._eligible
            and self._phases[tensor.node] is self._phases[reader]
            and self._fed.get(tensor.node) == self._fed.get(reader)
        ]
        return sorted(pair for pair in pairs if pair[0] < 0)

    def _can_merge(self, first: str, second: str) -> bool:
        """Whether no other path leads from the one to the other, along which both would wait."""
        inside = self._members[first] | self._members[second]
        if len(inside) > MOST_OPS:
            return False
        phase = self._phases[first]
        starts = {reader for name in self._members[first] for reader in self._readers[name]}
        waiting = [name for name in starts - inside if self._phases.get(name) is phase]
        seen: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            together = self._members.get(self._place.get(name, ""), {name})
            seen |= together
            for member in together:
                for reader in self._readers[member]:
                    if reader in self._members[second]:
                        return False
                    if self._phases.get(reader) is phase and reader not in inside:
                        waiting.append(reader)
        return True

    def _described(self, members: set[str]) -> FusibleSet:
        ops = tuple(sorted(members, key=self._view.turns.__getitem__))
        inner = [
            self._bytes(TensorName(name, 0))
            for name in ops
            if self._readers[name] <= members and f"{name}:0" not in self._kept
        ]
        return FusibleSet(self._phases[ops[0]], ops, sum(inner))
