"""The interface through which a session tunes a model of any framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from runtime_rewriter.protocol import ProbeAnswer, RankEvent, RankInstruction, StartProbe


class Activity(Protocol):
    """A fixed number of steps, and an answer at the end."""

    def step_finished(self, step_s: float, clean: bool) -> bool:
        """Take one step; True once it was the last."""

    def answer(self) -> RankEvent: ...


class TunedModel(Protocol):
    """A model whose steps enact plans. `id`: see `autotune.workload.model_id`."""

    @property
    def id(self) -> str: ...

    def scale_bytes(self, byte_scale: float) -> None:
        """Send 1/`byte_scale` of every message from now on; before the first instruction."""

    def start(self, instruction: RankInstruction) -> Activity:
        """Begin what `instruction` asks for, at a step boundary.

        Raises `InvalidInput` if the model cannot be emulated, and `InvalidStrategy` if the plan
        cannot be enacted; the earlier plan then stays loaded.
        """

    def probe(self, request: StartProbe, report: Callable[[str], None]) -> ProbeAnswer:
        """Probe the links between the ranks; `report` gets a description of each measurement."""
