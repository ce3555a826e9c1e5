"""Horovod scripts see and train the same under a plan as under their own Horovod."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from horovod_timelines import operations_of
from odd_scripts.basics import Net
from odd_scripts.horovod import HOROVOD_SCRIPTS, Branches
from odd_scripts.refused_horovod import REFUSED
from test_odd_scripts import detached
from torch import nn
from torch_plans import mixed, taken_in_when_read, uniform
from torch_world import run_world, seeded

import autotune
from autotune.errors import AutotuneError, InvalidInput
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Compressor
from runtime_rewriter.horovod.torch_scripts import horovod_steered
from runtime_rewriter.ports import unclaimed_port
from runtime_rewriter.pytorch.cross_step import CrossStepUpdates
from runtime_rewriter.pytorch.exchange.ranks import Timeouts
from runtime_rewriter.pytorch.hooks import GradientSynchronizer

pytest.importorskip("horovod", reason="`make horovod` builds it")
pytestmark = pytest.mark.timeout(600)  # of the first test, with what all of them look at

WAITS = Timeouts(30.0, 20.0)
TRIAL_STEP = 3
CYCLE_MS = "5"
"""By default 1: in each cycle Horovod's thread asks all ranks what is ready, also if nothing is."""
LONG_CYCLE_MS = "50"
"""All messages of a step become ready in one cycle."""
FP16 = Compressor.FP16
PlanOf = Callable[[nn.Module], Plan | None]


@dataclass
class HorovodRun:
    """Runs a script, and keeps what it sees."""

    rank: int
    seen: list[Any] = field(default_factory=list)

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        raise AssertionError("a Horovod script wraps its optimizer")

    def see(self, *values: Any) -> None:
        self.seen.append(copy.deepcopy(detached(list(values))))


@dataclass
class PlanSession:
    """Loads a plan into the first model, or later as a trial does, and takes it away again."""

    plan_of: PlanOf
    in_trial: bool
    synchronizer: GradientSynchronizer | None = None
    steps: int = 0

    def model_built(self, synchronizer: GradientSynchronizer) -> None:
        self.synchronizer = synchronizer
        synchronizer.listeners.append(self)
        if not self.in_trial:
            synchronizer.load(self.plan_of(synchronizer.module))

    def on_boundary(self, now_s: float, clean: bool) -> None:
        self.steps += 1
        assert self.synchronizer is not None
        if self.in_trial and self.steps == TRIAL_STEP:
            self.synchronizer.load(self.plan_of(self.synchronizer.module))
        if self.in_trial and self.steps == TRIAL_STEP + 2:
            self.synchronizer.load(None)

    def on_backward_end(self) -> None:
        """Nothing to do."""


WAYS: dict[str, tuple[PlanOf, bool]] = {
    "by Horovod in a trial": (lambda module: uniform(module, 2, partitioned=True), True),
    "in all ways": (lambda module: mixed(module, 2), False),
    "across the step": (lambda module: across(uniform(module, 2)), False),
    "across the step in a trial": (lambda module: across(uniform(module, 2)), True),
}


REFUSED_ACROSS = {
    "clipping": "gradients are changed between backward() and step()",
    "own_hooks": "hooks around the step of the optimizer SGD",
}


def across(within: Plan) -> Plan:
    return replace(within, messages=within.messages[::-1], cross_step=True)


def as_launched(rank: int, port: int) -> None:
    """Let this process look like a rank that the launcher has started."""
    dist.destroy_process_group()
    warnings.simplefilter("default")  # of Horovod's own modules
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_CYCLE_TIME": CYCLE_MS,
    }


@contextmanager
def with_timelines(hvd: Any) -> Iterator[None]:
    """Let Horovod start again with timelines, and without them afterwards.

    Their thread on rank 0 polls without a pause, so it takes a core from all other tests. Cycles
    have their default length: messages that are ready in the same one may change places.
    """
    hvd.shutdown()
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # Horovod reads both at `init`
    del os.environ["HOROVOD_CYCLE_TIME"]
    try:
        yield
    finally:
        del os.environ["HOROVOD_TIMELINE"]
        os.environ["HOROVOD_CYCLE_TIME"] = CYCLE_MS
    hvd.shutdown()


def keep_imports_from_collections() -> None:
    """Let no plan be loaded with a collection, and no search for a module visit all imports."""
    gc.disable()
    gc.freeze()


