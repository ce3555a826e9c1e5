"""Which share of a job's trials should its descent take? A simulated A/B of the tuner's own loop.

    python -m benchmarks.descent_share [--domains NAME...] [--seeds 3] [--shares 0 0.15 0.3 0.5]

The tuner and the proposer run as in a job, on workloads and clusters of `datasets/outcome_ratios`,
with 25 trials, without learned simulators, and with fewer replays of the optimizer (`BUDGETS`).
Nothing is executed: the true step is a replay that differs from the proposer's. Each cost of the
runtime and each link has a factor of its own (drawn by the seed, `COSTS_SD` and `LINKS_SD`), and
each plan one of its own (`PLAN_SD`), since the replay also lacks structure. A step has the noise
`STEP_SD`, and a whole trial `TRIAL_SD`. All are assumed relative standard deviations.

All shares of a seed have the same truth and noise. The result of a share is the true step of the
plan that the search would pass to the closing comparison, over that of the first share; lower is
better.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autotune.cluster import Cluster
from autotune.dataset.folder import read_dataset
from autotune.lowering.costs import RuntimeCosts
from autotune.lowering.device_costs import costs_of
from autotune.lowering.replayed import LoweredSteps
from autotune.optimizer.budget import Budget
from autotune.records import CURRENT_SETUP, Measured
from autotune.rng import generator
from autotune.sampler.proposer import Proposer
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.plan import Plan, plan
from autotune.tuning.events import Event, Profiled, Proposed, TrialFinished
from autotune.tuning.finalists import contender
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
from autotune.tuning.tuner import look_instruction, search_instruction
from autotune.workload import Workload
from benchmarks.repository import ROOT, machine, option_parser

TRIALS, SAMPLES = 25, 60
BUDGETS = Budget(160, 4_000_000), Budget(60, 1_500_000)
"""What the optimizer may replay in the first round, and in a later one."""
COSTS_SD, LINKS_SD, PLAN_SD, STEP_SD, TRIAL_SD = 0.5, 0.15, 0.03, 0.03, 0.01
DOMAINS = (
    "embedding.four_hosts_mixed.ratio_1",
    "gpt_text.four_hosts.ratio_1",
    "vgg.four_hosts.ratio_1",
)


@dataclass
class SimulatedWorld:
    """Answers the tuner's instructions by a replay that the proposer does not know.

    `rounds`: proposals by the trials before them, which shares have in common.
    """

    workload: Workload
    cluster: Cluster
    seed: int
    rounds: dict[object, Proposed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = generator(self.seed, "truth")
        hosts = tuple(
            replace(host, link_bytes_per_s=host.link_bytes_per_s * _factor(rng, LINKS_SD))
            for host in self.cluster.hosts
        )
        fits = tuple(
            replace(fit, beta_s_per_byte=fit.beta_s_per_byte * _factor(rng, LINKS_SD))
            for fit in self.cluster.fits
        )
        real = replace(self.cluster, hosts=hosts, fits=fits)
        self._steps = LoweredSteps(self.workload, real, costs=_other_costs(self.workload, rng))
        self._current = plan(ddp_default(self.workload), self.workload, real.world_size)

    def true_s(self, wanted: Plan) -> float:
        of_plan = generator(self.seed, f"plan {wanted.id}")
        return self._steps.step_s(wanted) * _factor(of_plan, PLAN_SD)

    def answer(self, history: History, instruction: Instruction, proposer: Proposer) -> Event:
        if isinstance(instruction, ProfileWorkload):
            return Profiled(self.workload, self.cluster, 1.0, {"torch": "simulated"})
        if isinstance(instruction, Propose):
            before = tuple(trial.request.strategy_id for trial in history.trials)
            key = (instruction, before)
            if key not in self.rounds:
                self.rounds[key] = proposer.propose(
                    history, instruction.round, instruction.count, instruction.incumbent
                )
            return replace(self.rounds[key], elapsed_s=history.elapsed_s + 1.0)
        assert isinstance(instruction, RunTrial)
        return self._trial(history, instruction)

    def _trial(self, history: History, instruction: RunTrial) -> TrialFinished:
        request = instruction.request
        planned = history.planned(request.strategy_id)
        wanted = self._current if planned is None else planned.plan
        rng = generator(self.seed, "trial", request.number)
        trial_s = self.true_s(wanted) * _factor(rng, TRIAL_SD)
        outcome = Measured((self._noisy(rng, trial_s, request.timed_steps),))
        while more := further_steps(request, outcome):
            outcome = Measured(((*outcome.step_s[0], *self._noisy(rng, trial_s, more)),))
        outcome = replace(outcome, stopped=stop_reason(request, outcome))
        plan_id = None if request.strategy_id == CURRENT_SETUP else wanted.id
        elapsed_s = history.elapsed_s + sum(outcome.step_s[0])
        return TrialFinished(request, outcome, plan_id, elapsed_s)

    @staticmethod
    def _noisy(rng: np.random.Generator, center_s: float, steps: int) -> tuple[float, ...]:
        return tuple((center_s * np.exp(STEP_SD * rng.standard_normal(steps))).tolist())


def _factor(rng: np.random.Generator, deviation: float) -> float:
    return math.exp(deviation * float(rng.standard_normal()))


def _other_costs(workload: Workload, rng: np.random.Generator) -> RuntimeCosts:
    costs = costs_of(workload.device, workload.device_name)
    changed = {
        name: replace(constant, value=constant.value * _factor(rng, COSTS_SD))
        for name, constant in vars(costs).items()
        if name.endswith(("_s", "_s_per_byte"))
    }
    return replace(costs, **changed)


def searched(world: SimulatedWorld, share: float) -> dict[str, Any]:
    """Search with this share for the descent; the true step of the result and the trials."""
    spec = JobSpec(
        ("torchrun", "train.py"),
        world.cluster.world_size,
        world.cluster,
        max_trials=TRIALS,
        descent=share,
        samples_per_round=SAMPLES,
        seed=world.seed,
    )
    proposer = Proposer(spec, {}, budgets=BUDGETS)
    history = History((), spec.deviation)
    while True:
        instruction = search_instruction(spec, history) or look_instruction(spec, history)
        if instruction is None or isinstance(instruction, Finish | Abort):
            break
        history = history.then(world.answer(history, instruction, proposer))
    chosen = contender(history)
    assert chosen is not None
    planned = history.planned(chosen)
    assert planned is not None
    descending = {event.round for event in history.rounds if event.incumbent}
    return {
        "true_s": world.true_s(planned.plan),
        "by_descent": history.proposals[chosen].origin == "neighbour",
        "descent_trials": sum(t.request.round in descending for t in history.candidates),
        "trials": len(history.candidates),
    }


def compared(names: list[str], seeds: int, shares: list[float]) -> Iterator[dict[str, Any]]:
    domains = {one.name: one for one in read_dataset(ROOT / "datasets" / "outcome_ratios")}
    for seed in range(seeds):
        for name in names:
            domain = domains[name]
            world = SimulatedWorld(domain.workload, domain.cluster, seed)
            by_share = {f"{share:g}": searched(world, share) for share in shares}
            yield {"domain": name, "seed": seed, "shares": by_share}


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.15, 0.3, 0.5])
    options = parser.parse_args()
    rows = []
    for row in compared(options.domains, options.seeds, options.shares):
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    first = f"{options.shares[0]:g}"
    ratios = {
        share: [
            math.log(row["shares"][share]["true_s"] / row["shares"][first]["true_s"])
            for row in rows
        ]
        for share in (f"{share:g}" for share in options.shares)
    }
    summary = {
        share: {
            "ratio": round(math.exp(statistics.fmean(logs)), 5),
            "standard_error": round(statistics.stdev(logs) / math.sqrt(len(logs)), 5)
            if len(logs) > 1
            else None,
            "better": sum(log < 0 for log in logs),
            "worse": sum(log > 0 for log in logs),
        }
        for share, logs in ratios.items()
    }
    print(json.dumps({"over": first, "shares": summary, "rows": rows, **machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
