"""One replica's workload: its gradient variables in the order in which they become ready.

| symbol | meaning | unit |
|---|---|---|
| V | number of gradient variables | - |
| ready_s | time from the start of the backward pass until the gradient is final | s |
| needed_s | time from the start of the forward pass until the variable is first read | s |
| script_read_s | time from the end of the backward pass until the script itself reads it | s |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from autotune.canonical import LATER, content_id, to_data
from autotune.errors import InvalidInput
from autotune.limits import (
    MAX_BYTES,
    MAX_COUNT,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    MAX_VARIABLES,
    check_range,
    check_seconds,
)
from autotune.parsing import parse, refuse_newer

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
}


class Library(StrEnum):
    """The library by which the script itself synchronizes its gradients."""

    DDP = "ddp"  # torch's, which `autotune.apply` replaces on a bare module
    HOROVOD = "horovod"


@dataclass(frozen=True)
class Variable:
    """One trainable tensor. `ready_s` and `needed_s` are None if unmeasured.

    `touched_rows`: distinct rows in the gradient of one rank's step, for sparse variables. None:
    not counted, and then all rows count as touched. `script_read_s`: when the script first reads
    the variable, its gradient or its optimizer's state outside the forward pass, the backward pass
    and `step()`, before the next forward pass. None: in most steps it reads none of them.
    `rows_only`: the script must get the rows of the gradient as rows, so no plan may send it dense.
    """

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    sparse: bool = False
    ready_s: float | None = None
    needed_s: float | None = None
    touched_rows: float | None = None
    script_read_s: float | None = field(default=None, metadata=LATER)
    rows_only: bool = field(default=False, metadata=LATER)

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_DIMENSIONS:
            raise InvalidInput(
                f"shape of {self.name!r} may have at most {MAX_DIMENSIONS} dimensions, "
                f"but has {len(self.shape)}"
            )
        if min(self.shape, default=0) < 0 or max(self.shape, default=0) > MAX_ELEMENTS:
            raise InvalidInput(
                f"shape of {self.name!r} must have extents from 0 to {MAX_ELEMENTS}, "
                f"but is {self.shape}"
            )
        check_range(self.elements, 0, MAX_ELEMENTS, f"elements of {self.name!r}")
        check_seconds(self.ready_s, f"ready_s of {self.name!r}")
        check_seconds(self.needed_s, f"needed_s of {self.name!r}")
        touched = self.touched_rows
        if touched is not None and not (self.sparse and 0 <= touched <= self.rows):
            raise InvalidInput(
                f"touched_rows of {self.name!r} must lie between 0 and the rows of a sparse "
                f"variable, but is {touched} of shape {self.shape}, sparse: {self.sparse}"
            )
        if self.script_read_s is not None and not 0 <= self.script_read_s < math.inf:
            raise InvalidInput(
                f"script_read_s of {self.name!r} must be finite and at least 0, "
                f"but is {self.script_read_s}"
            )
        if self.rows_only and not self.sparse:
            raise InvalidInput(
                f"rows_only of {self.name!r} needs a sparse variable, but its gradient is dense"
            )
        if self.dtype not in DTYPE_BYTES:
            raise InvalidInput(
                f"dtype of {self.name!r} must be one of {', '.join(DTYPE_BYTES)}, "
                f"but is {self.dtype!r}"
            )

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def grad_bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        """Extent of the first axis."""
        return self.shape[0] if self.shape else 1

    @property
    def touched_share(self) -> float:
        """Share of the rows that one rank's step touches."""
        return 1.0 if self.touched_rows is None else self.touched_rows / max(self.rows, 1)


