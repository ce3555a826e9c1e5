"""The outcome benchmark's run and its resumption, in a world whose times follow from the plans."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from synthetic_job import strategy

from autotune.cluster import Cluster, Host
from autotune.dataset.card import card_of
from autotune.dataset.folder import (
    Description,
    read_dataset,
    read_description,
    read_domain,
    read_sums,
)
from autotune.dataset.trials import DatasetTrial, Environment
from autotune.dataset.writing import opened
from autotune.errors import InvalidInput
from autotune.jobs.campaign.session import TrialSession
from autotune.jobs.campaign.setups import Setup
from autotune.records import (
    CURRENT_SETUP,
    Accelerators,
    Conditions,
    Failed,
    FailureKind,
    Measured,
    Network,
    Role,
    TrialRequest,
)
from autotune.storage.store import Store
from autotune.strategy_space.plan import Plan
from autotune.tuning.events import Profiled
from autotune.tuning.tuner import contender
from autotune.workload import Variable, Workload
from benchmarks.outcome.figures import whole_rounds
from benchmarks.outcome.kept import (
    CLOSING,
    SWEEP,
    Frozen,
    Group,
    OutcomeSettings,
    Side,
    read_frozen,
    rounds_of,
    write_frozen,
)
from benchmarks.outcome.measure import (
    FEWEST_STEPS,
    LENGTHS,
    _measured_again,
    begin_searches,
    measure,
    run,
    steps_of_block,
)
from benchmarks.outcome.report import section
from benchmarks.outcome.results import last_line, row_of
from benchmarks.outcome.rivals import DDP_BEST, DDP_DEFAULT
from benchmarks.outcome.searches import OURS, OURS_LOSSY, RANDOM, Incumbent
from benchmarks.ranking.trials import ReplayedTimes, of_datasets, points_of
from runtime_rewriter.world.results import Profile

SETTINGS = OutcomeSettings(marks=(3, 6), rounds=6, sweeps=2, lossy=False)
WORKLOAD = Workload(
    "made",
    tuple(
        Variable(
            f"v{number}", (256, 1024), ready_s=0.01 * (number + 1), needed_s=0.01 * (5 - number)
        )
        for number in range(6)
    ),
    forward_s=0.06,
    backward_s=0.07,
    update_s=0.001,
)
CLUSTER = Cluster("up", tuple(Host(f"h{number}", 1, 1e8, 1e-4, 1e9, 1e-5) for number in range(2)))
PROFILE = Profile(WORKLOAD, (), {"torch": "2.13.0"}, 2, "", (("h0", 1), ("h1", 1)))
SETUP = Setup("made", Path("up.yaml"), ("train.py",))
CONDITIONS = Conditions(Network.EMULATED, Accelerators.EMULATED)
PREPARED_S = 70.0


class Killed(Exception):
    pass


@dataclass
class MadeWorld:
    """A step takes 100 ms, less across steps, more with every message; the current setup has two.

    `dies(trials)`: whether the run is killed before the next trial.
    """

    dies: Callable[[Sequence[DatasetTrial]], bool] = lambda _: False
    kept: Sequence[DatasetTrial] = ()
    fails: str | None = None
    trials: list[str] = field(default_factory=list)

    def model_id(self) -> str:
        return WORKLOAD.id

    def round_robin(self) -> bool:
        return False

    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        if self.dies(self.kept):
            raise Killed
        key = plan.id if plan is not None else CURRENT_SETUP
        self.trials.append(key)
        if key == self.fails:
            return Failed(FailureKind.CRASH, "rank 1 exited with code 1", 1)
        messages, across = (len(plan.messages), plan.cross_step) if plan is not None else (2, False)
        step_s = (0.08 if across else 0.1) + 0.001 * messages
        return Measured(((step_s,) * request.timed_steps,) * 2, 0.0, overrun=0.0)


@contextlib.contextmanager
def session_on(
    folder: Path, world: MadeWorld, prepared_s: float = PREPARED_S
) -> Iterator[TrialSession]:
    """Open a session on the domain in `folder`, which starts if there is none."""
    with opened(folder) as writer:
        if writer.described is None:
            writer.describe(Description("made.up", "made", "up", WORKLOAD, CLUSTER, {}, 2, ()))
        writer.begin_session(Environment(CONDITIONS, PROFILE.software, 2, "x86_64", "6.1"))
        world.kept = writer.trials
        yield TrialSession(
            world,  # type: ignore[arg-type]
            writer,
            SETUP,
            LENGTHS,
            PROFILE,
            prepared_s=prepared_s,
        )


def ran(folder: Path, world: MadeWorld, settings: OutcomeSettings = SETTINGS) -> None:
    with session_on(folder, world) as session:
        run(session, settings, lambda _: None)


def jobs(folder: Path) -> Store:
    return Store.open(folder / ".work" / "jobs.db")


def plans(frozen: Frozen | None) -> set[str]:
    assert frozen is not None
    return {side.plan for side in frozen.sides}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`dataset` holds one domain, in `folder`."""
    world, dataset = MadeWorld(), tmp_path_factory.mktemp("whole")
    ran(dataset / "made.up", world)
    folder = dataset / "made.up"
    return SimpleNamespace(
        world=world,
        dataset=dataset,
        folder=folder,
        domain=read_domain(folder),
        frozen=read_frozen(folder),
    )


