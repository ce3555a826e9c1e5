"""Trials of two starts of the script: the driver marks them, and no comparison pairs them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_job import WORKLOAD, SyntheticWorld, decided, job_spec, measured

from autotune.jobs.driver import carry_out
from autotune.records import Failed, FailureKind, Measured, Role, TrialRequest
from autotune.sampler.proposer import Proposer
from autotune.storage.store import Store
from autotune.strategy_space.plan import Plan
from autotune.tuning.descent import Descent, pairs_of
from autotune.tuning.events import Profiled
from autotune.tuning.history import History
from autotune.tuning.instructions import RunTrial
from autotune.tuning.job import JobSpec
from autotune.tuning.trial_requests import reference_trial
from autotune.workload import Workload
from runtime_rewriter.world.results import Profile

FINE = measured(0.1, 4)
CRASH, REFUSAL = Failed(FailureKind.CRASH, "died"), Failed(FailureKind.REFUSED, "cannot")


class Outcomes:
    """A world whose trials have these outcomes, in turn."""

    def __init__(self, *outcomes: Measured | Failed) -> None:
        self._outcomes: Iterator[Measured | Failed] = iter(outcomes)
        self.count = len(outcomes)

    def model_id(self) -> str:
        return WORKLOAD.id

    def profile(self) -> Profile:
        raise AssertionError("the job has its profile")

    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        return next(self._outcomes)

    def emulate(self, workload: Workload) -> None:
        raise AssertionError("its accelerators are real")

    def round_robin(self) -> bool:
        return False


def test_the_driver_marks_trials_after_a_failure_and_after_an_interruption(tmp_path: Path) -> None:
    spec = job_spec()

    def carried_out(world: Outcomes, started_anew: bool = True) -> list[bool]:
        before = len(store.history("job").trials)

        def instruct(spec: JobSpec, history: History) -> RunTrial | None:
            over = len(history.trials) == before + world.count
            return None if over else reference_trial(spec, history)

        proposer = Proposer(spec, {})
        history = carry_out(
            "job", spec, store, world, proposer, [], instruct, started_anew=started_anew
        )
        return [trial.restarted for trial in history.trials[before:]]

    with Store.open(tmp_path / "store.db") as store:
        store.create_job("job", spec)
        store.append("job", 0, Profiled(WORKLOAD, spec.cluster, 1.0, {}))
        first = carried_out(Outcomes(FINE, CRASH, FINE, REFUSAL, FINE))
        assert first == [False, False, True, False, False]
        assert carried_out(Outcomes(FINE, FINE)) == [True, False]
        assert carried_out(Outcomes(FINE), started_anew=False) == [False]


def test_a_neighbour_is_paired_within_one_start_of_the_script() -> None:
    trials = [("i", 1.0), ("c", 3.0), ("i", 2.0), ("c", 8.0), ("i", 4.0)]
    assert pairs_of(trials, "i", begins={1, 4}) == {"c": (math.log(1.5), math.log(4.0))}
    assert pairs_of(trials, "i", begins={1, 2, 3, 4}) == {}


def test_a_neighbour_without_its_incumbent_in_this_start_gets_it() -> None:
    paired = Descent("i", ("i", "c"), {"c": (0.1,)}, None, ("e",))
    assert paired.next_trial == "e"
    assert replace(paired, begins=frozenset({1})).next_trial == "i"


def test_no_pair_of_the_closing_comparison_spans_a_restart() -> None:
    """The machine is three times as slow after the first block of the comparison."""

    class Interrupted(SyntheticWorld):
        def _run(self, history, request):
            event = super()._run(history, request)
            began = request.role is Role.AB and len(history.ab_trials) == 1
            return replace(event, restarted=began)

    first_block = 19
    world = Interrupted({5: 0.06, 3: 0.07}, factor=lambda n: 3.0 if n > first_block else 1.0)
    history, decision = decided(job_spec(), world)
    assert decision.comparison is not None
    assert decision.comparison.pairs == 6 and len(history.ab_trials) == 13
    assert decision.comparison.low == pytest.approx(0.6)
    assert decision.comparison.high == pytest.approx(0.6)
