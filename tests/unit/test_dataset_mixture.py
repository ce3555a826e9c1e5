"""The mixture of a collection's strategies, in a world that is a function of the plan."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from synthetic_job import WORKLOAD

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.dataset.folder import Description, read_domain
from autotune.dataset.trials import Domain, Environment
from autotune.dataset.writing import opened
from autotune.jobs.campaign.session import TrialLength, TrialSession
from autotune.jobs.campaign.setups import Setup
from autotune.records import Conditions, Failed, FailureKind, Measured, TrialRequest
from autotune.strategy_space.plan import Plan, plan
from autotune.workload import Workload
from runtime_rewriter.world.results import Profile
from runtime_rewriter.world.world import World

ROOT = Path(__file__).parents[2]
DESCRIPTION = Description("small.local", "small", "local", WORKLOAD, Cluster.local(2), {}, 2, ())
FOUND = Profile(WORKLOAD, (), {"torch": "2.13.0"}, 2, "", (("localhost", 2),))


class PlannedWorld:
    """A message costs 2 ms; plans of exactly four messages crash."""

    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        messages = 5 if plan is None else len(plan.messages)
        if plan is not None and messages == 4:
            return Failed(FailureKind.CRASH, "rank 0 exited with code 1", 0)
        return Measured(((0.03 + 0.002 * messages,) * request.timed_steps,) * 2, overrun=0.0)

    def model_id(self) -> str:
        return WORKLOAD.id

    def emulate(self, workload: Workload) -> None:
        assert workload == WORKLOAD

    def round_robin(self) -> bool:
        return False


@pytest.fixture
def mixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.syspath_prepend(str(ROOT / "datasets"))
    import mixture as found

    yield found
    sys.modules.pop("mixture")


def test_every_domain_names_a_script_and_a_cluster_that_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "datasets"))
    from domains import DOMAINS

    for name, setup in DOMAINS.items():
        assert Path(setup.script[0]).is_file(), name
        assert read_cluster(setup.cluster_file).world_size > 1, name
        assert name.startswith(f"{setup.model}.{setup.cluster_file.stem}")
        given = setup.profile() if setup.profile is not None else None
        assert (given is None) == (Path(setup.script[0]).parent == ROOT / "examples"), name
        assert given is None or given.model == setup.script[1], name


def sample(
    mixture: object, folder: Path, count: int, obey: Callable[[], None] = lambda: None
) -> None:
    setup = Setup("small", Path("local.yaml"), ("train.py",))
    with opened(folder) as writer:
        if writer.described is None:
            writer.describe(DESCRIPTION)
        writer.begin_session(Environment(Conditions(), {}, 2, "x86_64", "6.1"))
        session = TrialSession(
            cast(World, PlannedWorld()), writer, setup, TrialLength(1, 4), FOUND, lambda trial: None
        )
        mixture.sample_domain(session, count, 0, obey)  # type: ignore[attr-defined]


class Stop(Exception):
    pass


def stop_at(calls: int) -> Callable[[], None]:
    left = [calls]

    def obey() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stop

    return obey


def drawn_of(domain: Domain) -> list[str]:
    return [
        trial.strategy.id
        for trial in domain.candidates
        if trial.kind in ("builder", "random") and trial.strategy is not None
    ]


def assert_no_stretch_without_a_reference(domain: Domain) -> None:
    since = 0
    for trial in domain.trials:
        since = 0 if trial.strategy is None else since + 1
        assert since <= 10


def test_a_collection_is_a_mixture_and_goes_on_where_it_was_stopped(
    mixture: object, tmp_path: Path
) -> None:
    """Stop among the random strategies and again in a job of the tuner, which resumes as itself."""
    for calls in (9, 50):
        with pytest.raises(Stop):
            sample(mixture, tmp_path, 40, stop_at(calls))
    stopped = read_domain(tmp_path)
    assert {trial.kind for trial in stopped.trials} >= {
        "builder",
        "random",
        "reference",
        "repeat",
        "tuning",
    }
    sample(mixture, tmp_path, 40)
    domain = read_domain(tmp_path)
    assert domain.trials[: len(stopped.trials)] == stopped.trials
    assert len(domain.candidates) == 40 and len(domain.sessions) == 3
    assert all(
        own.plan == plan(own.strategy, domain.workload, domain.cluster.world_size)
        for own in domain.candidates
        if own.strategy
    )
    fixed = mixture.fixed_strategies(domain, 23, 0, "")  # type: ignore[attr-defined]
    wanted = [strategy.id for _, strategy in fixed]
    assert sorted(drawn_of(domain)) == sorted(wanted) and 20 < len(set(wanted)) == len(wanted)
    for trial in domain.candidates:
        if trial.kind == "repeat":
            assert trial.strategy == domain.trials[int(trial.source.split(":")[1])].strategy
    jobs = Counter(
        trial.source.split(":")[1] for trial in domain.candidates if trial.kind == "tuning"
    )
    assert jobs == {"0-0": 40 - len(wanted) - 1}  # one repeat
    assert {trial.failure for trial in domain.trials} == {"", "crash: rank 0 exited with code 1"}
    assert_no_stretch_without_a_reference(domain)
    for session in domain.sessions:
        numbers = [trial.number for trial in domain.trials if trial.session == session.id]
        assert domain.trials[numbers[0]].strategy is None
    assert domain.trials[-1].strategy is None


def test_a_collection_grows_without_trying_a_drawn_strategy_again(
    mixture: object, tmp_path: Path
) -> None:
    for count in (8, 24):
        sample(mixture, tmp_path, count)
    domain = read_domain(tmp_path)
    drawn = drawn_of(domain)
    assert len(domain.candidates) == 24 and len(drawn) == len(set(drawn)) > 8