def test_every_search_has_the_same_number_of_trials_and_every_side_is_measured_in_every_round(
    whole,
):
    assert [
        trial.plan_id or CURRENT_SETUP for trial in whole.domain.trials
    ] == whole.world.trials  # nothing is lost
    closing = rounds_of(whole.domain.trials, CLOSING)
    orders = [[trial.plan_id or CURRENT_SETUP for trial in own] for own in closing.values()]
    assert list(closing) == list(range(SETTINGS.rounds))
    assert (
        all(sorted(order) == sorted(plans(whole.frozen)) for order in orders)
        and len({tuple(order) for order in orders}) > 1
    )
    assert whole.frozen.courses[OURS].trials == {"3": 3, "6": 6}
    assert any(side.name == f"{RANDOM}, 6 trials" for side in whole.frozen.sides)


def test_sources_tell_what_a_trial_was_taken_for(whole):
    names = {side.name: side.plan for side in whole.frozen.sides}
    for trial in (
        trial for own in rounds_of(whole.domain.trials, CLOSING).values() for trial in own
    ):
        name = trial.source.split(":", 2)[2]
        assert (name == "reference") if trial.strategy is None else (names[name] == trial.plan_id)
    searched = Counter(
        trial.source.split(":")[1] for trial in whole.domain.candidates if trial.kind == "tuning"
    )
    assert searched == {
        OURS: 6,
        f"{OURS}-3": 3,
        f"{OURS}-6": 3,
        RANDOM: 6,
        f"{RANDOM}-6": 3,
        "scikit-optimize": 6,
        "scikit-optimize-6": 3,
    }
    assert {trial.source for trial in whole.domain.trials} >= {
        "reference",
        "tuning:ours:reference",
        "sweep:1:DDP, default",
    }
    assert set(card_of(whole.domain).sources) == {CLOSING, SWEEP, "tuning", "reference"}
    assert whole.domain.trials[0].strategy is None and whole.domain.trials[-1].strategy is None


def test_the_folder_is_a_dataset_in_which_a_ranking_has_each_plan_once(whole, tmp_path):
    """Apart from the benchmark's own files, a dozen closing trials of a plan are one point."""
    (whole.dataset / "outcome.md").write_text("a section")
    [domain] = read_dataset(whole.dataset)
    points = points_of(of_datasets([whole.dataset]), ReplayedTimes(tmp_path / "replayed"))
    assert sorted(point.plan_id for point in points) == sorted(
        {trial.plan_id for trial in domain.candidates}
    )
    assert len(points) < len(domain.candidates) / 2
    fastest = min(points, key=lambda point: point.example.step_s)
    assert fastest.example.step_s == pytest.approx(
        min(min(times_s) for times_s in domain.plan_steady_s.values())
    )


def test_repeats_of_the_closing_comparison_tell_the_noise(whole):
    """Without these repeats no plan has enough trials."""
    noisy = [
        replace(
            trial, outcome=Measured(((trial.median_s * (1.02 if trial.number % 2 else 1.0),) * 4,))
        )
        for trial in whole.domain.trials
    ]
    closing = [trial for trial in noisy if trial.kind in (CLOSING, "reference")]
    assert card_of(replace(whole.domain, trials=tuple(noisy))).repeat_noise > 0.005
    assert card_of(replace(whole.domain, trials=tuple(closing))).repeat_noise > 0.005
    once = {trial.plan_id: trial for trial in closing if trial.strategy is not None}
    assert card_of(replace(whole.domain, trials=tuple(once.values()))).repeat_noise is None


def test_ours_is_the_tuners_choice_at_each_mark_and_the_search_goes_on_without_those_looks(whole):
    with jobs(whole.folder) as store:
        search, looked = store.history(OURS), store.history(f"{OURS}-3")
    looks = [event for event in looked.events if event not in search.events]
    assert looked.events[: -len(looks)] == search.events[: len(looked.events) - len(looks)]
    assert [event.request.role for event in looks] == [Role.CANDIDATE] * 3 + [Role.REFERENCE]
    assert len(looked.candidates) == 3 + 3 and len(search.candidates) == 6
    chosen = next(side for side in whole.frozen.sides if side.name == f"{OURS}, 3 trials")
    assert chosen.strategy.id == contender(looked)


