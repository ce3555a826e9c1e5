"""The settings of a script that takes turns with another one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from autotune.canonical import to_data
from autotune.errors import InvalidInput
from autotune.parsing import parse, read_json

ENACTABLE = (
    "amp",
    "amp_cpu",
    "channels_last",
    "fused_adam",
    "fused_adam_cpu",
    "foreach_optimizer",
    "for_each_optimizer",
    "bucket_size",
    "fp16_gradients",
)
"""What-ifs that can be enacted from outside (`enact.py`)."""


@dataclass(frozen=True)
class CheckSettings:
    """`changes`: names of `ENACTABLE` to enact, () for the baseline; `amounts`: for those with one.

    `address`: the Unix socket of the process that hands out turns. Raises `InvalidInput` for a
    change that cannot be enacted from outside.
    """

    __pydantic_config__ = {"extra": "forbid"}

    address: str
    changes: tuple[str, ...] = ()
    amounts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.changes:
            if name not in ENACTABLE:
                raise InvalidInput(
                    f"a script is changed from outside by one of {', '.join(ENACTABLE)}, but "
                    f"{name!r} needs a change of the script itself"
                )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(to_data(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> CheckSettings:
        return parse(CheckSettings, read_json(path), str(path))
