"""The definition of a job's settings, from which options, the job file, checks and docs derive.

`JobSpec` attaches one `Setting` to each of its fields. `autotune.tuning.job.SETTINGS` lists them
with the settings that are read before a `JobSpec` can exist, such as the path of a cluster file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from autotune.errors import InvalidInput
from autotune.limits import MAX_COUNT, MAX_SECONDS
from autotune.units import parse_seconds

T = TypeVar("T")


class Kind(StrEnum):
    """The type of a setting's value, as users write it."""

    WHOLE = "whole number"
    NUMBER = "number"
    SWITCH = "true or false"
    TIME = "time"
    CHOICE = "choice"
    NAMES = "names"
    PATHS = "paths"
    PATH = "path"


_MOST: dict[Kind, dict[str, float]] = {
    Kind.WHOLE: {"at_most": MAX_COUNT},
    Kind.NUMBER: {"below": math.inf},
    Kind.TIME: {"at_most": MAX_SECONDS},
}
_KINDS: dict[Any, Kind] = {bool: Kind.SWITCH, int: Kind.WHOLE, float: Kind.NUMBER}


@dataclass(frozen=True)
class Setting:
    """One setting: option `--NAME` (with dashes) or `short_option`, key `NAME` in a job file.

    `field` is the `JobSpec` field, empty for a setting that is read before the spec. `default` is
    the text shown to users. `remark` explains a bound in its error message.
    """

    name: str
    group: str
    help: str
    default: str
    kind: Kind = Kind.PATH
    choices: type[StrEnum] | None = None
    metavar: str = ""
    field: str = ""
    short_option: str = ""
    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf
    below: float | None = None
    remark: str = ""

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def rule(self) -> str:
        """The bounds in words; empty if there are none."""
        rules = ["finite"] if self.below == math.inf else []
        if self.at_least > -math.inf:
            rules.append(f"at least {self.at_least:g}")
        if self.above > -math.inf:
            rules.append(f"above {self.above:g}")
        if self.at_most < math.inf:
            rules.append(f"at most {self.at_most:.12g}")
        if self.below is not None and self.below < math.inf:
            rules.append(f"below {self.below:g}")
        return " and ".join(rules)

    def check(self, value: Any) -> None:
        """Raise `InvalidInput` if a value of the `JobSpec` field is out of bounds."""
        if not self.rule:
            return
        inside = self.at_least <= value <= self.at_most
        inside = inside and (self.above == -math.inf or value > self.above)
        if not inside or not (self.below is None or value < self.below):
            remark = f" ({self.remark})" if self.remark else ""
            raise InvalidInput(f"{self.name} must be {self.rule}{remark}, but is {value}")

    def read(self, value: Any, where: str) -> Any:
        """Convert a value from the command line or a job file; `where` names it in errors."""
        if self.kind is Kind.TIME:
            return parse_seconds(value, where)
        if self.kind in (Kind.NAMES, Kind.PATHS) and isinstance(value, str):
            return tuple(name.strip() for name in value.split(","))
        return self.choices(value) if self.choices is not None else value

    @property
    def file_type(self) -> Any:
        """The type that a job file may hold for this key."""
        if self.choices is not None:
            return self.choices
        if self.kind in (Kind.NAMES, Kind.PATHS):
            return tuple[str, ...]
        types = {Kind.TIME: str | float, Kind.PATH: str}
        plain = {kind: python_type for python_type, kind in _KINDS.items()}
        return {**types, **plain}[self.kind]


def setting(
    default: T,
    group: str,
    help_text: str,
    *,
    name: str = "",
    shown: str = "",
    time: bool = False,
    paths: bool = False,
    **bounds: Any,
) -> T:
    """Define a `JobSpec` field that is a setting. `name` and `shown` default to the field's own."""
    kind = Kind.TIME if time else _KINDS.get(type(default), Kind.PATHS if paths else Kind.NAMES)
    bounds = {**_MOST.get(kind, {}), **bounds}
    choices = type(default) if isinstance(default, StrEnum) else None
    if choices is not None:
        kind = Kind.CHOICE
    text = ", ".join(default) if isinstance(default, tuple) else str(default).lower()
    definition = Setting(name, group, help_text, shown or text, kind, choices, **bounds)
    defined: T = field(default=default, metadata={"setting": definition})
    return defined


def settings_of(spec_type: Any) -> tuple[Setting, ...]:
    """The settings that the fields of a dataclass define, in order."""
    settings = []
    for item in spec_type.__dataclass_fields__.values():
        definition: Setting | None = item.metadata.get("setting")
        if definition is not None:
            name = definition.name or item.name
            settings.append(replace(definition, name=name, field=item.name))
    return tuple(settings)
