"""Compiles sets of ops as one kernel each, by XLA's scopes.

XLA clusters neighbours that share `_XlaScope` and carry `_XlaCompile`, as long as no cycle arises.
Grappler is off, so nothing else moves nodes. Partition graphs show what was compiled: a cluster is
an `_XlaCompile` with an `_XlaRun`, and its ops are gone. Their names are not stated, so clusters
are recognized by what they read and by who reads them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.python.util.pywrap_xla_ops import get_cpu_kernel_names, get_gpu_kernel_names

from autotune.errors import InvalidInput
from autotune.strategy_space.strategy import OpFusionSets
from runtime_rewriter.tensorflow.graph_view import GraphView, control_inputs, data_inputs

v1 = tf.compat.v1

COMPILE, SCOPE = "_XlaCompile", "_XlaScope"
CLUSTER_RUNS = "_XlaRun"
_OUTSIDE = "outside"
_ENTERS, _LEAVES = ("_Recv", "_HostRecv", "_Arg"), ("_Send", "_HostSend", "_Retval")
_MOVES_DATA = ("Collective", "_Send", "_Recv")
"""XLA knows collectives of its own accelerators, not those between servers."""


def compilable_ops(device: str) -> frozenset[str]:
    """Types of the ops that XLA compiles for `device`, without messages."""
    known = get_gpu_kernel_names() if "GPU" in device.upper() else get_cpu_kernel_names()
    return frozenset(op for op in known if not op.startswith(_MOVES_DATA))


def refuse_fusion(view: GraphView, op_fusion: OpFusionSets, device: str) -> None:
    """Raise `InvalidInput`, naming the op, for a set that XLA cannot compile."""
    compilable = compilable_ops(device)
    for names in op_fusion:
        for name in names:
            node = view.nodes.get(name)
            if node is None:
                raise InvalidInput(
                    f"op_fusion must name ops of the graph, but the graph lacks {name!r}"
                )
            if node.op not in compilable:
                raise InvalidInput(
                    f"op_fusion needs ops that XLA compiles for {device}, but {name!r} is of type "
                    f"{node.op}; leave it out"
                )


def set_scopes(graph_def: GraphDef, op_fusion: OpFusionSets, devices: Sequence[str]) -> None:
    """Let XLA compile the copies of each set that a replica runs.

    Raises `InvalidInput` for a set whose ops run on several devices, or that waits for itself.
    """
    nodes = {node.name: node for node in graph_def.node} if op_fusion else {}
    for number, names in enumerate(op_fusion):
        for rank, device in enumerate(devices):
            copies = [nodes.get(f"replica_{rank}/{name}") for name in names]
            for copy in copies:
                if copy is None:
                    continue
                if copy.device != device:
                    raise InvalidInput(
                        f"the ops of a set of op_fusion must run on one device, but {copy.name!r} "
                        f"runs on {copy.device}, where its variable is; leave it out"
                    )
                copy.attr[COMPILE].b = True
                copy.attr[SCOPE].s = f"fused_{number}_replica_{rank}".encode()
    _refuse_cycles(graph_def)


def _scope_of(graph_def: GraphDef) -> dict[str, str]:
    """Node -> its scope."""
    return {
        node.name: node.attr[SCOPE].s.decode()
        for node in graph_def.node
        if SCOPE in node.attr and node.attr[COMPILE].b
    }


def _refuse_cycles(graph_def: GraphDef) -> None:
    """Raise `InvalidInput` where a set, or two of them, would have to wait for itself.

    A set is not convex if a path leaves it and comes back: its one kernel would need its own
    result. The same holds between sets. Messages count: a set cannot hold the two ends of one.
    """
    inside = _scope_of(graph_def)
    reads: dict[str, set[str]] = defaultdict(set)
    for node in graph_def.node if inside else ():
        place = inside.get(node.name, node.name)
        sources = [tensor.node for tensor in data_inputs(node)] + control_inputs(node)
        reads[place] |= {inside.get(name, name) for name in sources} - {place}
    left = _on_cycles(reads)
    stuck = sorted(set(inside.values()) & left)
    if stuck:
        path = sorted(left - set(stuck))
        between = f" by way of {path[0]!r}" if path else ""
        members = ", ".join(sorted(name for name in inside if inside[name] == stuck[0])[:3])
        raise InvalidInput(
            "a set of op_fusion must be convex: no path may leave it and come back, but one does"
            f"{between} for the set of {members}; add the ops between, or cut the set"
        )


def can_be_kernels(view: GraphView, op_fusion: Sequence[tuple[str, ...]]) -> bool:
    """Whether no set, nor two of them, would have to wait for itself in the training graph."""
    inside = {name: f"set {number}" for number, names in enumerate(op_fusion) for name in names}
    reads: dict[str, set[str]] = defaultdict(set)
    for name, node in view.nodes.items():
        place = inside.get(name, name)
        sources = [tensor.node for tensor in view.inputs[name]] + control_inputs(node)
        reads[place] |= {inside.get(one, one) for one in sources} - {place}
    return not _on_cycles(reads)


def _on_cycles(reads: Mapping[str, set[str]]) -> set[str]:
    """Nodes on a cycle or between two of them."""
    left = _without_ends(set(reads), reads)
    readers: dict[str, set[str]] = defaultdict(set)
    for name in left:
        for source in reads[name] & left:
            readers[source].add(name)
    return _without_ends(left, readers)


def _without_ends(names: set[str], reads: Mapping[str, set[str]]) -> set[str]:
    """Remove nodes that read none of the others, again and again."""
    readers: dict[str, list[str]] = defaultdict(list)
    missing = {name: len(reads.get(name, set()) & names) for name in names}
    for name in names:
        for source in reads.get(name, set()) & names:
            readers[source].append(name)
    ended = [name for name, count in missing.items() if count == 0]
    left = set(names)
    while ended:
        name = ended.pop()
        left.discard(name)
        for reader in readers[name]:
            missing[reader] -= 1
            if missing[reader] == 0:
                ended.append(reader)
    return left


def ran_compiled(metadata: Any) -> bool:
    """Whether all clusters of a traced step ran as kernels of XLA, and there are some.

    A cluster that XLA cannot compile falls back to a call of its ops, without any error.
    """
    labels = [
        node.timeline_label
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
    ]
    compiled = sum(f"= {CLUSTER_RUNS}(" in label for label in labels)
    return 0 < compiled == sum(f"= {COMPILE}(" in label for label in labels)


def seen_options() -> Any:
    """RunOptions of a step for `compilation_error`."""
    return v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE, output_partition_graphs=True)


def compilation_error(graph_def: GraphDef, metadata: Any) -> str | None:
    """The rule that a traced step broke if its kernels were not exactly the graph's sets."""
    error = fusion_error(graph_def, metadata.partition_graphs)
    if error is None and not ran_compiled(metadata):
        error = "XLA could not compile a set, whose ops ran one by one instead"
    if error is None:
        return None
    return f"each set of op_fusion must run as one kernel, but {error}; leave these ops out"


