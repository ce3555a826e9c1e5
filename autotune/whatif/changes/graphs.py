"""What if the step were captured in CUDA graphs?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autotune.arrays import BoolArray, IntArray
from autotune.dfg.graph import NONE, Kind
from autotune.whatif.base import Base
from autotune.whatif.kernels.situations import execution_order, require
from autotune.whatif.primitives import connect, remove, usual_launch
from autotune.whatif.question import Question, Reading
from autotune.whatif.registry import what_if

SMALLEST_GRAPH = 2
"""Kernels of a graph that is worth a launch of its own."""
NODE_S = {Reading.OPTIMISTIC: 0.0, Reading.EXPECTED: 0.2e-6, Reading.PESSIMISTIC: 0.4e-6}
"""What a node adds to its graph's launch on the host: nothing for straight lines since CUDA 12.6,
tenths of a microsecond before. Assumed; not measured here."""


@what_if(
    "cuda_graphs",
    title="CUDA graphs",
    source="CUDA programming guide, CUDA graphs; torch.cuda.graph",
    enact="torch.compile(model, mode='reduce-overhead'), or torch.cuda.graph around the step",
)
def cuda_graphs(base: Base, question: Question) -> Base:
    """Stretches of launches become one launch each; the host does nothing else for them.

    A call that waits for the device ends a graph, since it cannot be captured. Copies between host
    and device, collectives of host threads and data loading stay outside. The order on streams and
    between them stays, and so do pauses between kernels. Assumes static shapes, and that the code
    between two steps stays (in the optimistic reading it vanishes). Combine other what-ifs before
    this one: kernels of a graph have no launch of their own.
    """
    call_s, _ = usual_launch(base)
    for graph in _graphs(base, _captured(base)):
        base = _with_graph(base, graph, call_s, question.reading)
    return base


def _captured(base: Base) -> BoolArray:
    """(N,) host ops that launch something, or are between ops that do, and do not wait for it."""
    device = base.on_device & (base.launch != NONE) & (base.kind != Kind.COPY)
    require(device, "the trace has no kernels that the host launches one by one")
    copied = base.launch[base.on_device & (base.launch != NONE) & (base.kind == Kind.COPY)]
    waiting = base.child[base.on_device[base.parent] & ~base.on_device[base.child]]
    captured: BoolArray = ~base.on_device & (base.kind == Kind.LAUNCH) & (base.queue != NONE)
    captured[copied] = False
    captured[waiting] = False
    return captured


def _graphs(base: Base, captured: BoolArray) -> Iterator[IntArray]:
    """The host ops of each graph, in order: those between two waits."""
    waiting = np.zeros(base.ops, dtype=np.bool_)
    waiting[base.child[base.on_device[base.parent] & ~base.on_device[base.child]]] = True
    launches = np.zeros(base.ops, dtype=np.bool_)
    launches[base.launch[base.launch != NONE]] = True
    order = execution_order(base, captured | waiting)
    cuts = np.flatnonzero(waiting[order])
    for part in np.split(order, cuts):
        graph = part[captured[part]]
        if np.sum(launches[graph]) >= SMALLEST_GRAPH:
            yield graph


def _with_graph(base: Base, ops: IntArray, call_s: float, reading: Reading) -> Base:
    """One launch in the place of all host ops of a graph."""
    members = np.zeros(base.ops, dtype=np.bool_)
    members[ops] = True
    inside = base.on_device & (base.launch != NONE)
    inside[inside] = members[base.launch[inside]]
    nodes = base.launched[inside[base.launched]]
    first = int(base.launch[nodes[0]])
    kept_gap_s = _kept_gap_s(base, members, reading)
    rest = members.copy()
    rest[first] = False
    launch = base.launch.copy()
    launch[nodes[1:]] = NONE
    is_later_node = np.zeros(base.ops, dtype=np.bool_)
    is_later_node[nodes[1:]] = True
    changed = remove(base, rest, launches=False)
    duration_s, gap_s = changed.duration_s.copy(), changed.gap_s.copy()
    duration_s[first] = call_s + NODE_S[reading] * len(nodes)
    gap_s[first] = kept_gap_s
    names = list(base.names.ops)
    names[first] = "cudaGraphLaunch"
    changed = replace(
        changed,
        duration_s=duration_s,
        gap_s=gap_s,
        launch=launch,
        launched=base.launched[~is_later_node[base.launched]],
        names=replace(base.names, ops=tuple(names)),
    )
    return connect(changed, first, np.setdiff1d(base.launch[nodes], [first]))


def _kept_gap_s(base: Base, members: BoolArray, reading: Reading) -> float:
    """Data loading within the graph's host ops, and the code between two steps."""
    kept_s = base.loading_s
    if reading is not Reading.OPTIMISTIC:
        kept_s = kept_s + base.between_s
    recorded = len(kept_s)
    return float(np.minimum(kept_s, base.gap_s[:recorded])[members[:recorded]].sum())
