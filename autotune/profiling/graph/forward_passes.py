"""Finds forward passes, the nodes that differentiate them, and the instances in them.

An instance is a forward operator that has parameters: autograd accumulates gradients right after
its node, or operators of its kind always have some.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from autotune.profiling.formats.rank_trace import MISSING, TracedStep
from autotune.profiling.graph.host_units import Role, Unit
from autotune.profiling.graph.operators import (
    adds_bias,
    always_has_parameters,
    kind_of,
    operator_class,
    prepares,
)

_BUCKET_COPY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


@dataclass(eq=False)
class InstanceNames:
    """Names of a step's instances; a pass that repeats another one has the same instances."""

    of_kinds: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def of(self, kinds: tuple[str, ...]) -> list[str]:
        if kinds not in self.of_kinds:
            names = []
            for kind in kinds:
                names.append(f"{kind}_{self.counts[kind]}")
                self.counts[kind] += 1
            self.of_kinds[kinds] = names
        return self.of_kinds[kinds]


@dataclass(eq=False)
class ForwardPass:
    """A forward pass and everything until the next one, each in order of time.

    - `forward`: units from the first one with parameters or a stated layer. `instances`: those with
      parameters.
    - `nodes`: nodes, and accumulations of gradients. `gradients`: all accumulations, also those of
      nodes within nodes. `copies`: gradients copied out of buckets.
    - `after`: what the thread of the forward pass does behind it, such as the optimizer.
    """

    names: InstanceNames
    forward: list[Unit] = field(default_factory=list)
    instances: list[Unit] = field(default_factory=list)
    nodes: list[Unit] = field(default_factory=list)
    gradients: list[Unit] = field(default_factory=list)
    copies: list[Unit] = field(default_factory=list)
    after: list[Unit] = field(default_factory=list)


def find_origins(units: Sequence[Unit]) -> dict[Unit, Unit]:
    """Node -> the forward unit that it differentiates; counts the gradients that follow it.

    An accumulation has the one of the node before it.

    Nodes within a node belong to the operators that it recomputes.
    """
    before: dict[tuple[int, Unit | None], Unit] = {}
    node_of: dict[Unit, Unit] = {}
    recomputed: dict[Unit, list[Unit]] = {}
    for unit in units:
        place = unit.lane, unit.inside
        if unit.role is Role.NODE:
            before[place] = unit
        elif unit.role is Role.ACCUMULATE and place in before:
            before[place].parameters += 1
            node_of[unit] = before[place]
        elif unit.inside is not None and recomputes(unit):
            recomputed.setdefault(unit.inside, []).append(unit)
    numbers: dict[Unit | None, dict[int, Unit]] = {
        owner: _numbered(inner) for owner, inner in recomputed.items()
    }
    numbers[None] = _numbered(_forward_units(units))
    origins: dict[Unit, Unit] = {}
    for unit in units:
        origin = numbers.get(unit.inside, {}).get(unit.sequence)
        if unit.role is Role.NODE and origin is not None:
            origins[unit] = origin
            origin.parameters += unit.parameters
    for unit, node in node_of.items():
        if node in origins:
            origins[unit] = origins[node]
    return origins


def recomputes(unit: Unit) -> bool:
    """Whether a forward unit is within a node."""
    if unit.role is not Role.FORWARD or unit.inside is None:
        return False
    return unit.inside.role is not Role.FORWARD or recomputes(unit.inside)


def _numbered(forward: Iterable[Unit]) -> dict[int, Unit]:
    """Sequence number -> the unit that it is of.

    An operator without a node leaves its number to the next one, so the last one has it.
    """
    last: dict[int, tuple[int, Unit]] = {}
    for unit in forward:
        for sequence, event in unit.sequences:
            if sequence not in last or event > last[sequence][0]:
                last[sequence] = event, unit
    return {sequence: unit for sequence, (_, unit) in last.items()}