def fusion_error(graph_def: GraphDef, partitions: Iterable[Any]) -> str | None:
    """Say how the compiled clusters differ from the graph's scopes; None if they are the same.

    `partitions`: `RunMetadata.partition_graphs` of a step that ran the whole graph.
    """
    present = {node.name: node for partition in partitions for node in partition.node}
    inside = _scope_of(graph_def)
    apart = sorted(inside.keys() & present.keys())
    if apart:
        return f"{len(apart)} ops of the sets were not compiled, such as {apart[0]!r}"
    prefixes = {_prefix(name) for name, node in present.items() if node.op == CLUSTER_RUNS}
    clusters = {name: _prefix(name) for name in present if _prefix(name) in prefixes}
    ran = [one for one in graph_def.node if one.name in inside or one.name in present]
    expected = _surroundings(_planned_edges(ran), inside)
    compiled = _surroundings(_compiled_edges(present), clusters)
    if Counter(expected.values()) != Counter(compiled.values()):
        return (
            f"the plan has {len(expected)} sets, but {len(compiled)} clusters were compiled, or "
            "they read other nodes than the sets do"
        )
    return None


def _prefix(name: str) -> str:
    return name.rpartition("/")[0]


def _planned_edges(nodes: Iterable[NodeDef]) -> Iterator[tuple[str, str]]:
    """(reader, source) of each edge; the other end of a transfer or of a feed is `_OUTSIDE`."""
    by_name = {node.name: node for node in nodes}
    for node in by_name.values():
        for tensor in data_inputs(node):
            source = by_name.get(tensor.node)
            is_near = (
                source is not None and source.device == node.device and source.op != "Placeholder"
            )
            yield node.name, tensor.node if is_near else _OUTSIDE


def _compiled_edges(present: Mapping[str, NodeDef]) -> Iterator[tuple[str, str]]:
    for name, node in present.items():
        for tensor in data_inputs(node) if node.op not in _LEAVES else ():
            source = present.get(tensor.node)
            enters = source is None or source.op in _ENTERS
            yield name, _OUTSIDE if enters else tensor.node


def _surroundings(
    edges: Iterable[tuple[str, str]], inside: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Set -> what it reads and who reads it: names of nodes, without the names of other sets."""
    reads: dict[str, set[str]] = {place: set() for place in inside.values()}
    readers: dict[str, set[str]] = {place: set() for place in inside.values()}
    for reader, source in edges:
        place, origin = inside.get(reader), inside.get(source)
        if place == origin:
            continue
        if place is not None:
            reads[place].add("a set" if origin else source)
        if origin is not None:
            readers[origin].add("a set" if place else reader)
    return {place: (*sorted(reads[place]), "->", *sorted(readers[place])) for place in reads}