def check_all(rank: int, port: int, timeline: str) -> dict[str, Any]:
    """Everything that the tests look at, in one job."""
    as_launched(rank, port)
    keep_imports_from_collections()
    names = list(HOROVOD_SCRIPTS)
    with updates_counted() as crossed:
        problems = {}
        for name in names:
            problems[name] = list(problems_of(name, rank))
            crossed[name] = crossed.pop("", 0)
    return {
        "scripts": [f"{name}: {one}" for name, found in problems.items() for one in found],
        "crossed": {name for name, count in crossed.items() if count},
        "sent": sent(rank, timeline),
        "groups": sent_with_groups(rank, f"{timeline}.groups"),
        "fp16": compressed(rank),
        "initialized again": initialized_again(rank),
        "sparse on one rank": sparse_on_one_rank(rank),
        "sparse on one rank, in a group": sparse_on_one_rank(rank, grouped=True),
        "unused on one rank, in a group": unused_in_a_group(rank),
        "refusals": refusals(rank),
        "apply": applied(rank),
    }


@contextmanager
def updates_counted() -> Iterator[Counter[str]]:
    """Count, under "", the updates that cross a step. Nothing is applied before it is read."""
    counts: Counter[str] = Counter()
    own_update = CrossStepUpdates._update

    def counted(self: CrossStepUpdates, done: Any) -> None:
        counts[""] += sum(bool(pending.due) for pending in done.values())
        own_update(self, done)

    CrossStepUpdates._update = counted  # type: ignore[method-assign]
    try:
        with taken_in_when_read():
            yield counts
    finally:
        CrossStepUpdates._update = own_update  # type: ignore[method-assign]


@contextmanager
def launched(session: Any) -> Iterator[Any]:
    os.environ.pop("HOROVOD_RANK", None)  # the launcher's last start in this process has set it
    with horovod_steered(session, WAITS, tuned=True):
        import horovod.torch as hvd

        hvd.init()
        torch.manual_seed(0)
        yield hvd


def problems_of(name: str, rank: int) -> Iterator[str]:
    """What differs or was refused, in each way."""
    own = HorovodRun(rank)
    with launched(None):
        pass  # the reference runs without us
    HOROVOD_SCRIPTS[name](own)
    for way, (plan_of, in_trial) in WAYS.items():
        run, session = HorovodRun(rank), PlanSession(plan_of, in_trial)
        with launched(session):
            try:
                HOROVOD_SCRIPTS[name](run)
                torch.testing.assert_close(run.seen, own.seen, rtol=0, atol=0)
            except (AutotuneError, AssertionError) as problem:
                if way.startswith("across") and REFUSED_ACROSS.get(name, "?") in str(problem):
                    continue
                yield f"{way}: {type(problem).__name__}: {problem}"
            finally:
                assert session.synchronizer is not None
                session.synchronizer.close()


def sent(rank: int, timeline: str) -> list[list[str]]:
    """The tensors of each all-reduce of three steps, as rank 0's timeline shows them."""
    import horovod.torch as hvd

    session = PlanSession(lambda module: uniform(module, 2), in_trial=False)
    with with_timelines(hvd), launched(session):
        model = Net()
        optimizer = wrapped(model)
        hvd.start_timeline(timeline)
        train(model, optimizer, rank)
        hvd.stop_timeline()
        assert session.synchronizer is not None
        session.synchronizer.close()
    if rank > 0:
        return []
    return operations_of(Path(timeline))


def sent_with_groups(rank: int, timeline: str) -> tuple[int, list[int]]:
    """The number of restarts of a script with groups, and of tensors in each of its all-reduces.

    Its own step comes first, then one under a plan, and then its own again.
    """
    import horovod.torch as hvd

    session = PlanSession(lambda module: None, in_trial=False)
    with with_timelines(hvd):
        os.environ["HOROVOD_CYCLE_TIME"] = LONG_CYCLE_MS
        os.environ["HOROVOD_DISABLE_GROUP_FUSION"] = "0"
        with launched(session):
            model = Net()
            optimizer = wrapped(model, num_groups=2)
            synchronizer = session.synchronizer
            assert synchronizer is not None
            hvd.start_timeline(timeline)
            for plan in (None, uniform(model, 2), None):
                synchronizer.load(plan)
                train(model, optimizer, rank, steps=1)
            hvd.stop_timeline()
            synchronizer.close()
    return synchronizer.restarts, [] if rank > 0 else list(map(len, operations_of(Path(timeline))))


def wrapped(model: nn.Module, **options: Any) -> Any:
    import horovod.torch as hvd

    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        named_parameters=model.named_parameters(),
        **options,
    )


