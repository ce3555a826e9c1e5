"""What-ifs by name. Users register their own with the same decorator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from autotune.errors import InvalidInput
from autotune.plugins import Registry
from autotune.whatif.base import Base
from autotune.whatif.memory import ReplicaMemory
from autotune.whatif.question import Question

Change = Callable[[Base, Question], Base]
C = TypeVar("C", bound=Change)
SamplesChange = Callable[[Question], float]
MemoryChange = Callable[[ReplicaMemory, Base, Question], ReplicaMemory]


@dataclass(frozen=True)
class WhatIf:
    """A change of the training, as a transformation of its base.

    - `title`: one line for tables. `enact`: the line of code that makes the change in a script.
    - `source`: where the method is from. `assumptions`: what the prediction takes for granted; the
      docstring of `change`.
    - `change`: returns the changed base. It raises `InvalidInput` with the reason where the change
      does not apply to this training, or where something is unknown.
    - `memory`: returns the changed memory of a replica, given the base before the change; None if
      memory stays as it is. `memory_unknown`: why the changed memory is unknown; "" if it is not.
    - `samples`: returns the samples of a changed step over those of the recorded one; None if a
      step of one worker has as many as before.
    """

    name: str
    title: str
    source: str
    enact: str
    change: Change
    memory: MemoryChange | None = None
    samples: SamplesChange | None = None
    memory_unknown: str = ""

    @property
    def assumptions(self) -> str:
        return inspect.getdoc(self.change) or ""


WHAT_IFS: Registry[WhatIf] = Registry("autotune.what_ifs", "what-if")


def what_if(
    name: str,
    *,
    title: str,
    source: str,
    enact: str,
    memory: MemoryChange | None = None,
    samples: SamplesChange | None = None,
    memory_unknown: str = "",
) -> Callable[[C], C]:
    """Register a function as the what-if of this name.

        @what_if("no_copies", title="no copies to the device", source="ours", enact="...")
        def no_copies(base: Base, question: Question) -> Base:
            \"\"\"Every copy between host and device takes no time.\"\"\"
            return scale(base, select(base, kinds=[Kind.COPY]), 0.0)

    Raises `InvalidInput` for a taken name, one with `+`, and a function without a docstring.
    """

    def register(change: C) -> C:
        if "+" in name or not name:
            raise InvalidInput(f"a what-if needs a name without '+', but it is {name!r}")
        if not inspect.getdoc(change):
            raise InvalidInput(f"what-if {name!r} needs a docstring that states its assumptions")
        one = WhatIf(name, title, source, enact, change, memory, samples, memory_unknown)
        WHAT_IFS.register(name, one)
        return change

    return register


def combined(names: str, what_ifs: Mapping[str, WhatIf] = WHAT_IFS) -> tuple[WhatIf, ...]:
    """The what-ifs of "amp+fused_adam", in this order. Raises `UnknownName`."""
    return tuple(what_ifs[name] for name in names.split("+"))
