"""What if layers were substituted by others, as a policy file states?"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from autotune.arrays import BoolArray
from autotune.dfg.graph import NONE
from autotune.errors import InvalidInput
from autotune.parsing import parse, read_yaml
from autotune.whatif.base import Base
from autotune.whatif.primitives import remove, scale
from autotune.whatif.question import Question
from autotune.whatif.registry import what_if


@dataclass(frozen=True)
class Substitution:
    """Layers that go, and factors on the times of layers whose dimensions change.

    Layers are named as in the trace; `*` stands for any text.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str = ""
    remove: tuple[str, ...] = ()
    scale: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.remove and not self.scale:
            raise InvalidInput(
                f"a substitution must remove or scale a layer, but {self.name!r} does neither"
            )
        for layer, factor in self.scale.items():
            if not 0 < factor < np.inf:
                raise InvalidInput(
                    f"a layer's factor must be above 0, but that of {layer!r} is {factor}; "
                    "list the layer under remove"
                )


@dataclass(frozen=True)
class Policy:
    """The substitutions that a search such as MetaFlow's found."""

    __pydantic_config__ = {"extra": "forbid"}

    substitutions: tuple[Substitution, ...]


@what_if(
    "metaflow",
    title="substituted layers (metaflow=POLICY.yaml)",
    source="Jia et al. (MLSys 2019); Daydream (USENIX ATC 2020), Alg. 9",
    enact="change the layers in the model's definition, as the policy states",
)
def metaflow(base: Base, question: Question) -> Base:
    """Layers of a policy file go, with their launches, or change their times by a factor.

    A policy is the result of a search for equivalent graphs; it is not searched here. Assumes that
    the stated factors hold for all kernels of a layer in both passes, and that what remains keeps
    its order.
    """
    path = question.files.get("metaflow")
    if path is None:
        raise InvalidInput("what-if 'metaflow' needs a policy; name its file: metaflow=POLICY.yaml")
    policy = parse(Policy, read_yaml(Path(path)), path)
    gone, factor = np.zeros(base.ops, dtype=np.bool_), np.ones(base.ops)
    substituted: set[str] = set()
    for one in policy.substitutions:
        for pattern in one.remove:
            gone |= _ops_of(base, pattern, path, substituted)
        for pattern, times in one.scale.items():
            factor[_ops_of(base, pattern, path, substituted)] = times
    for times in np.unique(factor):
        base = scale(base, factor == times, float(times))
    return remove(base, gone)


def _ops_of(base: Base, pattern: str, path: str, substituted: set[str]) -> BoolArray:
    """(N,) device ops of the layers that a pattern names, each of which is named once."""
    known = base.names.layers
    layers = [layer for layer in known if fnmatchcase(layer, pattern)]
    if not layers:
        raise InvalidInput(f"{path}: the trace has no layer {pattern!r}{_hint(known, pattern)}")
    if twice := sorted(substituted.intersection(layers)):
        raise InvalidInput(
            f"{path} must name a layer once, but {twice[0]!r} is named again by {pattern!r}"
        )
    substituted.update(layers)
    numbers = [number for number, layer in enumerate(known) if layer in layers]
    ops: BoolArray = base.on_device & np.isin(base.layer, numbers) & (base.queue != NONE)
    if not ops.any():
        raise InvalidInput(f"{path}: layer {pattern!r} has no work on a device")
    return ops


def _hint(known: Sequence[str], pattern: str) -> str:
    if not known:
        return "; it states no layers at all"
    near = difflib.get_close_matches(pattern, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known[:8])}"
