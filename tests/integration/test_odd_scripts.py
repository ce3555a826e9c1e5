"""Every odd script sees and trains the same under a plan as under DDP, or the plan is refused."""

from __future__ import annotations

import copy
import ctypes
import gc
import shutil
import subprocess
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_scripts import TOPICS
from odd_scripts.basics import Script
from odd_scripts.outcomes import EXPECTED_OUTCOMES
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_plans import mixed, taken_in_when_read, uniform
from torch_world import run_world

from autotune.errors import AutotuneError
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Synchronizer
from runtime_rewriter.pytorch.cross_step import CrossStepUpdates
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.hooks import GradientSynchronizer

TRIAL_STEP = 3
"""The step before which a trial loads its plan."""


@dataclass
class PlainRun:
    """Runs a script under torch's DDP and keeps what it sees."""

    rank: int
    seen: list[Any] = field(default_factory=list)
    models: list[Any] = field(default_factory=list)

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        self.models.append(DistributedDataParallel(module, **options))
        return self.models[-1]

    def see(self, *values: Any) -> None:
        self.seen.append(copy.deepcopy(detached(list(values))))

    def result(self) -> Any:
        return self.seen, [model.state_dict() for model in self.models]


def detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        names = (
            number if isinstance(key, torch.Tensor) else key for number, key in enumerate(value)
        )
        return dict(zip(names, map(detached, value.values()), strict=True))
    return type(value)(map(detached, value)) if isinstance(value, list | tuple) else value


@dataclass
class PlannedRun(PlainRun):
    """The same under a plan, from the first step, or from a later one as in a trial."""

    crossing: bool = True
    in_trial: bool = False
    results: bool = False  # half of each exchange crosses, from variables that are owned whole
    refusal: str | None = None

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        model = PlannedDataParallel(module, **options)
        self.models.append(model)
        whole = mixed(module, 2)
        plan = replace(whole, messages=whole.messages[::-1], cross_step=self.crossing)
        if self.results:
            owned = uniform(module, 2, Synchronizer.REDUCE_BROADCAST)
            order = tuple(range(len(owned.messages)))[::-1]
            plan = replace(owned, cross_step=True, results=order)
        if self.in_trial:
            model.synchronizer.listeners.append(Trial(self, model.synchronizer, plan))
        else:
            self.load(model.synchronizer, plan)
        return model

    def load(self, synchronizer: GradientSynchronizer, plan: Plan) -> None:
        try:
            synchronizer.load(plan)
        except AutotuneError as refusal:
            self.refusal = str(refusal)


class Trial:
    def __init__(self, run: PlannedRun, synchronizer: GradientSynchronizer, plan: Plan) -> None:
        self.run, self.synchronizer, self.plan = run, synchronizer, plan
        self.steps = 0

    def on_boundary(self, now_s: float, clean: bool) -> None:
        self.steps += 1
        if self.steps == TRIAL_STEP:
            self.run.load(self.synchronizer, self.plan)

    def on_backward_end(self) -> None:
        """Nothing to do."""


def outcome(script: Script, run: PlannedRun, expected: Any) -> str:
    """SAME, DIFFER, or REFUSED with the reason; `+` if updates crossed the step."""
    crossed: list[int] = []
    own_update = CrossStepUpdates._update

    def counted(self: CrossStepUpdates, done: Any) -> None:
        crossed.append(sum(bool(pending.due) for pending in done.values()))
        own_update(self, done)

    CrossStepUpdates._update = counted  # type: ignore[method-assign]
    try:
        torch.manual_seed(run.rank)
        with taken_in_when_read():
            script(run)
        torch.testing.assert_close(run.result(), expected, rtol=0, atol=0)
    except AutotuneError as refusal:
        return f"REFUSED: {refusal}"
    except AssertionError as difference:
        return f"DIFFER: {difference}"
    finally:
        CrossStepUpdates._update = own_update  # type: ignore[method-assign]
        for model in run.models:
            model.synchronizer.close()
    if run.refusal is not None:
        return f"REFUSED: {run.refusal}"
    return "SAME+" if sum(crossed) else "SAME"


WAYS: dict[str, dict[str, Any]] = {
    "crossing": {},
    "crossing in a trial": {"in_trial": True},
    "half crossing": {"results": True},
    "within the step": {"crossing": False},
}
READING_GRADIENTS = ("gradients", "optimizers")
"""The topics in whose scripts results that wait for norms can matter."""
BETWEEN_PASSES = ("states", "aliases", "readers", "copies", "foreign", "optimizers")
"""The topics whose scripts differ in what they do between the passes of a model, most of all.

`make test` leaves out their plans within the step: the first steps under a plan that crosses the
step end within it, too.
"""
AT_ONCE = tuple(way for way, options in WAYS.items() if not options.get("crossing", True))
CROSSING = tuple(way for way in WAYS if way not in AT_ONCE)


