"""The outcome benchmark's run and its resumption, in a world whose times follow from the plans."""

from __future__ import annotations

import contextlib
import itertools
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
from autotune.errors import InvalidInput, LaunchError
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
from autotune.strategy_space.plan import Plan, plan
from autotune.tuning.events import Profiled, Proposed
from autotune.tuning.finalists import contender
from autotune.workload import Variable, Workload
from benchmarks.outcome.__main__ import main
from benchmarks.outcome.figures import whole_rounds
from benchmarks.outcome.freeze import measured_again
from benchmarks.outcome.horovod_through import BlockHung, block_of
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
from benchmarks.outcome.keys import last_line
from benchmarks.outcome.measure import (
    FEWEST_STEPS,
    LENGTHS,
    begin_searches,
    measure,
    run,
    steps_of_block,
)
from benchmarks.outcome.report import section
from benchmarks.outcome.results import row_of
from benchmarks.outcome.rivals import BYTE_SCHEDULER, BYTEPS, DDP_DEFAULT, SERVERS, ZERO2
from benchmarks.outcome.searches import BAYES, OURS, OURS_LOSSY, RANDOM, WITHIN, Incumbent, seed_job
from benchmarks.ranking.trials import ReplayedTimes, of_datasets, points_of
from runtime_rewriter.world.results import Profile

SETTINGS = OutcomeSettings(
    marks=(3, 6), rounds=6, lossy=False, more_seeds=(1,), long=8, ratio=1.0, options=False
)


LOOKS = 3
"""Finalists of a sweep, which are measured once more."""


def made_variable(number):
    ready_s, needed_s = 0.01 * (number + 1), 0.01 * (5 - number)
    return Variable(f"v{number}", (256, 1024), ready_s=ready_s, needed_s=needed_s)


VARIABLES = tuple(map(made_variable, range(6)))
WORKLOAD = Workload("made", VARIABLES, forward_s=0.06, backward_s=0.07, update_s=0.001)
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
    earlier: Callable[[], Sequence[DatasetTrial]] = tuple
    fails: str | None = None
    failure: FailureKind = FailureKind.CRASH
    trials: list[str] = field(default_factory=list)

    def model_id(self):
        return WORKLOAD.id

    def round_robin(self):
        return False

    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        if self.dies(self.earlier()):
            raise Killed
        key = plan.id if plan is not None else CURRENT_SETUP
        self.trials.append(key)
        if key == self.fails:
            return Failed(self.failure, "rank 1 exited with code 1", 1)
        messages, across = (len(plan.messages), plan.cross_step) if plan is not None else (2, False)
        step_s = (0.08 if across else 0.1) + 0.0002 * messages
        return Measured(((step_s,) * request.timed_steps,) * 2, 0.0, overrun=0.0)


@contextlib.contextmanager
def session_on(folder, world, prepared_s=PREPARED_S) -> Iterator[TrialSession]:
    """Open a session on the domain in `folder`, which starts if there is none."""
    with opened(folder) as writer:
        if writer.described is None:
            writer.describe(Description("made.up", "made", "up", WORKLOAD, CLUSTER, {}, 2, ()))
        writer.begin_session(Environment(CONDITIONS, PROFILE.software, 2, "x86_64", "6.1"))
        world.earlier = lambda: writer.trials
        yield TrialSession(world, writer, SETUP, LENGTHS, PROFILE, prepared_s=prepared_s)


def ran(folder: Path, world: MadeWorld, settings: OutcomeSettings = SETTINGS) -> list[str]:
    """Run the benchmark and return the plans that this run measured."""
    with session_on(folder, world) as session:
        run(session, settings, lambda _: None)
    return world.trials


@pytest.mark.parametrize("kind", [FailureKind.CRASH, FailureKind.HANG])
def test_only_a_block_whose_ranks_fall_silent_has_hung(tmp_path, kind: FailureKind):
    world = MadeWorld(fails=CURRENT_SETUP, failure=kind)
    with session_on(tmp_path / "made.up", world) as session, pytest.raises(LaunchError) as raised:
        block_of(session, "beside-hooks:0:reference", None)
    assert isinstance(raised.value, BlockHung) == (kind is FailureKind.HANG)


