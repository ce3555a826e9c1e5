"""Maps host work to layers: the module instances of the training (Daydream, sec. 4.2.3).

Module frames and annotations state the layer of a forward operator. Where none does, every forward
operator that has parameters is an instance, named by its kind and its place (`conv_17`), and what
follows it without parameters (relu, add) belongs to it.

The backward pass has no frames. A node belongs to the layer of the forward operator with its
sequence number. Where none was recorded, nodes are counted: autograd runs them in the reversed
order of the forward pass. A gradient is accumulated right after the node that completes it. Forward
operators within a node recompute instances: a stretch of the forward pass that ends near the node's
own. An optimizer that updates parameter by parameter is taken to follow their first use.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from autotune.profiling.formats.rank_trace import TracedStep
from autotune.profiling.graph.forward_passes import (
    ForwardPass,
    find_origins,
    find_passes,
    instances_of,
)
from autotune.profiling.graph.host_units import Role, Unit
from autotune.profiling.graph.operators import kind_of, prepares

MOST_UPDATES = 12
"""Operators per parameter up to which an optimizer is recognized that updates one by one."""


def find_layers(
    units: Sequence[Unit], steps: Sequence[TracedStep], stated: Mapping[int, str], updates: set[int]
) -> set[str]:
    """Set `layer` of all units; return what is stated as a layer but is a whole forward pass.

    `stated`: event that begins a unit -> the layer that frames and annotations state, if they do.
    `updates`: events that begin a unit of the optimizer, as annotations state.
    """
    phases: set[str] = set()
    origins = find_origins(units)
    inner: dict[Unit, list[Unit]] = {}
    for unit in units:
        if unit.inside is not None:
            inner.setdefault(unit.inside, []).append(unit)
    for one in find_passes(units, steps, origins, stated, updates):
        phases |= _forward(one, stated)
        _backward(one, origins)
        for node in one.nodes:
            if node in inner:
                _recomputed(one, node, inner, origins, stated)
        _updates(one)
    return phases


def _forward(one: ForwardPass, stated: Mapping[int, str]) -> set[str]:
    named = one.instances or one.forward
    layers = {stated.get(unit.event, "") for unit in named}
    if layers != {""} and (len(layers) > 1 or len(named) == 1):
        for unit in one.forward:
            unit.layer = stated.get(unit.event, "")
        return set()
    names = one.names.of(tuple(kind_of(unit.name) for unit in one.instances))
    name_of = dict(zip(one.instances, names, strict=True))
    layer = ""
    for unit in one.forward:
        layer = unit.layer = name_of.get(unit, layer)
    for unit in reversed(one.forward):
        if unit in name_of:
            layer = unit.layer
        elif unit.parameters and prepares(unit.name):
            unit.layer = layer
    return layers - {""}


def _backward(one: ForwardPass, origins: Mapping[Unit, Unit]) -> None:
    nodes = [unit for unit in one.nodes if unit.role is Role.NODE]
    for node in nodes:
        if node in origins:
            node.layer = origins[node].layer
    layer = ""
    for node in reversed(nodes):  # one of unknown origin belongs to the layer of the next one
        layer = node.layer = node.layer or layer
    _accumulate(one.nodes)


def _accumulate(nodes: Sequence[Unit]) -> None:
    layer = ""
    for unit in nodes:
        if unit.role is Role.ACCUMULATE:
            unit.layer = layer
        layer = unit.layer


def _recomputed(
    one: ForwardPass,
    node: Unit,
    inner: Mapping[Unit, Sequence[Unit]],
    origins: Mapping[Unit, Unit],
    stated: Mapping[int, str],
) -> None:
    """Set the layers of what `node` recomputes, and of the nodes that it contains."""
    forward = [unit for unit in inner[node] if unit.role is Role.FORWARD]
    layer_of, layer = _stretch(one, node, instances_of(forward), inner, origins), node.layer
    for unit in forward:
        layer = layer_of.get(unit, layer)
        unit.layer = stated.get(unit.event) or layer
    nodes = [unit for unit in inner[node] if unit.role is not Role.FORWARD]
    for unit in nodes:
        unit.layer = origins[unit].layer if unit in origins else node.layer
    _accumulate(nodes)


def _stretch(
    one: ForwardPass,
    node: Unit,
    again: Sequence[Unit],
    inner: Mapping[Unit, Sequence[Unit]],
    origins: Mapping[Unit, Unit],
) -> dict[Unit, str]:
    """Recomputed instance -> layer of the instance that it repeats; none if no stretch fits.

    Instances repeat those of equal kinds that end as near as possible to the node's own.
    """
    origin = origins.get(node)
    if not again or origin is None:
        return {}
    within = [unit.start_s for unit in inner.get(origin, ())]
    begun_s = [unit.start_s for unit in one.instances]
    own = bisect.bisect_right(begun_s, max(within, default=origin.start_s))
    kinds, wanted = [kind_of(u.name) for u in one.instances], [kind_of(u.name) for u in again]
    for end in sorted(range(len(again), len(kinds) + 1), key=lambda end: abs(end - own)):
        if kinds[end - len(again) : end] == wanted:
            repeated = one.instances[end - len(again) : end]
            return {unit: first.layer for unit, first in zip(again, repeated, strict=True)}
    return {}


def _updates(one: ForwardPass) -> None:
    """Layers of what is done once per parameter: copies out of buckets, and plain optimizers."""
    if len(one.copies) == len(one.gradients):
        for unit, gradient in zip(one.copies, one.gradients, strict=True):
            unit.layer = gradient.layer
    for gradient, unit in update_units(one):
        unit.layer = gradient.layer


def update_units(one: ForwardPass) -> list[tuple[Unit, Unit]]:
    """(accumulation, unit of the optimizer that handles its parameter), in order of time.

    Empty where the optimizer handles several parameters at once.
    """
    gradients = one.gradients[::-1]
    names, pairs = [unit.name for unit in one.after], []
    for begin, length in _repetitions(names, len(gradients)):
        for place, gradient in enumerate(gradients):
            own = one.after[begin + place * length : begin + (place + 1) * length]
            pairs += [(gradient, unit) for unit in own]
    return sorted(pairs, key=lambda pair: pair[1].start_s)


def _repetitions(names: Sequence[str], times: int) -> list[tuple[int, int]]:
    """(begin, length) of stretches of `names` that consist of a sequence `times` times."""
    if times < 2:
        return []
    stretches: list[tuple[int, int]] = []
    for length in range(1, MOST_UPDATES + 1):
        alike = 0
        for place in range(length, len(names) + 1):
            if place < len(names) and names[place] == names[place - length]:
                alike += 1
                continue
            if alike == length * (times - 1):
                begin = place - length * times
                if all(begin + length * times <= b or b + n * times <= begin for b, n in stretches):
                    stretches.append((begin, length))
            alike = 0
    return stretches