def test_the_searches_plan_by_the_probed_cluster_and_count_what_profile_and_probe_took(whole):
    with jobs(whole.folder) as store:
        for job in (OURS, RANDOM):
            began = store.history(job).events[0]
            assert (
                isinstance(began, Profiled)
                and began.cluster == CLUSTER
                and began.elapsed_s == PREPARED_S
            )
            assert store.job(job).cluster == CLUSTER and store.job(job).most_steps == 12
    assert (
        PREPARED_S
        < whole.frozen.courses[OURS].seconds["3"]
        < whole.frozen.courses[OURS].seconds["6"]
    )


def test_a_search_that_joins_in_a_later_session_counts_what_the_first_one_took(whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    with session_on(tmp_path, MadeWorld(), prepared_s=1.0) as session, jobs(tmp_path) as store:
        begin_searches(session, store, replace(SETTINGS, lossy=True))
        assert (
            store.history(OURS_LOSSY).events[0].elapsed_s == PREPARED_S
            and store.job(OURS_LOSSY).lossy
        )


def test_the_row_tells_ratios_bound_and_marks(whole):
    row = row_of(whole.folder)
    last = row.lossless.last
    today_s = {
        compared.side.name: compared.middle_s
        for compared in row.compared
        if compared.side.group is Group.TODAY
    }
    assert today_s == {
        DDP_DEFAULT: pytest.approx(0.102),
        DDP_BEST: pytest.approx(0.101),
    }  # two buckets, and one
    assert last.today.value == pytest.approx(0.101 / last.step_s) and last.today.rival == DDP_BEST
    assert 0.081 <= last.step_s < 0.1  # across steps
    assert (
        last.best.value <= last.today.value
        and row.lossless.near.trials <= 6
        and row.lossless.near.seconds >= PREPARED_S
    )
    assert row.transfer_s == pytest.approx(
        WORKLOAD.grad_bytes / 1e8
    ) and row.gap.value == pytest.approx(last.step_s / row.bound_s)
    line = json.loads(json.dumps(last_line([row, row])))
    assert (
        line["ratio_geomean_lossless"]
        == line["ratio_min_lossless"]
        == pytest.approx(last.today.value)
    )
    assert (
        line["ratio_geomean_any"] == pytest.approx(last.best.value)
        and line["ratio_geomean_lossy_allowed"] is None
    )
    assert line["bound_gap_mean"] == pytest.approx(row.gap.value - 1) and len(line["domains"]) == 2
    text = section([row], "python -m benchmarks.outcome", "2026-11-22")
    assert "made.up" in text and "ByteScheduler-like" in text and f"{last.today.value:.3f}" in text
    assert row_of(whole.dataset / "elsewhere") is None


def test_marks_are_in_the_order_of_their_numbers_and_not_of_their_text(whole, tmp_path):
    shorten(whole, tmp_path, len(whole.domain.trials))
    course = whole.frozen.courses[OURS]
    others = {"3": "25", "6": "100"}
    renamed = replace(
        course,
        **{
            name: {others[mark]: value for mark, value in getattr(course, name).items()}
            for name in ("sides", "trials", "seconds")
        },
    )
    write_frozen(tmp_path, replace(whole.frozen, courses=whole.frozen.courses | {OURS: renamed}))
    row = row_of(tmp_path)
    assert [at.asked for at in row.lossless.marks] == [25, 100]
    assert row.lossless.last.side == course.sides["6"]


def test_of_the_bests_of_a_search_three_are_measured_again_and_those_that_cost_nothing():
    bests = [
        (Incumbent(n, 0.0, strategy(n)), Side(f"{n}", Group.STOP, key, strategy(n)))
        for n, key in enumerate("abacdefg")
    ]
    assert [side.plan for _, side in _measured_again(bests, {"f"})] == ["a", "b", "c", "f"]
    assert [best.trials for best, _ in _measured_again(bests, set("abcdefg"))] == [
        0,
        1,
        3,
        4,
        5,
        6,
        7,
    ]


def killed_at(folder: Path, count: int, source: str) -> tuple[DatasetTrial, ...]:
    """Run until so many candidates of this source exist, and return the trials."""
    world = MadeWorld(
        dies=lambda trials: (
            sum(trial.source.startswith(f"{source}:") for trial in trials if trial.strategy)
            == count
        )
    )
    with pytest.raises(Killed):
        ran(folder, world)
    return read_domain(folder).trials


def test_a_run_that_was_killed_goes_on_without_measuring_anything_twice(tmp_path):
    first = killed_at(tmp_path, 3, SWEEP)
    second = killed_at(tmp_path, 3, f"tuning:{RANDOM}")
    ran(tmp_path, MadeWorld())
    domain = read_domain(tmp_path)
    assert domain.trials[: len(second)] == second and second[: len(first)] == first
    swept = Counter(
        trial.plan_id for own in rounds_of(domain.trials, SWEEP).values() for trial in own
    )
    assert set(swept.values()) == {SETTINGS.sweeps}
    with jobs(tmp_path) as store:
        for job in (OURS, RANDOM):
            recorded = [
                trial for trial in store.history(job).trials if trial.request.role is Role.CANDIDATE
            ]
            assert len(recorded) == 6 and len({trial.plan_id for trial in recorded}) == 6
    for session in domain.sessions:
        assert (
            next(trial for trial in domain.trials if trial.session == session.id).strategy is None
        )
    assert len(domain.sessions) == 3 and row_of(tmp_path) is not None


def shorten(whole: SimpleNamespace, path: Path, count: int) -> None:
    """Write a domain to `path` with the same frozen sides and the first so many trials."""
    with opened(path) as writer:
        writer.describe(
            replace(read_description(whole.folder, read_sums(whole.folder)), sessions=())
        )
        writer.begin_session(whole.domain.environment)
        for trial in whole.domain.trials[:count]:
            writer.append(trial)
    write_frozen(path, whole.frozen)


def test_a_closing_round_that_was_cut_is_made_anew_as_a_whole(whole, tmp_path):
    count = len(plans(whole.frozen))
    shorten(
        whole, tmp_path, len(whole.domain.trials) - 1 - 2 * count + 3
    )  # four whole rounds and three blocks of the fifth
    world = MadeWorld()
    ran(tmp_path, world)
    assert Counter(world.trials) - Counter({CURRENT_SETUP: len(world.trials)}) == Counter(
        dict.fromkeys(plans(whole.frozen) - {CURRENT_SETUP}, 2)
    )
    closing = rounds_of(read_domain(tmp_path).trials, CLOSING)
    assert set(closing) == {0, 1, 2, 3, 4, 5, 6} and len(closing[4]) == 3
    assert len(whole_rounds(closing, whole.frozen.sides)) == SETTINGS.rounds


def test_what_is_complete_is_not_measured_again_and_more_rounds_are_only_added(whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    world = MadeWorld()
    said: list[str] = []
    ran(tmp_path, world)
    measure(SETUP, tmp_path, SETTINGS, said.append)  # starts nothing
    assert world.trials == [] and said == ["made.up: complete"]
    ran(tmp_path, world, replace(SETTINGS, rounds=7))
    assert set(world.trials) == plans(whole.frozen)
    assert set(Counter(key for key in world.trials if key != CURRENT_SETUP).values()) == {1}


def test_a_side_that_fails_in_the_closing_comparison_is_left_out_with_its_reason(whole, tmp_path):
    shorten(whole, tmp_path, 0)
    broken = next(side for side in whole.frozen.sides if side.name == "PS, round robin")
    ran(tmp_path, MadeWorld(fails=broken.plan))
    row = row_of(tmp_path)
    assert row.failed == {"PS, round robin": "crash: rank 1 exited with code 1"}
    assert "PS, round robin" not in {compared.side.name for compared in row.compared}
    closing = rounds_of(read_domain(tmp_path).trials, CLOSING)
    assert (
        sum(map(len, closing.values())) == 6 * (len(plans(whole.frozen)) - 1) + 2
    )  # it is tried twice


def test_a_side_that_is_planned_otherwise_today_is_refused_before_anything_is_measured(
    whole, tmp_path
):
    shorten(whole, tmp_path, 0)
    first, *others = whole.frozen.sides[1:]
    write_frozen(tmp_path, replace(whole.frozen, sides=(replace(first, plan="of-then"), *others)))
    world = MadeWorld()
    with pytest.raises(
        InvalidInput, match="the planner has changed since 'DDP, best bucket size' was frozen"
    ):
        ran(tmp_path, world)
    assert world.trials == []


def test_blocks_of_long_steps_have_fewer_of_them() -> None:
    assert steps_of_block(None) == steps_of_block(0.05) == LENGTHS.timed_steps
    assert steps_of_block(0.3) == 4
    assert steps_of_block(2.0) == FEWEST_STEPS
