"""Groups the host events of a thread into units: operators as the script or autograd calls them.

A unit is an operator with everything that it calls, a node of the backward pass, or the
accumulation of a gradient. An operator that is no `aten::` one, such as a custom autograd function,
only contains units. So does a node that recomputes a part of the forward pass: operators that
autograd numbers there, or that always have parameters, are forward work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from autotune.profiling.formats.rank_trace import MISSING, Category, RankTrace
from autotune.profiling.graph.operators import always_has_parameters

ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The operator that accumulates the gradient of one parameter."""
EVALUATE = "autograd::engine::evaluate_function: "
TICK_S = 0.5e-9
"""Below the resolution of profilers: an event that begins where another one ends is not in it."""
_NODE = re.compile(r"\w+Backward\d*")


class Role(Enum):
    """What a unit does."""

    FORWARD = "forward"
    NODE = "node"
    ACCUMULATE = "accumulate"


@dataclass(eq=False, slots=True)
class Unit:
    """Some events of one thread, the first one around all others.

    - `name`: its operator, or the class of its node.
    - `inside`: the unit around it, None for one that the script calls itself.
    - `sequences`: autograd's numbers of its events, in order of time; only of forward units.
    - `sequence`: autograd's number of a node, MISSING without one.
    - `operators`: the operators that it calls; only of forward units.
    - `layer`: the module instance that it belongs to, "" if that is unknown.
    - `parameters`: how many gradients are accumulated right after the node that it leads to.
    - `inputs`: the number of the inputs of an accumulation, which are the gradient.
    """

    event: int
    lane: int
    role: Role
    name: str
    start_s: float
    inside: Unit | None = None
    sequence: int = MISSING
    sequences: list[tuple[int, int]] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    layer: str = ""
    parameters: int = 0
    inputs: int = MISSING


@dataclass(eq=False)
class HostUnits:
    """`units` in order of time; `of_event`: event -> its innermost unit."""

    units: list[Unit] = field(default_factory=list)
    of_event: dict[int, Unit] = field(default_factory=dict)


def host_units(trace: RankTrace, events: Iterable[int]) -> HostUnits:
    """The units of the given host events (ascending numbers), which may be of several threads."""
    work = (Category.HOST_OP, Category.RUNTIME)
    open_of: dict[int, list[tuple[float, Unit]]] = {}
    plain: dict[int, tuple[str, Role | None]] = {}
    units = HostUnits()
    for event in events:
        if trace.category[event] not in work:
            continue
        lane, name = int(trace.lane[event]), int(trace.name[event])
        if name not in plain:
            plain[name] = _role(trace.names[name])
        start_s = float(trace.start_s[event])
        stack = open_of.setdefault(lane, [])
        while stack and stack[-1][0] <= start_s + TICK_S:
            stack.pop()
        unit = stack[-1][1] if stack else None
        sequence = int(trace.sequence[event])
        own, role = plain[name]
        is_op = bool(trace.category[event] == Category.HOST_OP)
        if unit is None or (is_op and _begins(unit, own, role, sequence)):
            unit = Unit(event, lane, role or Role.FORWARD, own, start_s, unit)
            units.units.append(unit)
        if unit.role is Role.FORWARD:
            if sequence >= 0:
                unit.sequences.append((sequence, event))
            if is_op:
                unit.operators.append(own)
        elif unit.sequence == MISSING:
            unit.sequence = sequence
        if unit.role is Role.ACCUMULATE and unit.inputs == MISSING:
            unit.inputs = int(trace.inputs[event])
        units.of_event[event] = unit
        stack.append((start_s + float(trace.duration_s[event]), unit))
    units.units.sort(key=lambda one: (one.start_s, one.event))
    return units


def _role(name: str) -> tuple[str, Role | None]:
    """The name of a unit that begins with an event of this name, and its role if that shows it."""
    plain = name.removeprefix(EVALUATE)
    if plain == ACCUMULATE:
        return plain, Role.ACCUMULATE
    if name.startswith(EVALUATE) or _NODE.fullmatch(name):
        return plain, Role.NODE
    return name, None


def _begins(unit: Unit, name: str, role: Role | None, sequence: int) -> bool:
    """Whether an operator within `unit` begins a unit of its own."""
    if role is not None:
        return unit.name != name  # a node contains an event of its own name
    if unit.role is Role.FORWARD:
        return not unit.name.startswith("aten::") and name.startswith("aten::")
    return name.startswith("aten::") and (sequence >= 0 or always_has_parameters(name))
