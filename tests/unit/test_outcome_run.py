"""The outcome benchmark's run, from the sweep to its last line, on a world whose step times follow from the plans; and its resumption."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.cluster import Cluster, Host
from autotune.records import CURRENT_SETUP, Accelerators, Conditions, Failed, FailureKind, Measured, Network, Role, TrialRequest
from autotune.store import Store
from autotune.strategy_space.plan import Plan
from autotune.tuner import contender
from autotune.workload import Variable, Workload
from benchmarks.outcome.domains import Domain
from benchmarks.outcome.figures import whole_rounds
from benchmarks.outcome.kept import Described, Folder, Group, Line, Settings
from benchmarks.outcome.measure import Session, run
from benchmarks.outcome.report import section
from benchmarks.outcome.results import last_line, row_of
from benchmarks.outcome.rivals import DDP_BEST, DDP_DEFAULT
from benchmarks.outcome.searches import OURS, RANDOM, SharedWorld
from runtime_rewriter.findings import Profile

SETTINGS = Settings(marks=(3, 6), rounds=6, sweeps=2, lossy=False)
DOMAIN = Domain("made", "up")
WORKLOAD = Workload(
    "made",
    tuple(Variable(f"v{number}", (256, 1024), ready_s=0.01 * (number + 1), needed_s=0.01 * (5 - number)) for number in range(6)),
    forward_s=0.06,
    backward_s=0.07,
    update_s=0.001,
)
CLUSTER = Cluster("up", tuple(Host(f"h{number}", 1, 1e8, 1e-4, 1e9, 1e-5) for number in range(2)))


class Killed(Exception):
    pass


@dataclass
class MadeWorld:
    """A step takes 100 ms, less across steps, and more with every message; the current setup as two messages."""

    dies: Callable[[], bool] = lambda: False
    fails: str | None = None
    trials: list[str] = field(default_factory=list)

    def model_id(self) -> str:
        return WORKLOAD.id

    def profile(self) -> Profile:
        raise AssertionError("the profile is shared")

    def emulate(self, workload: Workload) -> None:
        raise AssertionError("the accelerators are emulated already")

    def round_robin(self) -> bool:
        return False

    def run_trial(self, request: TrialRequest, plan: Plan | None) -> Measured | Failed:
        if self.dies():
            raise Killed
        key = plan.id if plan is not None else CURRENT_SETUP
        self.trials.append(key)
        if key == self.fails:
            return Failed(FailureKind.CRASH, "rank 1 exited with code 1", 1)
        messages, across = (len(plan.messages), plan.cross_step) if plan is not None else (2, False)
        step_s = (0.08 if across else 0.1) + 0.001 * messages
        return Measured(((step_s,) * request.timed_steps,) * 2, 0.0, overrun=0.0)


def described() -> Described:
    profile = Profile(WORKLOAD, (), {"torch": "2.13.0"}, 2, "", (("h0", 1), ("h1", 1)))
    return Described(profile, CLUSTER, CLUSTER, Conditions(Network.EMULATED, Accelerators.EMULATED), 3.0, 2, "x86_64")


def ran(path: Path, world: MadeWorld, settings: Settings = SETTINGS) -> Folder:
    folder = Folder(path)
    if folder.described() is None:
        folder.describe(described())
    known = folder.described()
    assert known == described()
    run(Session(("python", "train.py"), SharedWorld(world, known, folder), known, folder, settings, lambda _: None))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    world = MadeWorld()
    folder = ran(tmp_path_factory.mktemp("whole"), world)
    return SimpleNamespace(world=world, folder=folder)


def test_every_search_has_the_same_number_of_trials_and_every_side_is_measured_in_every_round(whole):
    phases = Counter(line.phase for line in whole.folder.all_lines())
    frozen = whole.folder.frozen()
    plans = {side.plan for side in frozen.sides}
    assert phases["closing"] == SETTINGS.rounds * len(plans)
    assert len(whole.world.trials) == sum(phases.values())  # nothing is lost
    assert frozen.courses[OURS].trials == {"3": 3, "6": 6}
    assert any(side.name == f"{RANDOM}, 6 trials" for side in frozen.sides)
    orders = [[line.plan for line in whole.folder.lines("closing") if line.round == number] for number in range(SETTINGS.rounds)]
    assert all(sorted(order) == sorted(plans) for order in orders) and len({tuple(order) for order in orders}) > 1


def test_ours_is_what_the_tuner_would_compare_after_so_many_trials_and_the_search_goes_on_without_those_looks(whole):
    with Store.open(whole.folder.store) as store:
        search, looked = store.history(OURS), store.history(f"{OURS}-3")
    looks = [event for event in looked.events if event not in search.events]
    assert looked.events[: -len(looks)] == search.events[: len(looked.events) - len(looks)]
    assert [event.request.role for event in looks] == [Role.CANDIDATE] * 3 + [Role.REFERENCE]
    assert len(looked.candidates) == 3 + 3 and len(search.candidates) == 6
    chosen = next(side for side in whole.folder.frozen().sides if side.name == f"{OURS}, 3 trials")
    assert chosen.strategy.id == contender(looked)


def test_the_row_tells_ratios_bound_and_marks(whole):
    row = row_of(DOMAIN, whole.folder)
    last = row.lossless.last
    today_s = {compared.side.name: compared.middle_s for compared in row.compared if compared.side.group is Group.TODAY}
    assert today_s == {DDP_DEFAULT: pytest.approx(0.102), DDP_BEST: pytest.approx(0.101)}  # two buckets, and one
    assert last.today.value == pytest.approx(0.101 / last.step_s) and last.today.rivals == (DDP_BEST,)
    assert 0.081 <= last.step_s < 0.1  # across steps
    assert last.best.value <= last.today.value and row.lossless.near.trials <= 6 and row.lossless.near.seconds >= 3.0
    assert row.transfer_s == pytest.approx(WORKLOAD.grad_bytes / 1e8) and row.gap.value == pytest.approx(last.step_s / row.bound_s)
    line = json.loads(json.dumps(last_line([row, row])))
    assert line["ratio_geomean_lossless"] == line["ratio_min_lossless"] == pytest.approx(last.today.value)
    assert line["ratio_geomean_any"] == pytest.approx(last.best.value) and line["ratio_geomean_lossy_allowed"] is None
    assert line["bound_gap_mean"] == pytest.approx(row.gap.value - 1) and len(line["domains"]) == 2
    text = section([row], "python -m benchmarks.outcome", "2026-11-22")
    assert "made.up" in text and "ByteScheduler-like" in text and f"{last.today.value:.3f}" in text


def killed_at(path: Path, phase: str, count: int) -> list[Line]:
    """Run until so many lines of a phase are there; the lines then, behind which a cut one stands."""
    world = MadeWorld(dies=lambda: len(Folder(path).lines(phase)) == count)
    with pytest.raises(Killed):
        ran(path, world)
    before = list(Folder(path).all_lines())
    with (path / "trials.jsonl").open("a") as file:
        file.write('{"phase": "clos')
    return before


def test_a_run_that_was_killed_goes_on_without_measuring_anything_twice(tmp_path):
    first = killed_at(tmp_path, "sweep", 3)
    second = killed_at(tmp_path, RANDOM, 3)
    folder = ran(tmp_path, MadeWorld())
    lines = list(folder.all_lines())
    assert lines[: len(second)] == second and second[: len(first)] == first
    assert set(Counter(line.plan for line in lines if line.phase == "sweep").values()) == {SETTINGS.sweeps}
    with Store.open(folder.store) as store:
        for job in (OURS, RANDOM):
            recorded = [trial for trial in store.history(job).trials if trial.request.role is Role.CANDIDATE]
            assert len(recorded) == 6 and len({trial.plan_id for trial in recorded}) == 6
    assert row_of(DOMAIN, folder) is not None


def test_a_closing_round_that_was_cut_is_made_anew_as_a_whole(whole, tmp_path):
    copied(whole.folder, tmp_path)
    plans = len({side.plan for side in whole.folder.frozen().sides})
    lines = (tmp_path / "trials.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "trials.jsonl").write_text("".join(lines[: -2 * plans + 3]))  # four whole rounds and three blocks of the fifth
    world = MadeWorld()
    folder = ran(tmp_path, world)
    assert len(world.trials) == 2 * plans
    assert {line.round for line in folder.lines("closing")} == {0, 1, 2, 3, 4, 5, 6}
    assert len(whole_rounds(folder.lines("closing"), folder.frozen().sides)) == SETTINGS.rounds


def copied(folder: Folder, path: Path, without: str = "") -> None:
    for name in {"domain.json", "sides.json", "trials.jsonl", "autotune.db"} - {without}:
        (path / name).write_bytes((folder.path / name).read_bytes())


def test_what_is_complete_is_not_measured_again_and_more_rounds_are_only_added(whole, tmp_path):
    copied(whole.folder, tmp_path)
    world = MadeWorld()
    ran(tmp_path, world)
    assert world.trials == []
    ran(tmp_path, world, replace(SETTINGS, rounds=7))
    assert sorted(world.trials) == sorted({side.plan for side in whole.folder.frozen().sides})


def test_a_side_that_fails_in_the_closing_comparison_is_left_out_with_its_reason(whole, tmp_path):
    copied(whole.folder, tmp_path, without="trials.jsonl")
    broken = next(side for side in whole.folder.frozen().sides if side.name == "PS, round robin")
    folder = ran(tmp_path, MadeWorld(fails=broken.plan))
    row = row_of(DOMAIN, folder)
    assert row.failed == {"PS, round robin": "crash: rank 1 exited with code 1"}
    assert "PS, round robin" not in {compared.side.name for compared in row.compared}
    assert len(folder.lines("closing")) == 6 * (len({side.plan for side in whole.folder.frozen().sides}) - 1) + 1
