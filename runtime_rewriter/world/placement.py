"""Interface to the places of a world's ranks; `ray_world` implements it on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime_rewriter.world.script_command import ScriptCommand
from runtime_rewriter.world.worker import Polled, Worker


@dataclass(frozen=True)
class Launch:
    """How each rank is started.

    `environments[rank]` is added to the worker's own environment; directory "" is the worker's own.
    """

    command: ScriptCommand
    environments: tuple[dict[str, str], ...]
    directory: str
    log_paths: tuple[str, ...]


class Placement(Protocol):
    """Workers in rank order, host by host; `hosts`: name and number of ranks of each host, and
    `addresses`: of each host, empty if all are on this machine.
    """

    @property
    def workers(self) -> Sequence[Worker]: ...
    @property
    def hosts(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def addresses(self) -> tuple[str, ...]: ...
    def launch(self) -> Launch: ...
    def poll(self, timeout_s: float) -> list[Polled]:
        """Poll all workers at once."""

    def release(self) -> None:
        """Give the places back."""
