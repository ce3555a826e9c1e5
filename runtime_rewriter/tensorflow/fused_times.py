"""Times of sets of ops, as one kernel and op by op, on this machine.

| symbol | meaning | unit |
|---|---|---|
| apart_s | time of a set's ops one by one, without the start of a session's run | s |
| fused_s | time of the set as one compiled kernel, likewise | s |

Both run in one session of this process, in turns, and return their results. Their inputs are
variables with random values, so no input is copied. The first runs, which compile, do not count.
Sets of equal ops and shapes are measured once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from runtime_rewriter.tensorflow.fusible_sets import FusibleSet, Phase
from runtime_rewriter.tensorflow.graph_view import GraphView, TensorName
from runtime_rewriter.tensorflow.op_fusion import (
    CLUSTER_RUNS,
    COMPILE,
    SCOPE,
    fusion_error,
    ran_compiled,
    seen_options,
)
from runtime_rewriter.tensorflow.training_graph import Types

v1 = tf.compat.v1

REPEATS = 15
WARM_UP = 3
LEAST_S = 5e-6
"""A node takes the executor about that long. Runs differ by more, so some seem to take nothing."""
BUDGET_S = 8.0
"""Time for all sets. Those that it does not reach stay unmeasured."""


@dataclass(frozen=True)
class SetTimes:
    """Seconds of each repeat; the same number belongs to runs next to each other.

    `exact`: whether the partition graphs that ran have exactly the scopes as compiled clusters, and
    each of them a result.
    """

    apart_s: tuple[float, ...]
    fused_s: tuple[float, ...]
    exact: bool = True

    @property
    def median_s(self) -> tuple[float, float]:
        """Time apart and fused."""
        return median(self.apart_s), median(self.fused_s)

    @property
    def saved_s(self) -> float:
        """Median of the differences; negative if the kernel is slower."""
        return median(a - b for a, b in zip(self.apart_s, self.fused_s, strict=True))

    @property
    def ratio(self) -> float:
        """Time apart / time fused, medians: above 1 the kernel is faster."""
        apart_s, fused_s = self.median_s
        return apart_s / fused_s

    @property
    def pays(self) -> bool:
        """Whether three of four repeats agree that the kernel is faster."""
        faster = sum(a > b for a, b in zip(self.apart_s, self.fused_s, strict=True))
        return self.saved_s > 0 and faster >= 0.75 * len(self.apart_s)


def measured_times(
    view: GraphView,
    types: Types,
    sets: Sequence[FusibleSet],
    known: Mapping[TensorName, np.ndarray],
    config: Any,
    budget_s: float = BUDGET_S,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[FusibleSet, SetTimes]:
    """The times of the sets, largest inner tensors first, until `budget_s` have passed.

    `known`: values of `shape_inputs`. `config`: the session's configuration, which is that of the
    training's servers. Sets without known shapes of their inputs, and sets that XLA cannot compile,
    are left out.
    """
    ends_s = clock() + budget_s
    by_kind: dict[object, SetTimes | None] = {}
    times: dict[FusibleSet, SetTimes] = {}
    for one in sets:
        kind = _kind(view, types, one)
        if kind not in by_kind:
            if clock() > ends_s:
                continue
            scopes = dict.fromkeys(one.ops, "set")
            by_kind[kind] = paired_times(
                view, types, scopes, config, known=known, repeats=repeats, clock=clock
            )
        of_kind = by_kind[kind]
        if of_kind is not None:
            times[one] = of_kind
    return times


def _kind(view: GraphView, types: Types, one: FusibleSet) -> object:
    """Equal for sets of equal ops that read equal shapes in the same places."""
    numbers = {name: number for number, name in enumerate(one.ops)}
    return tuple(
        (
            view.nodes[name].op,
            tuple(numbers.get(tensor.node, -1) for tensor in view.inputs[name]),
            tuple(str(types.shapes[tensor]) for tensor in view.inputs[name]),
            str(types.shapes[TensorName(name, 0)]),
        )
        for name in one.ops
    )


def paired_times(
    view: GraphView,
    types: Types,
    scopes: Mapping[str, str],
    config: Any,
    *,
    results: Sequence[TensorName] = (),
    known: Mapping[TensorName, np.ndarray] = {},
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> SetTimes | None:
    """Times of the ops in `scopes`, apart and with one kernel per scope ("": the op stays apart).

    `results`: the tensors to compute; by default all that other ops of the graph read. None if an
    input is unknown, or if XLA cannot compile a scope.
    """
    ends = [str(one) for one in results] or _read_outside(view, scopes)
    try:
        graph = paired_graph(view, types, scopes, ends, known)
        return None if graph is None else _times_in(graph, config, repeats, clock)
    except (tf.errors.OpError, ValueError):  # the set alone is no valid graph, or does not compile
        return None


def _times_in(graph: Any, config: Any, repeats: int, clock: Callable[[], float]) -> SetTimes | None:
    with v1.Session(graph=graph, config=config) as session:
        session.run("start")
        exact = compiled_exactly(session, graph)
        if exact is None:
            return None
        calls = {label: session.make_callable(graph.get_collection(label)) for label in _LABELS}
        empty = session.make_callable(graph.get_operation_by_name("empty"))
        spent_s = seconds_in_turns({**calls, "empty": empty}, repeats, clock)
    empty_s = median(spent_s["empty"])
    apart, fused = (without_start(spent_s[label], empty_s) for label in _LABELS)
    return SetTimes(apart, fused, exact)


_LABELS = ("apart", "fused")


def compiled_exactly(session: Any, graph: Any) -> bool | None:
    """Run a `paired_graph` fused: whether its clusters are the scopes, each with a result.

    None if XLA cannot compile one of them. It drops ops whose results nobody reads as data.
    """
    metadata = v1.RunMetadata()
    session.run(graph.get_collection("fused"), options=seen_options(), run_metadata=metadata)
    if not ran_compiled(metadata):
        return None
    partitions = metadata.partition_graphs
    return fusion_error(graph.as_graph_def(), partitions) is None and all(
        node.attr["Tresults"].list.type
        for partition in partitions
        for node in partition.node
        if node.op == CLUSTER_RUNS
    )


def seconds_in_turns(
    calls: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each call in each repeat, without its first runs; the order turns around."""
    for _ in range(WARM_UP):
        for call in calls.values():
            call()
    spent_s: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            began_s = clock()
            calls[name]()
            spent_s[name].append(clock() - began_s)
    return spent_s