def train(model: nn.Module, optimizer: Any, rank: int, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=seeded(10 * rank + step))).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def compressed(rank: int) -> bool:
    """Whether a plan of fp16 gives the bits of the script's own compression."""
    import horovod.torch as hvd

    results = []
    for way in (lambda module: None, lambda module: uniform(module, 2, compressor=FP16)):
        session = PlanSession(way, in_trial=False)
        with launched(session):
            model = Net()
            optimizer = wrapped(model, compression=hvd.Compression.fp16)
            results.append(train(model, optimizer, rank))
        assert session.synchronizer is not None
        session.synchronizer.close()
    return all(map(torch.equal, *results))


def initialized_again(rank: int) -> list[Any]:
    """The sizes of two process sets after a plan, and the means in that of rank 1.

    One was given to init, and one was added. Rank 0 alone calls init once more.
    """
    session = PlanSession(lambda module: None, in_trial=False)
    with launched(session) as hvd:
        hvd.shutdown()
        given = hvd.ProcessSet([1])
        hvd.init(process_sets=[given])
        added = hvd.add_process_set([0])
        if rank == 0:
            hvd.init()
        model = Net()
        optimizer = wrapped(model, num_groups=2)
        assert session.synchronizer is not None
        for plan in (uniform(model, 2), None):
            session.synchronizer.load(plan)
            train(model, optimizer, rank, steps=1)
        alone = given if rank == 1 else added
        total = hvd.allreduce(torch.ones(1), process_set=alone).item()
        results = [given.size(), added.size(), total]
        session.synchronizer.close()
        hvd.barrier()  # the first rank that ends Horovod ends the process sets of all ranks
        hvd.shutdown()
    return results


def applied(rank: int) -> list[bool]:
    """Whether `autotune.apply` takes what steers an optimizer already; it refuses other modules."""
    session = PlanSession(lambda module: None, in_trial=False)
    with launched(session):
        model = Net()
        optimizer = wrapped(model)
        taken = autotune.apply(model, optimizer).synchronizer is session.synchronizer
        assert session.synchronizer is not None
        session.synchronizer.close()
        with pytest.raises(InvalidInput, match=r"got another Linear; pass that Net"):
            autotune.apply(model.a, optimizer)
    return [taken]


