"""`best.json`: the decision of a job as one file that a training script loads.

It holds the strategy and the variables in backward order. `plan()` rebuilds from them the plan that
was measured, and the plan's hash proves it. The plan itself is not stored, so a file cannot
contradict itself. A content hash reveals edits. An edited file is refused, because its times would
no longer be those of its strategy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.canonical import LATER, canonical_json, to_data
from autotune.cluster import Cluster
from autotune.errors import InvalidInput, ModelMismatch
from autotune.files import write_whole
from autotune.limits import MAX_COUNT, MAX_RANKS, check_range, check_seconds
from autotune.parsing import parse, read_json, refuse_newer
from autotune.records import REAL_CONDITIONS, Comparison, Conditions
from autotune.strategy_space import plan as planning
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Library, Variable, Workload

SCHEMA = 1

Identity = Mapping[str, tuple[Sequence[int], str]]
"""Variable name -> (shape, dtype), of the model that an export is applied to."""


@dataclass(frozen=True)
class Timing:
    """Step time of one side of the closing comparison: median and quartiles over its blocks."""

    __pydantic_config__ = {"extra": "forbid"}

    median_s: float
    low_s: float
    high_s: float
    blocks: int

    def __post_init__(self) -> None:
        for what in ("median_s", "low_s", "high_s"):
            check_seconds(getattr(self, what), f"{what} of the closing comparison")
        check_range(self.blocks, 0, MAX_COUNT, "blocks of the closing comparison")


@dataclass(frozen=True)
class Export:
    """The chosen strategy and why. `strategy` and `plan_id` are None if the current setup stays.

    `variables` are in backward order. `tuned` and `current` are the sides of the closing
    comparison, or None. `predicted_s`: the tuned strategy's predicted step time at its proposal.
    `conditions`: what was emulated when these times were measured. `library`, `reads_norms`: see
    `Workload`.
    """

    __pydantic_config__ = {"extra": "forbid"}

    job_id: str
    created_at: str
    model: str
    variables: tuple[Variable, ...]
    world_size: int
    strategy: Strategy | None
    plan_id: str | None
    lossy: bool
    reason: str
    comparison: Comparison | None
    tuned: Timing | None
    current: Timing | None
    predicted_s: float | None
    cluster: Cluster
    software: dict[str, str]
    conditions: Conditions = REAL_CONDITIONS
    schema: int = SCHEMA
    library: Library = field(default=Library.DDP, metadata=LATER)
    reads_norms: bool = field(default=False, metadata=LATER)

    def __post_init__(self) -> None:
        check_range(self.world_size, 1, MAX_RANKS, f"world_size of job {self.job_id!r}")
        check_seconds(self.predicted_s, f"predicted_s of job {self.job_id!r}")

    def plan(self) -> Plan | None:
        """Rebuild the plan that was measured; None for the current setup.

        Raises `InvalidInput` if this version plans the strategy differently.
        """
        if self.strategy is None:
            return None
        workload = Workload(self.model, self.variables, reads_norms=self.reads_norms)
        rebuilt = planning.plan(self.strategy, workload, self.world_size)
        if self.plan_id is not None and rebuilt.id != self.plan_id:
            raise InvalidInput(
                f"the export of job {self.job_id} must give plan {self.plan_id}, but this version "
                f"of autotune plans {rebuilt.id} for its strategy; tune again with this version, "
                "or use the version that wrote it"
            )
        return rebuilt

    def write(self, path: Path) -> None:
        """Write the whole file or nothing, durably; an older file at `path` is replaced."""
        data = to_data(self)
        text = json.dumps(
            {**data, "content": _content_hash(data)}, indent=1, allow_nan=False, ensure_ascii=False
        )
        write_whole(path, text + "\n", "the export")


def read_export(path: Path, allow_edited: bool = False) -> Export:
    """Read an export; its plan is rebuilt once, so an unusable file is refused here.

    An edited file raises `InvalidInput` unless `allow_edited`; then its strategy is planned anew.
    """
    data = read_json(path)
    if not isinstance(data, dict):
        raise InvalidInput(
            f"{path} must be an export of autotune (a JSON object), but is a {type(data).__name__}"
        )
    if _is_strategy(data):
        raise InvalidInput(
            f"{path} must be an export, which a job has measured, but is a strategy alone; search "
            "and measure with `autotune tune`, which writes best.json"
        )
    refuse_newer(data, SCHEMA, "export", str(path))
    claimed = data.pop("content", None)
    export = parse(Export, data, str(path))
    actual = _content_hash(data)
    if claimed != actual:
        if not allow_edited:
            raise InvalidInput(
                f"{path} was changed after autotune wrote it (its content hash is {actual[:12]}, "
                f"but it says {str(claimed)[:12]}), so its measured times may not be those of its "
                "strategy; export it again from its job"
            )
        export = replace(export, plan_id=None)
    export.plan()
    return export


def _is_strategy(data: dict[str, Any]) -> bool:
    """Whether this is what `autotune optimize -o` writes: choices of variables, and no job."""
    choices = data.get("variables")
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and "shards" in first and "job_id" not in data


def check_model(export: Export, variables: Identity, world_size: int) -> None:
    """Raise `ModelMismatch` unless the export is for this model and world size.

    The message names every kind of difference.
    """
    expected = {
        variable.name: (tuple(variable.shape), variable.dtype) for variable in export.variables
    }
    actual = {name: (tuple(shape), dtype) for name, (shape, dtype) in variables.items()}
    problems = [
        _listed("lacks", [name for name in expected if name not in actual]),
        _listed("has the unexpected", [name for name in actual if name not in expected]),
        _listed(
            "has other shapes or types:",
            [
                f"{name} is {_described(actual[name])} instead of {_described(expected[name])}"
                for name in expected
                if name in actual and actual[name] != expected[name]
            ],
        ),
    ]
    differences = [problem for problem in problems if problem]
    if differences:
        raise ModelMismatch(
            f"the export of job {export.job_id} needs model {export.model!r} "
            f"with its {len(expected)} variables, but this model "
            + "; it ".join(differences)
            + ". Tune this model, or take the export that was made for it"
        )
    if world_size != export.world_size:
        raise ModelMismatch(
            f"the export of job {export.job_id} needs a world size of {export.world_size}, "
            f"but this run has {world_size}; "
            f"start {export.world_size} workers, or tune again with {world_size}",
            anchor="wrong-world-size",
        )


def _listed(verb: str, items: list[str]) -> str:
    shown = ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
    return f"{verb} {shown}" if items else ""


def _described(identity: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = identity
    return f"{dtype}[{', '.join(str(extent) for extent in shape)}]"


def _content_hash(data: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()
