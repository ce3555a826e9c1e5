"""Typed messages between the driver and the ranks: one JSON object per line.

The driver sends the same `RankInstruction` to every rank. Each rank answers with `RankEvent`s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

from autotune.canonical import to_data
from autotune.errors import InvalidInput
from autotune.parsing import parse, parse_json
from autotune.recordings.probe import ProbedLinks, ProbeSeries
from autotune.records import FailureKind
from autotune.strategy_space.op_fusion import OpFusionChoice
from autotune.strategy_space.plan import Plan
from autotune.workload import Workload

HEARTBEAT_S = 1.0
"""A training process reports its progress at most this often."""
KEEPS_TRAINING = "AUTOTUNE_KEEPS_TRAINING"
"""Environment variable of ranks whose training goes on after the trials: "1"."""
STEP_TIMEOUT = "AUTOTUNE_STEP_TIMEOUT"
"""Environment variable of tuned ranks: the seconds of silence after which the driver gives up."""
PROFILE_WARMUP_STEPS = 1
"""Steps before those that are profiled: the first one is traced, or touches new buffers."""
EMULATION_STEPS = 2
"""Steps of `StartEmulation`: a real one, which is recorded, and one that is emulated. Batches of
other shapes are recorded when they come."""


class _Message:
    """Unknown fields of a message are refused."""

    __pydantic_config__ = {"extra": "forbid"}


@dataclass(frozen=True)
class StartProfile(_Message):
    """Probe the links for at most `probe_s` (0: not at all), then profile `steps` steps (0: none).

    `alone`: only rank 0 computes, for emulated accelerators. `devices`: ranks per host, in rank
    order.
    """

    steps: int
    probe_s: float
    alone: bool
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class StartProbe(_Message):
    """Probe the links for about `budget_s`, with `computing` also while every rank computes."""

    budget_s: float
    computing: bool
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class StartEmulation(_Message):
    """Let the accelerators wait for the times of `workload` from now on."""

    workload: Workload


@dataclass(frozen=True)
class StartTrial(_Message):
    """Load `plan` (None: the script's current setup), warm up and time `timed_steps` steps."""

    plan: Plan | None
    warmup_steps: int
    timed_steps: int


@dataclass(frozen=True)
class ContinueTrial(_Message):
    """Time further steps of the trial that just paused, under the same plan."""

    warmup_steps: int
    timed_steps: int


@dataclass(frozen=True)
class TrainOn(_Message):
    """Load `plan` (None: the script's current setup), and train until the script ends by itself.

    The rank takes no further instruction.
    """

    plan: Plan | None


@dataclass(frozen=True)
class EndScript(_Message):
    """End the script at this step boundary."""


@dataclass(frozen=True)
class Ready(_Message):
    """The rank is at its first step boundary."""

    model_id: str
    round_robin: bool


@dataclass(frozen=True)
class Heartbeat(_Message):
    """The rank still makes steps; `steps`: since its start."""

    steps: int = 0


@dataclass(frozen=True)
class Probing(_Message):
    """The measurement that a long probe takes now, for people."""

    description: str


@dataclass(frozen=True)
class ProfileAnswer(_Message):
    """Answers `StartProfile`. `workload` is None if no steps were profiled.

    `cores`: usable CPU cores of the host. `cross_step_refused`: why the script cannot synchronize
    across steps; empty if it can. `current_buckets`: variables of each bucket of the current setup,
    in its order; empty: not known. `op_fusions`: choices of sets of ops that the model can enact;
    `op_fusion_report`: what was measured of them, and how the steps differ from the script's own,
    for people. `mirrored`, `direct_refused`, `plugins_refused`, `further_models`: see `Profiled`.
    `reads_norms`: as in `Workload`, also if no steps were profiled. `rows_only`: the variables of
    which it holds, likewise.
    """

    workload: Workload | None
    series: tuple[ProbeSeries, ...]
    software: dict[str, str]
    cores: int
    cross_step_refused: str
    current_buckets: tuple[tuple[str, ...], ...] = ()
    op_fusions: tuple[OpFusionChoice, ...] = ()
    op_fusion_report: str = ""
    mirrored: bool = False
    reads_norms: bool = False
    direct_refused: str = ""
    further_models: int = 0
    rows_only: tuple[str, ...] = ()
    plugins_refused: str = ""


@dataclass(frozen=True)
class ProbeAnswer(_Message):
    """Answers `StartProbe`."""

    series: tuple[ProbeSeries, ...]
    links: ProbedLinks
    software: dict[str, str]
    cores: int


@dataclass(frozen=True)
class EmulationAnswer(_Message):
    """Answers `StartEmulation`: the rank has made its first emulated step."""


@dataclass(frozen=True)
class TrialAnswer(_Message):
    """Answers `StartTrial` and `ContinueTrial`; one entry per timed step.

    `clean`: no evaluation interrupted the step. `overrun` is empty where accelerators are real.
    `gradient_error`: see `Measured`.
    """

    step_s: tuple[float, ...]
    clean: tuple[bool, ...]
    overrun: tuple[float, ...]
    gradient_error: float | None


@dataclass(frozen=True)
class RankFailed(_Message):
    """The rank refused the instruction and waits, or its script ended with an error."""

    kind: FailureKind
    message: str


@dataclass(frozen=True)
class ScriptFinished(_Message):
    """The script came to its own end.

    `steps`: of the tuned model. `model`: number of the model that the script trains instead of it,
    which counts as its end; 1: of none.
    """

    steps: int
    model: int = 1


RankInstruction = (
    StartProfile | StartProbe | StartEmulation | StartTrial | ContinueTrial | TrainOn | EndScript
)
RankEvent = (
    Ready
    | Heartbeat
    | Probing
    | ProfileAnswer
    | ProbeAnswer
    | EmulationAnswer
    | TrialAnswer
    | RankFailed
    | ScriptFinished
)


def encode(message: RankInstruction | RankEvent) -> str:
    """One line of JSON, without its line break."""
    return json.dumps({"type": type(message).__name__, **to_data(message)}, separators=(",", ":"))


def decode_instruction(line: str) -> RankInstruction:
    """Raises `InvalidInput` for an unknown type, field or value."""

    instruction: RankInstruction = _decode(line, RankInstruction, "an instruction to a rank")
    return instruction


def decode_event(line: str) -> RankEvent:
    """Raises `InvalidInput` for an unknown type, field or value."""

    event: RankEvent = _decode(line, RankEvent, "an event of a rank")
    return event


def _decode(line: str, union: Any, where: str) -> Any:
    types = {kind.__name__: kind for kind in get_args(union)}
    data = parse_json(line, where)
    name = data.pop("type", None) if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in types:
        raise InvalidInput(f"{where} must have a type of {', '.join(types)}, but has {name!r}")
    return parse(types[name], data, f"{where} ({name})")
