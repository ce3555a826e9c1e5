"""The mixture of a collection's strategies, in a world that is a function of the plan."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_job import WORKLOAD

from autotune.cluster import Cluster
from autotune.dataset.folder import Description, read_domain
from autotune.dataset.trials import Domain, Environment
from autotune.dataset.writing import opened
from autotune.jobs.campaign.session import TrialLength, TrialSession
from autotune.jobs.campaign.setups import TRAIN_VARIED, Setup
from autotune.records import Conditions, Failed, FailureKind, Measured, TrialRequest
from autotune.strategy_space.plan import Plan, plan
from autotune.workload import Workload
from runtime_rewriter.world.results import Profile

ROOT = Path(__file__).parents[2]
DESCRIPTION = Description("small.local", "small", "local", WORKLOAD, Cluster.local(2), {}, 2, ())
PROFILE = Profile(WORKLOAD, (), {"torch": "2.13.0"}, 2, "", (("localhost", 2),))


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


@pytest.fixture(autouse=True)
def datasets_on_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "datasets"))


@pytest.fixture
def mixture() -> Iterator[Any]:
    import mixture as module

    yield module
    sys.modules.pop("mixture")


def test_every_domain_names_a_script_and_a_cluster_that_exist():
    from domains import DOMAINS

    for name, setup in DOMAINS.items():
        words = setup.script[2:] if setup.script[0] == str(TRAIN_VARIED) else setup.script
        script = Path(words[0])
        assert script.is_file(), name
        assert setup.cluster().world_size > 1, name
        assert name.startswith(f"{setup.model}.{setup.cluster_file.stem}")
        assert name.endswith((".ratio_1", ".real")), name
        profile = setup.profile() if setup.profile is not None else None
        assert (profile is None) == (script.parent == ROOT / "examples"), name
        assert profile is None or profile.model == words[1], name
    low_memory = [setup for setup in DOMAINS.values() if setup.model.endswith("_low_memory")]
    assert len(low_memory) == 2
    assert all('"spare_memory_mib": 64' in setup.script[1] for setup in low_memory)
    assert len(DOMAINS) - len(low_memory) - 2 >= 20  # two compute for real


def sample(mixture, folder: Path, count: int, obey: Callable[[], None] = lambda: None) -> Domain:
    setup = Setup("small", Path("local.yaml"), ("train.py",))
    length, ignore = TrialLength(1, 4), lambda trial: None
    with opened(folder) as writer:
        if writer.described is None:
            writer.describe(DESCRIPTION)
        writer.begin_session(Environment(Conditions(), {}, 2, "x86_64", "6.1"))
        world: Any = PlannedWorld()
        session = TrialSession(world, writer, setup, length, PROFILE, ignore)
        mixture.sample_domain(session, count, 0, obey)
    return read_domain(folder)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a domain with eight candidates, which no test changes."""
    folder = tmp_path_factory.mktemp("eight") / "small.local"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "datasets"))
        import mixture

        sample(mixture, folder, 8)
        sys.modules.pop("mixture")
    return folder


class Stop(Exception):
    pass


def stop_at(calls: int) -> Callable[[], None]:
    numbers = itertools.count()

    def obey() -> None:
        if next(numbers) >= calls:
            raise Stop

    return obey


def drawn_of(domain: Domain) -> list[str]:
    drawn = [trial for trial in domain.candidates if trial.kind in ("builder", "random")]
    return [trial.strategy.id for trial in drawn]


def longest_stretch_without_a_reference(domain: Domain) -> int:
    letters = "".join("r" if trial.strategy is None else "c" for trial in domain.trials)
    return max(map(len, letters.split("r")))


def test_a_collection_is_a_mixture_and_goes_on_where_it_was_stopped(mixture, tmp_path: Path):
    """Stop among the random strategies and again in a job of the tuner, which resumes as itself."""
    for calls in (9, 50):
        with pytest.raises(Stop):
            sample(mixture, tmp_path, 40, stop_at(calls))
    stopped = read_domain(tmp_path).trials
    kinds = {"builder", "random", "reference", "repeat", "tuning"}
    assert {trial.kind for trial in stopped} >= kinds
    domain = sample(mixture, tmp_path, 40)
    assert domain.trials[: len(stopped)] == stopped
    assert len(domain.candidates) == 40 and len(domain.sessions) == 3
    for trial in domain.candidates:
        assert trial.plan == plan(trial.strategy, domain.workload, domain.cluster.world_size)
        if trial.kind == "repeat":
            assert trial.strategy == domain.trials[int(trial.source.split(":")[1])].strategy
    wanted = [strategy.id for _, strategy in mixture.fixed_strategies(domain, 23, 0, "")]
    assert sorted(drawn_of(domain)) == sorted(wanted) and 20 < len(set(wanted)) == len(wanted)
    tuned = [trial.source for trial in domain.candidates if trial.kind == "tuning"]
    jobs = Counter(source.split(":")[1] for source in tuned)
    assert jobs == {"0-0": 40 - len(wanted) - 1}  # one repeat
    assert {trial.failure for trial in domain.trials} == {"", "crash: rank 0 exited with code 1"}
    assert longest_stretch_without_a_reference(domain) <= 10
    for session in domain.sessions:
        own_trials = [trial for trial in domain.trials if trial.session == session.id]
        assert own_trials[0].strategy is None
    assert domain.trials[-1].strategy is None


def test_a_collection_grows_without_trying_a_drawn_strategy_again(
    mixture, eight: Path, tmp_path: Path
):
    shutil.copytree(eight, tmp_path, dirs_exist_ok=True)
    domain = sample(mixture, tmp_path, 24)
    drawn = drawn_of(domain)
    assert len(domain.candidates) == 24 and len(drawn) == len(set(drawn)) > 8


def test_where_crossing_the_step_is_refused_a_few_random_strategies_cross_it(mixture, eight: Path):
    domain = read_domain(eight)
    refused = [s for _, s in mixture.fixed_strategies(domain, 100, 0, "the script clips")]
    crossing = [strategy for strategy in refused if strategy.cross_step]
    assert 0 < len(crossing) <= 5
    fewer = [s for _, s in mixture.fixed_strategies(domain, 60, 0, "the script clips")]
    assert {strategy.id for strategy in fewer} <= {strategy.id for strategy in refused}


@pytest.fixture
def collect(mixture) -> Iterator[Any]:
    import collect as module

    yield module
    sys.modules.pop("collect")


def test_a_domain_with_too_few_candidates_is_not_complete(collect, eight: Path) -> None:
    setup = Setup("small", Path("local.yaml"), ("train.py",))
    assert setup.name == eight.name
    assert collect.has_all(eight.parent, setup, 8)
    assert not collect.has_all(eight.parent, setup, 9)


@pytest.mark.parametrize("option", ["--trials", "--visit"])
def test_a_collection_refuses_less_than_one_candidate(collect, option, capsys) -> None:
    with pytest.raises(SystemExit):
        collect.main(["--all", option, "0"])
    assert f"{option}: must be at least 1, but is 0" in capsys.readouterr().err
