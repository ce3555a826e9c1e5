"""Drives the real tuner with synthetic events, from a table of true step times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from autotune.cluster import Cluster
from autotune.records import (
    CURRENT_SETUP,
    Decision,
    Failed,
    FailureKind,
    Measured,
    RankingQuality,
    Role,
    TrialRequest,
)
from autotune.rng import generator
from autotune.strategy_space.plan import plan
from autotune.strategy_space.strategy import Shard, Strategy, Synchronizer, VariableStrategy
from autotune.tuning.events import Event, Profiled, Proposal, Proposed, TrialFinished
from autotune.tuning.history import History
from autotune.tuning.instructions import (
    Abort,
    Finish,
    Instruction,
    ProfileWorkload,
    Propose,
    RunTrial,
)
from autotune.tuning.job import JobSpec
from autotune.tuning.statistics import further_steps, stop_reason
from autotune.tuning.tuner import next_instruction
from autotune.workload import Variable, Workload

COMMAND = ("torchrun", "--nproc-per-node", "2", "train.py")
SHAPES = {
    "head.weight": (10, 64),
    "head.bias": (10,),
    "body.weight": (64, 64),
    "body.bias": (64,),
    "stem.weight": (64, 3, 3, 3),
}
WORKLOAD = Workload(
    "resnet",
    tuple(Variable(*item, ready_s=0.002 * place) for place, item in enumerate(SHAPES.items(), 1)),
    forward_s=0.01,
    backward_s=0.02,
    update_s=0.005,
    source="measured",
)
QUALITY = (
    RankingQuality("linear", 0.8, 0.6, 0.05, 0.02, 45, 10),
    RankingQuality("random", 0.5, 0.0, 0.4, None, 45, 10),
)


def job_spec(**settings: object) -> JobSpec:
    """A small job, without a descent at its end; `settings` override its fields."""
    values: dict[str, object] = {"command": COMMAND, "workers": 2, "max_trials": 12, "top_k": 4}
    values |= {"reference_every": 4, "ab_pairs": 6, "finalists": 2}
    values |= {"timed_steps": 4, "most_steps": 12, "descent": 0.0}
    return JobSpec.from_data(values | settings | {"cluster": Cluster.local(2).to_data()})


@cache
def strategy(number: int) -> Strategy:
    """Strategy `number` of 32: each bit selects a parameter server for a variable."""
    choices = []
    for position, variable in enumerate(WORKLOAD.variables):
        shard = Shard(Synchronizer.ALL_REDUCE)
        if (number >> position) & 1:
            shard = Shard(Synchronizer.PARAMETER_SERVER, placement=position % 2)
        choices.append(VariableStrategy(variable.name, (shard,)))
    return Strategy(tuple(choices))


@cache
def plan_id(number: int) -> str:
    """The plan of strategy `number` on two ranks."""
    return plan(strategy(number), WORKLOAD, 2).id


def measured(
    center_s: float, steps: int, rng: np.random.Generator | None = None, noise: float = 0.02
) -> Measured:
    """Two ranks; the first is slower. Without a generator every step takes `center_s`."""
    scale = np.ones(steps) if rng is None else np.exp(noise * rng.standard_normal(steps))
    slow = tuple(float(value) for value in center_s * scale)
    return Measured((slow, tuple(0.9 * value for value in slow)), 0.0)


@dataclass
class SyntheticWorld:
    """`true_s`: step time by strategy number (default `default_s`); `factor`: by trial number.

    `unsteady`: trials during which the machine becomes slow.
    """

    true_s: dict[int, float] = field(default_factory=dict)
    default_s: float = 0.1
    current_s: float = 0.1
    fails: Callable[[TrialRequest], bool] = lambda request: False
    factor: Callable[[int], float] = lambda number: 1.0
    noise: float = 0.0
    seed: int = 0
    available: int = 32
    step_overhead_s: float = 0.0
    refuses: Callable[[TrialRequest], bool] = lambda request: False
    unsteady: Callable[[TrialRequest], bool] = lambda request: False

    def __post_init__(self) -> None:
        self.by_id = {strategy(number).id: number for number in range(32)}

    def answer(self, spec: JobSpec, history: History, instruction: Instruction) -> Event:
        """The event that carries out an instruction; a function of its arguments and the seed."""
        now = history.elapsed_s
        if isinstance(instruction, ProfileWorkload):
            software = {"torch": "2.13.0", "python": "3.11"}
            return Profiled(WORKLOAD, spec.cluster, now + 1.0, software)
        if isinstance(instruction, Propose):
            numbers = self._proposed(history, instruction)
            strategies = [strategy(number) for number in numbers]
            proposals = tuple(Proposal(s, "sampled", self._true_s(s.id)) for s in strategies)
            quality = QUALITY if history.proposals else ()
            reason = "most accurate in cross-validation"
            values = (proposals, "linear", reason, 300, quality, now + 0.5, instruction.incumbent)
            return Proposed(instruction.round, *values)
        assert isinstance(instruction, RunTrial)
        return self._run(history, instruction.request)

    def _proposed(self, history: History, instruction: Propose) -> list[int]:
        """The next numbers; of an incumbent, untried numbers that differ in one bit."""
        first = len(history.proposals)
        if not instruction.incumbent:
            return list(range(first, min(first + instruction.count, self.available)))
        tried = {trial.request.strategy_id for trial in history.candidates}
        around = [self.by_id[instruction.incumbent] ^ (1 << bit) for bit in range(5)]
        untried = [number for number in around if strategy(number).id not in tried]
        return untried[: instruction.count]

    def _run(self, history: History, request: TrialRequest) -> TrialFinished:
        center_s = self._true_s(request.strategy_id) * self.factor(request.number)
        number = self.by_id.get(request.strategy_id)
        tried = None if number is None else plan_id(number)
        if self.refuses(request):
            failure = Failed(FailureKind.REFUSED, "plan cannot be enacted")
            return TrialFinished(request, failure, tried, history.elapsed_s + 0.01)
        rng = generator(self.seed, "trial", request.number) if self.noise else None
        outcome = measured(center_s, request.timed_steps, rng, self.noise)
        while steps := further_steps(request, outcome):
            more = measured(center_s, steps, rng, self.noise)
            rows = zip(outcome.step_s, more.step_s, strict=True)
            outcome = Measured(tuple((*a, *b) for a, b in rows), 0.0)
        steps = request.warmup_steps + len(outcome.slowest_s)
        elapsed_s = history.elapsed_s + steps * (center_s + self.step_overhead_s)
        if self.fails(request):
            failure = Failed(FailureKind.CRASH, "rank 1 exited with code 1", 1)
            return TrialFinished(request, failure, tried, elapsed_s)
        if self.unsteady(request):
            outcome = replace(outcome, step_s=tuple(map(_slowed, outcome.step_s)))
        outcome = replace(outcome, stopped=stop_reason(request, outcome))
        return TrialFinished(request, outcome, tried, elapsed_s)

    def _true_s(self, strategy_id: str) -> float:
        if strategy_id == CURRENT_SETUP:
            return self.current_s
        return self.true_s.get(self.by_id[strategy_id], self.default_s)


def _slowed(step_s: tuple[float, ...]) -> tuple[float, ...]:
    """Times of a machine that takes twice as long in the second half."""
    half = len(step_s) // 2
    return (*step_s[:half], *(2 * value for value in step_s[half:]))


def drive(
    spec: JobSpec, world: SyntheticWorld, history: History | None = None, limit: int = 500
) -> tuple[History, Finish | Abort]:
    """From `history` (default: nothing) to the end of the job."""
    history = history or History((), spec.deviation)
    for _ in range(limit):
        instruction = next_instruction(spec, history)
        if isinstance(instruction, Finish | Abort):
            return history, instruction
        history = history.then(world.answer(spec, history, instruction))
    raise AssertionError(f"the job did not end within {limit} events")


def decided(spec: JobSpec, world: SyntheticWorld) -> tuple[History, Decision]:
    """Drive a job that must end with a decision."""
    history, end = drive(spec, world)
    assert isinstance(end, Finish)
    return history, end.decision


def roles(history: History) -> str:
    """A letter per trial: r, c, or in the A/B a (tuned side) and b (current setup)."""
    letters = {Role.REFERENCE: "r", Role.CANDIDATE: "c"}
    return "".join(
        letters.get(trial.request.role, "b" if trial.request.strategy_id == CURRENT_SETUP else "a")
        for trial in history.trials
    )