def check(
    rank: int, topic: str, ways: tuple[str, ...] = tuple(WAYS), *names: str
) -> dict[str, dict[str, str]]:
    warnings.filterwarnings("ignore", "the plan's synchronization ends with each backward pass")
    outcomes: dict[str, dict[str, str]] = {}
    for name in names or TOPICS[topic]:
        script = TOPICS[topic][name]
        plain = PlainRun(rank)
        torch.manual_seed(rank)
        try:
            script(plain)
        except BaseException as error:
            error.add_note(f"in the script {name!r}")
            raise
        outcomes[name] = {}
        for way in ways:
            options = WAYS[way]
            if options.get("results") and topic not in READING_GRADIENTS:
                continue
            run = PlannedRun(rank, **options)
            try:
                outcomes[name][way] = outcome(script, run, plain.result())
            except BaseException as error:
                error.add_note(f"in the script {name!r}, {way}")
                raise
        gc.collect()  # until then threads of gloo's closed process groups wake up every 10 ms
        gc.freeze()  # the next collection visits nothing that has been imported so far
    return outcomes


SIGNS = {"SAME+": "+", "SAME": "=", "REFUSED": "R"}


def signs(ways: dict[str, str]) -> str:
    """The outcomes as in `EXPECTED_OUTCOMES`."""
    kinds = (ways[way].partition(":")[0] if way in ways else None for way in WAYS)
    return "".join("." if kind is None else SIGNS[kind] for kind in kinds)


@pytest.mark.parametrize("topic", TOPICS)
def test_no_script_sees_or_trains_anything_else(topic: str) -> None:
    check_topic(topic, CROSSING if topic in BETWEEN_PASSES else tuple(WAYS))


@pytest.mark.slow
@pytest.mark.parametrize("topic", BETWEEN_PASSES)
def test_no_script_sees_or_trains_anything_else_under_a_plan_within_the_step(topic: str) -> None:
    check_topic(topic, AT_ONCE)


def check_topic(topic: str, ways: tuple[str, ...]) -> None:
    results = run_world(check, 2, topic, ways, timeout_s=240.0)
    differing = [
        f"rank {rank}, {name}, {way}: {result}"
        for rank, outcomes in enumerate(results)
        for name, by_way in outcomes.items()
        for way, result in by_way.items()
        if result.startswith("DIFFER")
    ]
    assert not differing, "\n".join(differing)
    expected = {name: expected_signs(name, ways) for name in TOPICS[topic]}
    for outcomes in results:
        assert {name: signs(by_way) for name, by_way in outcomes.items()} == expected


def expected_signs(name: str, ways: tuple[str, ...]) -> str:
    """The signs of `EXPECTED_OUTCOMES` for these ways, and `.` for the others."""
    every = zip(WAYS, EXPECTED_OUTCOMES[name], strict=True)
    return "".join(sign if way in ways else "." for way, sign in every)


def test_every_outcome_belongs_to_a_script() -> None:
    assert set(EXPECTED_OUTCOMES) == {name for scripts in TOPICS.values() for name in scripts}


def built(source: Path, code: str) -> str:
    """A shared object that is linked to torch's Python interface."""
    source.write_text(code)
    to, libraries = source.with_suffix(".so"), Path(torch.__file__).parent / "lib"
    link = f"-L{libraries}", "-Wl,--no-as-needed", "-ltorch_python"
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", to, *link], check=True)
    return str(to)


def check_with_extension(rank: int, operators: str, foreign: str) -> dict[str, dict[str, str]]:
    ctypes.CDLL(operators)
    before = check(rank, "basics", tuple(WAYS), "plain_sgd")["plain_sgd"]
    ctypes.CDLL(foreign)
    after = check(rank, "basics", tuple(WAYS), "plain_sgd")["plain_sgd"]
    return {"before": before, "after": after}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="builds a module with gcc")
def test_nothing_crosses_the_step_with_an_extension_that_may_read_tensors(tmp_path: Path) -> None:
    operators = built(tmp_path / "operators.c", "int unused;")
    foreign = built(
        tmp_path / "foreign.c",
        "extern void *THPVariableClass; void *PyInit_foreign(void) { return THPVariableClass; }",
    )
    for outcomes in run_world(check_with_extension, 2, operators, foreign):
        assert outcomes["before"]["crossing"] == "SAME+"
        for way in ("crossing", "crossing in a trial"):
            assert "the extension module foreign.so may read" in outcomes["after"][way]
        assert outcomes["after"]["within the step"] == "SAME"