def without_start(spent_s: Sequence[float], empty_s: float) -> tuple[float, ...]:
    """The times of runs without that of an empty one, each at least `LEAST_S`."""
    return tuple(max(one - empty_s, LEAST_S) for one in spent_s)


def outer_inputs(view: GraphView, ops: Collection[str]) -> list[TensorName]:
    """The tensors that ops read from outside, each once."""
    read = (tensor for name in ops for tensor in view.inputs[name])
    return list(dict.fromkeys(tensor for tensor in read if tensor.node not in ops))


def shape_inputs(view: GraphView, types: Types, sets: Sequence[FusibleSet]) -> list[TensorName]:
    """The integers that sets before the update read, such as shapes and axes of sums."""
    integers: dict[TensorName, None] = {}
    for one in sets:
        if one.phase is Phase.UPDATE:  # to compute them may update variables
            continue
        for tensor in outer_inputs(view, one.ops):
            dtype = tf.as_dtype(types.dtypes[tensor])
            if dtype.is_integer and view.nodes[tensor.node].op != "Const":
                integers[tensor] = None
    return list(integers)


def _read_outside(view: GraphView, ops: Collection[str]) -> list[str]:
    """The tensors of ops that others read; the last op's if there are none."""
    read = {
        tensor
        for name in ops
        for reader in view.consumers.get(name, ())
        if reader not in ops
        for tensor in view.inputs[reader]
        if tensor.node == name
    }
    last = max(ops, key=view.turns.__getitem__)
    return [str(tensor) for tensor in sorted(read) or [TensorName(last, 0)]]


def paired_graph(
    view: GraphView,
    types: Types,
    scopes: Mapping[str, str],
    ends: Sequence[str],
    known: Mapping[TensorName, np.ndarray],
) -> Any:
    """A graph with the targets `empty` and `start`, and collections of results `apart` and `fused`.

    None if an input is unknown.
    """
    outer = outer_inputs(view, scopes)
    random = np.random.default_rng(0)
    values = [_value(view, types, tensor, known, random) for tensor in outer]
    if any(value is None for value in values):
        return None
    graph = tf.Graph()
    with graph.as_default(), tf.device("/device:CPU:0"):
        sources = {f"outer_{number}": _source(value) for number, value in enumerate(values)}
        start = v1.global_variables_initializer()
        for label in ("apart", "fused"):
            imported = GraphDef()
            for name in scopes:
                scope = scopes[name] if label == "fused" else ""
                imported.node.append(_copy(view, name, outer, scope))
            results = tf.graph_util.import_graph_def(
                imported, sources, [_flat(end) for end in ends], name=f"{label}_ops"
            )
            for result in results:
                graph.add_to_collection(label, result)
        tf.no_op("empty")
        with tf.control_dependencies([start]):
            tf.no_op("start")
    return graph


def _source(value: np.ndarray) -> Any:
    if value.dtype.kind in "iu":  # XLA takes shapes and axes from the host
        return tf.constant(value)
    held = v1.Variable(value, use_resource=True)
    return held.read_value()


def _flat(name: str) -> str:
    return name.replace("/", "_")


def _copy(view: GraphView, name: str, outer: Sequence[TensorName], scope: str) -> NodeDef:
    copy = NodeDef()
    copy.CopyFrom(view.nodes[name])
    copy.name, copy.device = _flat(name), ""
    for attr in ("_class", COMPILE, SCOPE):
        copy.attr.pop(attr, None)
    if scope:
        copy.attr[COMPILE].b = True
        copy.attr[SCOPE].s = scope.encode()
    del copy.input[:]
    copy.input.extend(
        f"outer_{outer.index(tensor)}:0"
        if tensor in outer
        else f"{_flat(tensor.node)}:{tensor.output}"
        for tensor in view.inputs[name]
    )
    return copy


def _value(
    view: GraphView,
    types: Types,
    tensor: TensorName,
    known: Mapping[TensorName, np.ndarray],
    random: np.random.Generator,
) -> Any:
    """A constant's or known value, or random numbers of the tensor's shape and dtype, or None."""
    node = view.nodes[tensor.node]
    if node.op == "Const":
        return tf.make_ndarray(node.attr["value"].tensor)
    if tensor in known:
        return known[tensor]
    shape, dtype = types.shapes[tensor], tf.as_dtype(types.dtypes[tensor])
    if shape is None or None in shape or not (dtype.is_floating or dtype.is_bool):
        return None
    extents = [extent or 0 for extent in shape]
    values = random.uniform(0.1, 1.0, extents)  # fit for logarithms, roots and divisions
    return values > 0.5 if dtype.is_bool else values.astype(dtype.as_numpy_dtype)