def jobs(folder: Path) -> Store:
    return Store.open(folder / ".work" / "jobs.db")


def closing_rounds(folder: Path) -> dict[int, list[DatasetTrial]]:
    return rounds_of(read_domain(folder).trials, CLOSING)


def plans(frozen: Frozen | None) -> set[str]:
    return {side.plan for side in frozen.sides}


def keys(trials: Sequence[DatasetTrial]) -> list[str]:
    return [trial.plan_id or CURRENT_SETUP for trial in trials]


def side_called(whole, name: str) -> Side:
    return next(side for side in whole.frozen.sides if side.name == name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`dataset` holds one domain, in `folder`."""
    dataset = tmp_path_factory.mktemp("whole")
    folder = dataset / "made.up"
    trials = ran(folder, MadeWorld())
    domain, frozen = read_domain(folder), read_frozen(folder)
    return SimpleNamespace(
        trials=trials, dataset=dataset, folder=folder, domain=domain, frozen=frozen
    )


@pytest.mark.slow
def test_searches_have_equal_budgets_and_every_round_measures_every_side(whole):
    assert keys(whole.domain.trials) == whole.trials  # nothing is lost
    closing = rounds_of(whole.domain.trials, CLOSING)
    orders = [keys(trials) for trials in closing.values()]
    assert list(closing) == list(range(SETTINGS.rounds))
    assert all(sorted(order) == sorted(plans(whole.frozen)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert whole.frozen.courses[OURS].trials == {"3": 3, "6": 6}
    assert side_called(whole, f"{RANDOM}, 6 trials")


@pytest.mark.slow
def test_the_source_of_a_trial_names_its_purpose(whole):
    trials = whole.domain.trials
    names = {side.name: side.plan for side in whole.frozen.sides}
    for trial in itertools.chain(*rounds_of(trials, CLOSING).values()):
        name = trial.source.split(":", 2)[2]
        assert (name == "reference") if trial.strategy is None else (names[name] == trial.plan_id)
    tuned = [trial for trial in whole.domain.candidates if trial.kind == "tuning"]
    ours = {OURS: 8, f"{OURS}-3": 3, f"{OURS}-6": 3, f"{OURS}-8": 3}
    others = (RANDOM, BAYES, WITHIN, seed_job(1))
    rest = {job: 6 for job in others} | {f"{job}-6": 3 for job in others}
    assert Counter(trial.source.split(":")[1] for trial in tuned) == ours | rest
    sources = {trial.source for trial in trials}
    assert sources >= {"reference", "tuning:ours:reference", "sweep:0:DDP, default buckets"}
    assert set(card_of(whole.domain).sources) == {CLOSING, SWEEP, "tuning", "reference"}
    assert trials[0].strategy is None and trials[-1].strategy is None


@pytest.mark.slow
def test_the_folder_is_a_dataset_in_which_a_ranking_has_each_plan_once(whole, tmp_path):
    """Apart from the benchmark's own files, a dozen closing trials of a plan are one point."""
    (whole.dataset / "outcome.md").write_text("a section")
    [domain] = read_dataset(whole.dataset)
    points = points_of(of_datasets([whole.dataset]), ReplayedTimes(tmp_path / "replayed"))
    measured_plans = {trial.plan.enacted_id for trial in domain.candidates}
    assert sorted(point.plan_id for point in points) == sorted(measured_plans)
    assert len(points) < len(domain.candidates) / 2
    fastest_s = min(point.example.step_s for point in points)
    assert fastest_s == pytest.approx(min(map(min, domain.plan_steady_s.values())))


@pytest.mark.slow
def test_repeats_of_the_closing_comparison_show_the_noise(whole):
    """Without these repeats no plan has enough trials."""

    def noisy(trial):
        step_s = trial.median_s * (1.02 if trial.number % 2 else 1.0)
        return replace(trial, outcome=Measured(((step_s,) * 4,)))

    def noise_of(trials):
        return card_of(replace(whole.domain, trials=tuple(trials))).repeat_noise

    trials = list(map(noisy, whole.domain.trials))
    closing = [trial for trial in trials if trial.kind in (CLOSING, "reference")]
    assert noise_of(trials) > 0.005 and noise_of(closing) > 0.005
    once = {trial.plan_id: trial for trial in closing if trial.strategy is not None}
    assert noise_of(once.values()) is None


@pytest.mark.slow
def test_ours_is_the_tuners_choice_at_each_mark_which_the_search_does_not_see(whole):
    with jobs(whole.folder) as store:
        search, looked = store.history(OURS), store.history(f"{OURS}-3")
    looks = [event for event in looked.events if event not in search.events]
    assert looked.events[: -len(looks)] == search.events[: len(looked.events) - len(looks)]
    assert [event.request.role for event in looks] == [Role.CANDIDATE] * 3 + [Role.REFERENCE]
    assert len(looked.candidates) == 3 + 3 and len(search.candidates) == 8
    assert side_called(whole, f"{OURS}, 3 trials").strategy.id == contender(looked)


@pytest.mark.slow
def test_searches_use_the_probed_cluster_and_count_the_preparation_time(whole):
    with jobs(whole.folder) as store:
        for job in (OURS, RANDOM):
            began, spec = store.history(job).events[0], store.job(job)
            assert isinstance(began, Profiled)
            assert (began.cluster, began.elapsed_s) == (CLUSTER, PREPARED_S)
            assert (spec.cluster, spec.most_steps) == (CLUSTER, 12)
    seconds = whole.frozen.courses[OURS].seconds
    assert PREPARED_S < seconds["3"] < seconds["6"]


@pytest.mark.slow
def test_a_search_that_joins_later_counts_the_first_sessions_preparation(whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    with session_on(tmp_path, MadeWorld(), prepared_s=1.0) as session, jobs(tmp_path) as store:
        begin_searches(session, store, replace(SETTINGS, lossy=True))
        assert store.history(OURS_LOSSY).events[0].elapsed_s == PREPARED_S
        assert store.job(OURS_LOSSY).lossy
        few = begin_searches(session, store, replace(SETTINGS, baselines=False))
        assert few.keys() == {OURS, WITHIN, seed_job(1)}


@pytest.mark.slow
def test_the_row_has_ratios_bound_and_marks(whole):
    row = row_of(whole.folder)
    last, near = row.lossless.last, row.lossless.near
    today = [compared for compared in row.compared if compared.side.group is Group.TODAY]
    today_s = {compared.side.name: compared.middle_s for compared in today}
    two_buckets_s, one_bucket_s = pytest.approx(0.1004), pytest.approx(0.1002)
    [best] = today_s.keys() - {DDP_DEFAULT}
    assert today_s == {DDP_DEFAULT: two_buckets_s, best: one_bucket_s}
    assert last.today.value == pytest.approx(0.1002 / last.step_s) and last.today.rival == best
    assert 0.0802 <= last.step_s < 0.1  # across steps
    assert last.best.value <= last.today.value
    assert near.trials <= 6 and near.seconds >= PREPARED_S
    assert row.transfer_s == pytest.approx(WORKLOAD.grad_bytes / 1e8)
    assert row.gap.value == pytest.approx(last.step_s / row.bound_s)
    line = json.loads(json.dumps(last_line([row, row])))
    assert line["ratio_geomean_lossless"] == pytest.approx(last.today.value)
    assert line["ratio_geomean_lossless"] == line["ratio_min_lossless"]
    assert line["ratio_geomean_any"] == pytest.approx(last.best.value)
    assert line["ratio_geomean_lossy_allowed"] is None
    assert line["bound_gap_mean"] == pytest.approx(row.gap.value - 1) and len(line["domains"]) == 2
    text = section([row], "python -m benchmarks.outcome", "2026-11-22")
    assert "made.up" in text and "ByteScheduler-like" in text and f"{last.today.value:.3f}" in text
    assert line["ratio_geomean_by_computation_to_communication"] == {
        "1": pytest.approx(last.today.value)
    }
    ablation = row.ablation
    assert ablation.within.value < 1.02 < ablation.without_search.value
    assert line["ablation"]["within_step"] == pytest.approx(ablation.within.value)
    assert line["seeds"] == {"made.up": [last.today.value, row.seeds[0].value]}
    assert row.lossless.best_known_s <= min(compared.middle_s for compared in row.compared)
    assert row_of(whole.dataset / "elsewhere") is None


@pytest.mark.slow
def test_evaluation_takes_every_domain_in_the_folder_and_ends_with_the_keys(whole, capsys):
    command = ["--only-evaluate", "--folder", str(whole.dataset)]
    assert main(command) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["domains_in_the_mean"] == 1 and line["ratio_clipped_geomean"] is None
    assert {"ratio_min_any", "reachable_gap_mean", "ablation", "commits"} <= line.keys()
    with pytest.raises(SystemExit):
        main([*command, "--domain", "vgg.nowhere"])
    assert "--domain must be some of made.up, but has 'vgg.nowhere'" in capsys.readouterr().err


@pytest.mark.slow
def test_marks_are_ordered_by_number_and_not_as_text(whole, tmp_path):
    shorten(whole, tmp_path, len(whole.domain.trials))
    course = whole.frozen.courses[OURS]
    others = {"3": "25", "6": "100"}

    def renamed(name):
        return {others[mark]: value for mark, value in getattr(course, name).items()}

    larger = replace(course, **{name: renamed(name) for name in ("sides", "trials", "seconds")})
    write_frozen(tmp_path, replace(whole.frozen, courses=whole.frozen.courses | {OURS: larger}))
    row = row_of(tmp_path)
    assert [at.asked for at in row.lossless.marks] == [25, 100]
    assert row.lossless.last.side == course.sides["6"]


def test_three_bests_of_a_search_are_measured_again_and_those_that_cost_nothing():
    bests = [
        (Incumbent(n, 0.0, strategy(n)), Side(f"{n}", Group.STOP, key, strategy(n)))
        for n, key in enumerate("abacdefg")
    ]
    assert [side.plan for _, side in measured_again(bests, {"f"})] == ["a", "b", "c", "f"]
    every = measured_again(bests, set("abcdefg"))
    assert [best.trials for best, _ in every] == [0, 1, 3, 4, 5, 6, 7]


def killed_at(folder: Path, count: int, source: str) -> tuple[DatasetTrial, ...]:
    """Run until `count` candidates of this source exist, and return the trials."""

    def dies(trials):
        sources = [trial.source for trial in trials if trial.strategy]
        return sum(name.startswith(f"{source}:") for name in sources) == count

    with pytest.raises(Killed):
        ran(folder, MadeWorld(dies=dies))
    return read_domain(folder).trials


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_and_measures_nothing_twice(tmp_path):
    first = killed_at(tmp_path, 3, SWEEP)
    second = killed_at(tmp_path, 3, f"tuning:{RANDOM}")
    ran(tmp_path, MadeWorld())
    domain = read_domain(tmp_path)
    assert domain.trials[: len(second)] == second and second[: len(first)] == first
    swept = [t.source for t in itertools.chain(*rounds_of(domain.trials, SWEEP).values())]
    assert len(set(swept)) == len(swept)
    of_rival = Counter(source.split(":", 2)[2].partition(",")[0] for source in swept)
    rivals = ("DDP", BYTE_SCHEDULER, BYTEPS, ZERO2, SERVERS)
    assert of_rival == dict.fromkeys(rivals, SETTINGS.budget + LOOKS)
    with jobs(tmp_path) as store:
        for job in (OURS, RANDOM):
            trials = store.history(job).trials
            searched = [t.plan_id for t in trials if t.request.role is Role.CANDIDATE]
            assert len(searched) == (8 if job == OURS else 6)
            proposed = [
                plan(one.strategy, WORKLOAD, CLUSTER.world_size).id
                for event in store.history(job).events
                if isinstance(event, Proposed)
                for one in event.proposals
            ]
            assert len(set(proposed)) == len(proposed)
            again = {one for one, times in Counter(searched).items() if times > 1}
            assert len(again) <= (1 if job == OURS else 0)  # the incumbent of the descent's pairs
    for session in domain.sessions:
        own_trials = [trial for trial in domain.trials if trial.session == session.id]
        assert own_trials[0].strategy is None
    assert len(domain.sessions) == 3 and row_of(tmp_path) is not None


def shorten(whole: SimpleNamespace, path: Path, count: int) -> None:
    """Write a domain to `path` with the same frozen sides and the first `count` trials."""
    with opened(path) as writer:
        description = read_description(whole.folder, read_sums(whole.folder))
        writer.describe(replace(description, sessions=()))
        writer.begin_session(whole.domain.environment)
        for trial in whole.domain.trials[:count]:
            writer.append(trial)
    write_frozen(path, whole.frozen)


@pytest.mark.slow
def test_a_closing_round_that_was_cut_is_repeated_as_a_whole(whole, tmp_path):
    count = len(plans(whole.frozen))
    four_rounds_and_three_blocks = len(whole.domain.trials) - 1 - 2 * count + 3
    shorten(whole, tmp_path, four_rounds_and_three_blocks)
    measured = Counter(ran(tmp_path, MadeWorld()))
    del measured[CURRENT_SETUP]
    assert measured == dict.fromkeys(plans(whole.frozen) - {CURRENT_SETUP}, 2)
    closing = closing_rounds(tmp_path)
    assert set(closing) == {0, 1, 2, 3, 4, 5, 6} and len(closing[4]) == 3
    assert len(whole_rounds(closing, whole.frozen.sides)) == SETTINGS.rounds


@pytest.mark.slow
def test_a_complete_domain_is_not_measured_again_and_rounds_are_only_added(whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    messages: list[str] = []
    assert ran(tmp_path, MadeWorld()) == []
    measure(SETUP, tmp_path, SETTINGS, messages.append)  # starts nothing
    assert messages == ["made.up: complete"]
    measured = Counter(ran(tmp_path, MadeWorld(), replace(SETTINGS, rounds=7)))
    assert set(measured) == plans(whole.frozen)
    del measured[CURRENT_SETUP]
    assert set(measured.values()) == {1}


@pytest.mark.slow
def test_a_side_that_fails_in_the_closing_comparison_is_left_out(whole, tmp_path):
    shorten(whole, tmp_path, 0)
    [side] = [side for side in whole.frozen.sides if side.name.startswith(ZERO2)]
    ran(tmp_path, MadeWorld(fails=side.plan))
    row = row_of(tmp_path)
    assert row.failed == {side.name: "crash: rank 1 exited with code 1"}
    assert side.name not in {compared.side.name for compared in row.compared}
    blocks = sum(map(len, closing_rounds(tmp_path).values()))
    assert blocks == 6 * (len(plans(whole.frozen)) - 1) + 2  # it is tried twice


@pytest.mark.slow
def test_a_side_whose_plan_has_changed_is_refused_before_any_trial(whole, tmp_path):
    shorten(whole, tmp_path, 0)
    first, *others = whole.frozen.sides[1:]
    write_frozen(tmp_path, replace(whole.frozen, sides=(replace(first, plan="of-then"), *others)))
    world = MadeWorld()
    changed = f"the planner has changed since {first.name!r} was frozen"
    with pytest.raises(InvalidInput, match=changed):
        ran(tmp_path, world)
    assert world.trials == []


@pytest.mark.slow
def test_the_first_round_of_a_sweep_is_short(whole):
    """Settings of the later rounds are measured as long as those of the closing comparison."""
    sweep = rounds_of(whole.domain.trials, SWEEP)
    steps = {
        number: {len(trial.step_s) for trial in trials if trial.strategy is not None}
        for number, trials in sweep.items()
    }
    assert steps[0] == {FEWEST_STEPS} and len(steps) > 1
    assert min(min(of_round) for number, of_round in steps.items() if number) > FEWEST_STEPS


def test_blocks_of_long_steps_have_fewer_of_them():
    timed = LENGTHS.timed_steps
    steps = {None: timed, 0.05: timed, 0.3: 4, 2.0: FEWEST_STEPS}
    assert {step_s: steps_of_block(step_s) for step_s in steps} == steps