def _forward_units(units: Iterable[Unit]) -> list[Unit]:
    """Forward units of the thread with most numbered operators: each thread counts from 0.

    Without numbers it is the one with most operators that have parameters.
    """
    forward = [unit for unit in units if unit.role is Role.FORWARD and not recomputes(unit)]
    counts = Counter(unit.lane for unit in forward for _ in unit.sequences)
    counts = counts or Counter(unit.lane for unit in forward if _has_parameters(unit))
    lane = counts.most_common(1)[0][0] if counts else MISSING
    return [unit for unit in forward if unit.lane == lane]


def find_passes(
    units: Sequence[Unit],
    steps: Sequence[TracedStep],
    origins: dict[Unit, Unit],
    stated: Container[int],
    updates: set[int],
) -> list[ForwardPass]:
    """The forward passes in order of time. What comes before the first one is of none.

    `stated`: events that begin a unit of a stated layer; `updates`: one of the optimizer. Adds the
    origins of nodes without sequence numbers to `origins`.
    """
    nodes_s = [
        unit.start_s for unit in units if unit.role is not Role.FORWARD and unit.inside is None
    ]
    steps_s = [step.start_s for step in steps]
    names: dict[int, InstanceNames] = {}
    passes: list[ForwardPass] = []
    key: tuple[int, int] | None = None
    for unit in _forward_units(units):
        if unit.name == _BUCKET_COPY:
            continue
        step = bisect.bisect_right(steps_s, unit.start_s) - 1
        here = step, bisect.bisect_left(nodes_s, unit.start_s)
        begins = _has_parameters(unit) or bool(unit.sequences and unit.event in stated)
        if here != key and unit.event not in updates and begins:
            key = here
            passes.append(ForwardPass(names.setdefault(step, InstanceNames())))
        if here == key and unit.event not in updates:
            passes[-1].forward.append(unit)
        elif passes:
            passes[-1].after.append(unit)
    _add_backward(passes, units)
    for one in passes:
        if not any(node in origins for node in one.nodes):
            _count_back(one, origins)
        one.instances = instances_of(one.forward)
    return passes


def _add_backward(passes: Sequence[ForwardPass], units: Iterable[Unit]) -> None:
    begun_s = [one.forward[0].start_s for one in passes]
    for unit in units:
        place = bisect.bisect_right(begun_s, unit.start_s) - 1
        if place < 0:
            continue
        if unit.name == _BUCKET_COPY:
            passes[place].copies.append(unit)
        elif unit.role is not Role.FORWARD and unit.inside is None:
            passes[place].nodes.append(unit)
        if unit.role is Role.ACCUMULATE:
            passes[place].gradients.append(unit)


def _count_back(one: ForwardPass, origins: dict[Unit, Unit]) -> None:
    """Add the origins of nodes without numbers: the units of their class, from the last one on.

    Only classes that occur equally often on both sides.
    """
    nodes = [unit for unit in one.nodes if unit.role is Role.NODE]
    operators, classes = _by_class(one.forward), _by_class(nodes)
    for name, alike in classes.items():
        if len(operators.get(name, ())) == len(alike):
            for unit, node in zip(reversed(operators[name]), alike, strict=True):
                origins[node] = unit
                unit.parameters += node.parameters
    origin: Unit | None = None
    for unit in one.nodes:
        if unit.role is Role.NODE:
            origin = origins.get(unit)
        elif origin is not None:
            origins[unit] = origin


def _by_class(units: Iterable[Unit]) -> dict[str, list[Unit]]:
    classes: dict[str, list[Unit]] = {}
    for unit in units:
        for name in {operator_class(name) for name in (unit.name, *unit.operators)}:
            classes.setdefault(name, []).append(unit)
    return classes


def instances_of(forward: Sequence[Unit]) -> list[Unit]:
    """Operators with parameters, without those that only prepare or finish for another one."""
    instances: list[Unit] = []
    prepared = False
    for unit in forward:
        if prepares(unit.name):
            prepared = prepared or unit.parameters > 0
        elif _has_parameters(unit) or (prepared and kind_of(unit.name) == "linear"):
            is_bias = adds_bias(unit.name) and instances and kind_of(instances[-1].name) == "linear"
            if not is_bias:
                instances.append(unit)
            prepared = False
    return instances


def _has_parameters(unit: Unit) -> bool:
    return unit.parameters > 0 or always_has_parameters(unit.name)
