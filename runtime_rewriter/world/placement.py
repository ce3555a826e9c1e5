"""Where the ranks of a world run, and how each is started; `ray_world` places them on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime_rewriter.world.command import ScriptCommand
from runtime_rewriter.world.worker import Worker


@dataclass(frozen=True)
class Launch:
    """How each rank is started: `environments[rank]` is added to the process's own; directory "" is the worker's own."""

    command: ScriptCommand
    environments: tuple[dict[str, str], ...]
    directory: str
    log_paths: tuple[str, ...]


class Placement(Protocol):
    """Workers on their machines, by rank, host by host. `poll` asks all at once; `release` gives the places back."""

    @property
    def workers(self) -> Sequence[Worker]: ...
    @property
    def hosts(self) -> tuple[tuple[str, int], ...]: ...
    def launch(self) -> Launch: ...
    def poll(self, timeout_s: float) -> list[list[dict[str, Any]]]: ...
    def release(self) -> None: ...