class Sometimes(nn.Module):
    """An embedding with sparse gradients that is not used in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 6, sparse=True), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        rows = self.embedding(torch.tensor([1, 3, 3])).sum() if used else 0.0
        return self.head(x) + rows


def sparse_on_one_rank(rank: int, grouped: bool = False) -> bool:
    """Whether a plan averages rows that only rank 0 has, as if rank 1 had sent zeros.

    `grouped`: the script has a group of the embedding and a parameter that all ranks use.
    """
    session = PlanSession(lambda module: uniform(module, 2), in_trial=False)
    with launched(session):
        model = Sometimes()
        before = model.embedding.weight.detach().clone()
        groups = [[model.embedding.weight, model.head.bias]] if grouped else None
        optimizer = wrapped(model, groups=groups)
        x = torch.ones(1, 6)
        model(x, used=rank == 0).sum().backward()
        optimizer.step()
    assert session.synchronizer is not None
    session.synchronizer.close()
    rows = torch.zeros(8, 6)
    rows[1], rows[3] = 2.0, 4.0  # two outputs
    return torch.equal(model.embedding.weight, before - 0.05 * rows / 2)


def unused_in_a_group(rank: int) -> bool:
    """Whether a plan trains a script whose groups have parameters that some ranks do not use as
    Horovod trains it without groups. With them Horovod itself stalls: the ranks enqueue different
    operations."""
    results = []
    plans: tuple[PlanOf, PlanOf] = (lambda module: None, lambda module: uniform(module, 2))
    for grouped, plan_of in enumerate(plans):
        session = PlanSession(plan_of, in_trial=False)
        with launched(session):
            torch.manual_seed(0)
            model = Branches()
            of_layers = [
                [model.left.weight, model.right.weight],
                [model.left.bias, model.idle.bias],
            ]
            optimizer = wrapped(model, groups=of_layers if grouped else None)
            for step in range(3):
                optimizer.zero_grad()
                x = torch.randn(5, 6, generator=seeded(10 * rank + step))
                model(x, left=rank == step % 2).square().mean().backward()
                optimizer.step()
        assert session.synchronizer is not None
        session.synchronizer.close()
        results.append([parameter.detach() for parameter in model.parameters()])
    return all(map(torch.equal, *results))


def refusals(rank: int) -> dict[str, str]:
    """The message of each script that cannot be tuned."""
    import horovod.torch as hvd

    def adasum() -> None:
        wrapped(Net(), op=hvd.Adasum)

    def part_of_a_module() -> None:
        model = Net()
        hvd.DistributedOptimizer(torch.optim.SGD([model.a.weight, model.c.bias], lr=0.1))

    def maximum() -> None:
        model = Net()
        wrapped(model, op=hvd.Max)
        assert session.synchronizer is not None
        session.synchronizer.load(uniform(model, 2))

    def different_plans() -> None:
        model = Net()
        wrapped(model)
        assert session.synchronizer is not None
        session.synchronizer.load(uniform(model, 2, groups=1 + rank))

    def elastic() -> None:
        hvd.elastic.run(print)

    def some_ranks() -> None:
        wrapped(Net(), process_set=hvd.add_process_set([0]))

    def join() -> None:
        train(model := Net(), wrapped(model), rank, steps=1)
        hvd.join()

    messages = {}
    of_plans = (adasum, part_of_a_module, maximum, different_plans, elastic, some_ranks, join)
    for script in (*of_plans, *REFUSED):
        session = PlanSession(lambda module: None, in_trial=False)
        with launched(session):
            try:
                script()
                messages[script.__name__] = "not refused"
            except AutotuneError as refusal:
                messages[script.__name__] = str(refusal)
    return messages


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    timeline = tmp_path_factory.mktemp("horovod") / "timeline.json"
    return run_world(check_all, 2, unclaimed_port("127.0.0.1"), str(timeline), timeout_s=500.0)


def test_every_script_sees_and_trains_what_its_own_horovod_gives(found) -> None:
    for rank, of_rank in enumerate(found):
        assert not of_rank["scripts"], f"rank {rank}: " + "\n".join(of_rank["scripts"])


def test_updates_cross_the_step_unless_they_are_coupled(found) -> None:
    crossing = {"plain", "summed", "accumulation", "copies", "two_optimizers", "own_group"}
    for of_rank in found:
        assert crossing <= of_rank["crossed"]
        assert not of_rank["crossed"] & {"clipping", "own_hooks"}


def test_every_message_is_one_operation_and_they_follow_the_plan(found) -> None:
    batches = found[0]["sent"]
    assert {len(batch) for batch in batches} == {1}
    messages = len(uniform(Net(), 2).messages)
    assert len(batches) == 3 * messages
    names = [batch[0] for batch in batches]
    assert names == names[:messages] * 3
    numbers = [int(name.split(".")[-1].split("_")[0]) for name in names[:messages]]
    assert numbers == sorted(numbers)


def test_groups_are_executed_by_themselves_with_and_without_a_plan(found) -> None:
    """Horovod cannot unset this, so no plan restarts it."""
    restarts, sizes = found[0]["groups"]
    of_script = [4, 4]
    assert sizes == [*of_script, *[1] * len(uniform(Net(), 2).messages), *of_script]
    assert restarts == 0


def test_fp16_gives_the_bits_of_horovods_own_compression(found) -> None:
    assert found[0]["fp16"] and found[1]["fp16"]


def test_a_second_init_of_one_rank_does_not_wait_and_plans_leave_process_sets_alone(found) -> None:
    for of_rank in found:
        assert of_rank["initialized again"] == [1, 1, 1.0]


def test_rows_of_one_rank_are_averaged_with_zeros(found) -> None:
    for of_rank in found:
        assert of_rank["sparse on one rank"] and of_rank["sparse on one rank, in a group"]


def test_a_parameter_of_a_group_may_be_unused_on_one_rank(found) -> None:
    assert all(of_rank["unused on one rank, in a group"] for of_rank in found)


def test_apply_leaves_a_script_to_its_launcher(found) -> None:
    assert found[0]["apply"] == found[1]["apply"] == [True]


def test_a_script_that_cannot_be_tuned_is_told_why(found) -> None:
    expected = {
        "adasum": "op=hvd.Adasum",
        "part_of_a_module": "Net has 8",
        "maximum": "op other than hvd.Average and hvd.Sum",
        "different_plans": "every rank must hold the same plan",
        "elastic": "elastic Horovod cannot be controlled",
        "some_ranks": "its process set has ranks 0 of 2; tune with only these ranks",
        "join": "drop the extra batches",
        **{script.__name__: part for script, part in REFUSED.items()},
    }
    for of_rank in found:
        assert of_rank["refusals"].keys() == expected.keys()
        for name, part in expected.items():
            assert part in of_rank["refusals"][name]