def model_id(variables: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """Identity of a model from (name, shape, dtype) of its variables, in any order."""
    return content_id(
        "model", sorted([name, list(shape), dtype] for name, shape, dtype in variables)
    )


@dataclass(frozen=True)
class Workload:
    """One replica's training step.

    `variables` are in backward (gradient-ready) order: index 0 is ready first. `edges`: pairs (i,
    j), i < j, of variables whose operations are neighbours in the data-flow graph. `update_s`:
    everything between the end of the backward pass and the next forward pass. `threads`: CPU
    threads that compute; 0 on an accelerator, or if unknown. `buffer_bytes`: size of each broadcast
    of the module's buffers before a forward pass; `buffers`: number of these tensors. Both are
    empty if `forward_s` includes the broadcasts. `source`: "measured" or "assumed", which the
    report repeats. `library`: the script's own, which enacts the plans that it can express.
    `device_name`: the accelerator's, "" if unknown. `reads_norms`: between the backward pass and
    `step()`, the script reads the norms of gradients and scales them, as clipping by the global
    norm does.
    """

    __pydantic_config__ = {"extra": "forbid"}

    model: str
    variables: tuple[Variable, ...]
    edges: tuple[tuple[int, int], ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    device: str = "cpu"
    threads: int = 0
    source: str = "assumed"
    buffer_bytes: tuple[int, ...] = ()
    buffers: int = 0
    schema: int = field(default=1)
    library: Library = field(default=Library.DDP, metadata=LATER)
    device_name: str = field(default="", metadata=LATER)
    reads_norms: bool = field(default=False, metadata=LATER)

    def __post_init__(self) -> None:
        if not self.variables:
            raise InvalidInput(
                "a workload needs at least one variable; "
                "does the model have parameters that require a gradient?"
            )
        names = [variable.name for variable in self.variables]
        check_range(len(names), 1, MAX_VARIABLES, f"variables of {self.model!r}")
        if len(set(names)) != len(names):
            twice = sorted(name for name, times in Counter(names).items() if times > 1)
            raise InvalidInput(
                f"variable names must be unique, but {', '.join(twice[:3])} occur more than once"
            )
        if self.source not in ("measured", "assumed"):
            raise InvalidInput(
                f"workload source must be 'measured' or 'assumed', but is {self.source!r}"
            )
        elements = sum(variable.elements for variable in self.variables)
        check_range(elements, 0, MAX_ELEMENTS, f"elements of {self.model!r}")
        for what in ("forward_s", "backward_s", "update_s"):
            check_seconds(getattr(self, what), f"{what} of {self.model!r}")
        check_range(self.threads, 0, MAX_COUNT, f"threads of {self.model!r}")
        check_range(self.buffers, 0, MAX_COUNT, f"buffers of {self.model!r}")
        for size in (min(self.buffer_bytes, default=0), sum(self.buffer_bytes)):
            check_range(size, 0, MAX_BYTES, f"buffer_bytes of {self.model!r}")
        count = len(self.variables)
        for edge in self.edges:
            if not 0 <= edge[0] < edge[1] < count:
                raise InvalidInput(
                    f"workload edges must be pairs i < j < {count}, but one is {edge}"
                )

    @cached_property
    def id(self) -> str:
        """Identity of the model: names, shapes and dtypes, without timings and order."""
        return model_id((v.name, v.shape, v.dtype) for v in self.variables)

    @cached_property
    def index(self) -> dict[str, int]:
        """Variable name -> backward position."""
        return {variable.name: position for position, variable in enumerate(self.variables)}

    @cached_property
    def grad_bytes(self) -> int:
        return sum(variable.grad_bytes for variable in self.variables)

    @property
    def script_reads(self) -> int:
        """The number of variables that the script itself reads between steps."""
        return sum(variable.script_read_s is not None for variable in self.variables)

    @property
    def compute_s(self) -> float:
        """T_comp: one step of one replica without any synchronization."""
        return self.forward_s + self.backward_s + self.update_s

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = to_data(self)
        return data

    @staticmethod
    def from_data(data: Any, where: str = "workload") -> Workload:
        refuse_newer(data, 1, "workload", where)
        return parse(Workload, data, where)
