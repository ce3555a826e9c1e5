"""Half of an exchange crosses the step of scripts that clip by the global norm or scale losses.

Every script runs under torch's DDP, too. It must see the same norms and get the same parameters.
"""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ddp_pair import gradients, pair
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch_plans import Tied, loss_of, mixed, taken_in_when_read, uniform
from torch_world import DEVICE, on_ranks, seeded

from autotune.errors import InvalidStrategy
from autotune.strategy_space.plan import Plan
from autotune.strategy_space.strategy import Compressor, Synchronizer
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.profile import WorkloadProfiler
from runtime_rewriter.pytorch.reads import is_watched
from runtime_rewriter.pytorch.under_way import MessagesUnderWay

STEPS = 6
CLIP = 0.05


def clipping(within: Plan) -> Plan:
    """The plan with half of each exchange across the step, results in reverse order."""
    count = len(within.messages)
    return replace(within, cross_step=True, results=tuple(reversed(range(count))))


def whole(module: nn.Module, world_size: int) -> Plan:
    """Every variable is owned whole by one rank."""
    return clipping(uniform(module, world_size, Synchronizer.REDUCE_BROADCAST))


def scattered(module: nn.Module, world_size: int) -> Plan:
    """Every rank owns a part of each message, so variables are owned in parts."""
    kind = Synchronizer.REDUCE_SCATTER_ALL_GATHER
    return clipping(uniform(module, world_size, kind, partitioned=True))


def casts(module: nn.Module, world_size: int) -> Plan:
    kind = Synchronizer.PARAMETER_SERVER
    return clipping(uniform(module, world_size, kind, Compressor.FP16))


def direct(module: nn.Module, world_size: int) -> Plan:
    """Unequal shares, in pieces, of which two are in flight."""
    within = uniform(module, world_size, Synchronizer.DIRECT_EXCHANGE)
    shares = tuple(2.0 * (rank + 1) / (world_size * (world_size + 1)) for rank in range(world_size))
    messages = tuple(replace(message, shares=shares, pieces=2) for message in within.messages)
    return clipping(replace(within, messages=messages, in_flight=2))


PLANS: dict[str, Callable[[nn.Module, int], Plan]] = {
    "whole": whole,
    "mixed": lambda module, size: clipping(mixed(module, size)),
    "scattered": scattered,
    "direct": direct,
    "served": lambda module, size: clipping(uniform(module, size, Synchronizer.PARAMETER_SERVER)),
}
BITWISE = ("whole", "served")
"""Plans under which every norm has the bits of torch's on two ranks."""


@dataclass
class Run:
    """One training: what the script saw, and whether its updates crossed the step."""

    model: Any
    rank: int
    seen: list[Any] = field(default_factory=list)
    crossed: bool = False

    def sgd(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def loss(self, step: int) -> Tensor:
        torch.manual_seed(10 * step + self.rank)
        return loss_of(self.model, self.rank, step)

    def see(self, value: Any) -> None:
        self.seen.append(torch.as_tensor(value).detach().clone())

    def stepped(self) -> None:
        """Note whether updates are due; reads nothing."""
        self.crossed |= any(is_watched(parameter) for parameter in self.model.parameters())


Script = Callable[[Run], None]


def clips(run: Run) -> None:
    optimizer = run.sgd()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step).backward()
        run.see(clip_grad_norm_(run.model.parameters(), CLIP))
        optimizer.step()
        run.stepped()


def clips_in_two_calls(run: Run) -> None:
    # The gradient of a bias before BatchNorm is rounding alone; a small eps would amplify it.
    optimizer = torch.optim.AdamW(run.model.parameters(), 0.01, eps=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step).backward()
        norm = get_total_norm(gradients(run.model))
        clip_grads_with_norm_(run.model.parameters(), CLIP, norm)
        run.see(norm)
        optimizer.step()
        run.stepped()


def clips_a_part(run: Run) -> None:
    """The other gradients are left as they are."""
    optimizer = run.sgd()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step).backward()
        run.see(clip_grad_norm_(list(run.model.parameters())[:3], CLIP))
        optimizer.step()
        run.stepped()


def scales(run: Run) -> None:
    optimizer = run.sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(run.loss(step)).backward()
        scaler.step(optimizer)
        scaler.update()
        run.see(scaler.get_scale())
        run.stepped()


def scales_and_clips(run: Run, init_scale: float = 1024.0, overflow_at: int | None = None) -> None:
    optimizer = run.sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = scaler.scale(run.loss(step))
        if step == overflow_at and run.rank == 1:
            loss = loss * float("inf")
        loss.backward()
        scaler.unscale_(optimizer)
        run.see(clip_grad_norm_(run.model.parameters(), CLIP))
        if step == overflow_at:
            before = [parameter.detach().clone() for parameter in run.model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        run.see(scaler.get_scale())
        run.stepped()
        if step == overflow_at:
            after = [parameter.detach() for parameter in run.model.parameters()]
            run.see(all(map(torch.equal, before, after)))  # the update was skipped


def overflows(run: Run) -> None:
    scales_and_clips(run, overflow_at=3)


def scales_by_an_odd_number(run: Run) -> None:
    scales_and_clips(run, init_scale=1000.0)


SCRIPTS: dict[str, Script] = {
    "clips": clips,
    "clips in two calls": clips_in_two_calls,
    "clips a part": clips_a_part,
    "scales": scales,
    "scales and clips": scales_and_clips,
    "overflows": overflows,
    "scales by an odd number": scales_by_an_odd_number,
}


@contextmanager
def early_messages() -> Iterator[None]:
    """What can arrive has arrived whenever this rank looks."""
    own = MessagesUnderWay.next_arrived

    def arrived(self: MessagesUnderWay) -> bool:
        time.sleep(0.02)
        return own(self)

    MessagesUnderWay.next_arrived = arrived  # type: ignore[method-assign]
    try:
        yield
    finally:
        MessagesUnderWay.next_arrived = own  # type: ignore[method-assign]


def trained(model: Any, rank: int, script: Script) -> Run:
    run = Run(model, rank)
    with taken_in_when_read():
        script(run)
    return run


def run_own(rank: int, script: Script) -> Run:
    """The script under torch's DDP."""
    torch.manual_seed(0)
    return trained(DistributedDataParallel(Tied()), rank, script)


def run_planned(
    rank: int, size: int, script: Script, build: Callable[[nn.Module, int], Plan]
) -> Run:
    torch.manual_seed(0)
    model = PlannedDataParallel(Tied())
    model.synchronizer.load(build(model.module, size))
    return trained(model, rank, script)


def run_both(
    rank: int, size: int, script: Script, build: Callable[[nn.Module, int], Plan]
) -> tuple[Run, Run]:
    return run_own(rank, script), run_planned(rank, size, script, build)


def check_run(mine: Run, theirs: Run, bitwise: bool, case: object = "") -> bool:
    """Compare what both runs see, and their parameters; return whether updates crossed."""
    tolerance: Any = {"rtol": 0.0, "atol": 0.0} if bitwise else {"rtol": 1e-5, "atol": 1e-6}
    tolerance["msg"] = lambda message: f"{case}: {message}"
    torch.testing.assert_close(mine.seen, theirs.seen, equal_nan=True, **tolerance)
    torch.testing.assert_close(mine.model.state_dict(), theirs.model.state_dict(), **tolerance)
    mine.model.synchronizer.close()
    return mine.crossed


@on_ranks(2, each=SCRIPTS)
def test_scripts_see_the_norms_and_parameters_of_ddp_on_two_ranks(rank: int, name: str) -> None:
    """Bit for bit where variables are owned whole; else to 1e-5, by the order of the reduction."""
    script = SCRIPTS[name]
    theirs = run_own(rank, script)
    for kind, build in PLANS.items():
        mine = run_planned(rank, 2, script, build)
        crossed = check_run(mine, theirs, kind in BITWISE, kind)
        # Only a power of two commutes with the norm; other factors wait for the averages.
        assert crossed == (script is not scales_by_an_odd_number), kind


@on_ranks(2)
def test_scripts_whose_gradients_are_views_of_buckets_cross_the_step(rank: int) -> None:
    """A profile has seen their steps under torch's own buckets."""
    for script in (clips, scales_and_clips):
        torch.manual_seed(0)
        theirs, mine = pair(Tied(), gradient_as_bucket_view=True)
        runs = (Run(theirs, rank), Run(mine, rank))
        for run in runs:
            script(run)
        mine.synchronizer.load(whole(mine.module, 2))
        for run in runs:
            with taken_in_when_read():
                script(run)
        # On a GPU a norm's order of additions depends on where in its bucket a gradient begins.
        exact: dict[str, Any] = {"rtol": 0, "atol": 0} if DEVICE == "cpu" else {}
        torch.testing.assert_close(runs[1].seen, runs[0].seen, **exact)
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), **exact)
        assert runs[1].crossed
        mine.synchronizer.close()


@on_ranks(4, each=("mixed", "direct", "hierarchical"))
def test_all_ranks_see_the_same_norms(rank: int, kind: str) -> None:
    """Their parameters have the same bits, and those of DDP to 1e-5."""
    build = PLANS.get(kind, hierarchical)
    on_two_hosts = {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    with patch.dict(os.environ, on_two_hosts):
        for script in (clips, scales_and_clips):
            theirs, mine = run_both(rank, 4, script, build)
            assert mine.crossed
            tolerance: Any = {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(mine.seen, theirs.seen, **tolerance)
            own = [parameter.detach() for parameter in mine.model.parameters()]
            others = [parameter.detach() for parameter in theirs.model.parameters()]
            torch.testing.assert_close(own, others, **tolerance)
            for tensor in (*mine.seen, *own):
                of_first = tensor.clone()
                dist.broadcast(of_first, src=0)
                assert torch.equal(tensor, of_first)
            mine.model.synchronizer.close()


def cut_all_reduces(module: nn.Module, world_size: int) -> Plan:
    """Sums without owners, which may arrive before the backward pass ends."""
    return clipping(uniform(module, world_size, Synchronizer.ALL_REDUCE, partitioned=True))


def clips_beside_a_checkpoint(run: Run) -> None:
    """Rank 0 alone holds other tensors on the memory of its parameters, so it defers no update."""
    kept = run.model.state_dict() if run.rank == 0 else {}
    clips(run)
    assert bool(kept) == (run.rank == 0)


@on_ranks(2, each=(cut_all_reduces, scattered, direct))
def test_norms_are_the_same_on_a_rank_on_which_the_averages_have_arrived(
    rank: int, build: Callable[[nn.Module, int], Plan]
) -> None:
    for script in (clips, scales_and_clips, clips_beside_a_checkpoint):
        torch.manual_seed(0)
        model = PlannedDataParallel(Tied())
        model.synchronizer.load(build(model.module, 2))
        run = Run(model, rank)
        with early_messages() if rank == 0 else taken_in_when_read():
            script(run)
        assert_same_on_all_ranks(run.seen, model)
        model.synchronizer.close()


def assert_same_on_all_ranks(norms: list[Tensor], model: nn.Module) -> None:
    for tensor in (*norms, *(parameter.detach() for parameter in model.parameters())):
        of_first = tensor.clone()
        dist.broadcast(of_first, src=0)
        assert torch.equal(tensor, of_first)


def hierarchical(module: nn.Module, world_size: int) -> Plan:
    within = mixed(module, world_size)
    messages = tuple(replace(message, hierarchical=True) for message in within.messages)
    return clipping(replace(within, messages=messages))


def inf_norm(run: Run) -> None:
    clip_grad_norm_(run.model.parameters(), CLIP, norm_type=float("inf"))


def by_value(run: Run) -> None:
    clip_grad_value_(run.model.parameters(), 0.01)


def by_hand(run: Run) -> None:
    for gradient in gradients(run.model):
        gradient /= 2.0


def logged(run: Run) -> None:
    run.see(sum(gradient.abs().sum() for gradient in gradients(run.model)))


REFUSED = {"norm of another order": inf_norm, "value": by_value, "hand": by_hand, "log": logged}


@on_ranks(2, each=REFUSED)
def test_other_readers_of_gradients_are_refused_and_see_the_bits_of_ddp(
    rank: int, kind: str
) -> None:
    def script(run: Run) -> None:
        optimizer = run.sgd()
        for step in range(STEPS):
            optimizer.zero_grad()
            run.loss(step).backward()
            REFUSED[kind](run)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r".*between backward\(\) and step\(\)")
                optimizer.step()
            run.stepped()

    theirs, mine = run_both(rank, 2, script, whole)
    torch.testing.assert_close(mine.seen, theirs.seen, rtol=0, atol=0)
    torch.testing.assert_close(mine.model.state_dict(), theirs.model.state_dict(), rtol=0, atol=0)
    assert not mine.crossed
    for views in (False, True):
        untuned = Run(PlannedDataParallel(Tied(), gradient_as_bucket_view=views), rank)
        script(untuned)
        with pytest.raises(InvalidStrategy, match=r"between backward\(\) and step\(\)"):
            untuned.model.synchronizer.load(whole(untuned.model.module, 2))


def read_on_one_rank(run: Run) -> None:
    """Rank 0 alone reads a gradient now and then, before all ranks clip."""
    optimizer = run.sgd()
    for step in range(8):
        optimizer.zero_grad()
        run.loss(step).backward()
        if step % 3 == 2 and run.rank == 0:
            run.see(gradients(run.model)[step % 4].abs().max())
        run.see(clip_grad_norm_(run.model.parameters(), CLIP))
        optimizer.step()
        run.stepped()


def clips_now_and_then(run: Run) -> None:
    """Rank 1 also takes a norm of its own after it has clipped, and after the step."""
    optimizer = run.sgd()
    for step in range(8):
        optimizer.zero_grad()
        run.loss(step).backward()
        if step < 3 or step % 2:
            run.see(clip_grad_norm_(run.model.parameters(), CLIP))
        if step == 5 and run.rank == 1:
            run.see(get_total_norm(gradients(run.model)))
        optimizer.step()
        if step == 6 and run.rank == 1:
            run.see(get_total_norm(gradients(run.model)))
            clip_grad_norm_(run.model.parameters(), CLIP / 2)
        run.stepped()


@on_ranks(2, each=(read_on_one_rank, clips_now_and_then))
def test_ranks_need_not_read_the_same(rank: int, script: Script) -> None:
    """Norms are sent in every step, so no rank waits for a call of another."""
    theirs, mine = run_both(rank, 2, script, whole)
    assert check_run(mine, theirs, bitwise=True)


def read_twice_on_one_rank(run: Run) -> None:
    """Rank 0 alone reads all gradients, copies and prints them before all ranks clip."""
    clips_after(run, lambda step: run.rank == 0 and step > 3)


def read_first_on_one_rank(run: Run) -> None:
    """So no update of rank 0 crosses the step, and rank 1 waits for the averages to clip."""
    clips_after(run, lambda step: run.rank == 0 and step < 4)


def clips_after(run: Run, reads: Callable[[int], bool]) -> None:
    optimizer = run.sgd()
    for step in range(8):
        optimizer.zero_grad()
        run.loss(step).backward()
        if reads(step):
            for gradient in gradients(run.model):
                assert torch.equal(copy.deepcopy(gradient), gradient.detach())
                assert repr(gradient).startswith("tensor(")
        run.see(clip_grad_norm_(run.model.parameters(), CLIP))
        optimizer.step()
        run.stepped()


class UsedOnRankZero(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.shared, self.extra = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.shared(x)
        return self.extra(hidden) if self.rank == 0 else hidden


def clips_an_unused_variable(run: Run) -> None:
    optimizer = run.sgd()
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 64, generator=seeded(10 * step + run.rank))
        run.model(x).square().mean().backward()
        run.see(clip_grad_norm_(run.model.parameters(), CLIP))
        optimizer.step()
        run.stepped()


@pytest.mark.slow
@on_ranks(2, each=(scattered, direct))
def test_ranks_scale_by_the_same_norms_whatever_they_read_or_use(
    rank: int, build: Callable[[nn.Module, int], Plan]
) -> None:
    """Of variables in parts, whose norms differ from torch's in the last bits."""
    crossed = {}
    for script in (read_on_one_rank, read_twice_on_one_rank, read_first_on_one_rank):
        torch.manual_seed(0)
        run = Run(PlannedDataParallel(Tied()), rank)
        run.model.synchronizer.load(build(run.model.module, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            script(run)
        norms = run.seen if script is not read_on_one_rank else []
        assert_same_on_all_ranks(norms, run.model)
        crossed[script] = run.crossed
        run.model.synchronizer.close()
    assert crossed[read_twice_on_one_rank]
    assert not crossed[read_first_on_one_rank]
    torch.manual_seed(0)
    run = Run(PlannedDataParallel(UsedOnRankZero(rank), find_unused_parameters=True), rank)
    run.model.synchronizer.load(build(run.model.module, 2))
    clips_an_unused_variable(run)
    assert_same_on_all_ranks(run.seen, run.model)
    run.model.synchronizer.close()


@on_ranks(2, each=("int8", "fp16", "top_k"))
def test_compressed_gradients_have_the_norms_of_the_same_plan_within_the_step(
    rank: int, name: str
) -> None:
    """Sums that are compressed again are complete only at their end, before the norms."""
    runs = []
    for kind in (Synchronizer.PARAMETER_SERVER, Synchronizer.REDUCE_SCATTER_ALL_GATHER):
        for crossing in (False, True):
            torch.manual_seed(0)
            model = PlannedDataParallel(Tied())
            within = uniform(model.module, 2, kind, Compressor(name))
            model.synchronizer.load(clipping(within) if crossing else within)
            runs.append(Run(model, rank))
            with taken_in_when_read():
                clips(runs[-1])
    for within_step, across in (runs[:2], runs[2:]):
        assert across.crossed and not within_step.crossed
        torch.testing.assert_close(across.seen, within_step.seen, rtol=1e-5, atol=1e-6)
        states = (across.model.state_dict(), within_step.model.state_dict())
        torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_fused_optimizer_that_unscales_is_refused(rank: int) -> None:
    def script(run: Run) -> None:
        optimizer = torch.optim.SGD(run.model.parameters(), 0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(run.loss(step)).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                scaler.step(optimizer)
            scaler.update()
            run.stepped()

    theirs, mine = run_both(rank, 2, script, whole)
    torch.testing.assert_close(mine.model.state_dict(), theirs.model.state_dict(), rtol=0, atol=0)
    assert not mine.crossed
    with pytest.raises(InvalidStrategy, match="itself unscales gradients"):
        mine.model.synchronizer.load(whole(mine.model.module, 2))


@on_ranks(2, each=(False, True))
def test_a_profile_names_scripts_that_read_norms(rank: int, views: bool) -> None:
    """Norms and scaling are not reads that would wait for variables.

    Views of DDP's buckets have one counter of versions.
    """
    reading = {clips: True, scales: True, scales_and_clips: True, plain: False}
    for script, reads_norms in reading.items():
        torch.manual_seed(0)
        run = Run(PlannedDataParallel(Tied(), gradient_as_bucket_view=views), rank)
        profiler = WorkloadProfiler(run.model.synchronizer, steps=2)
        script(run)
        workload = profiler.finish()
        assert workload.reads_norms is reads_norms
        assert workload.script_reads == 0
        limits = run.model.synchronizer.cross_step.conditions.limits()
        assert limits == ("", reads_norms), limits


def plain(run: Run) -> None:
    optimizer = run.sgd()
    for step in range(STEPS):
        optimizer.zero_grad()
        run.loss(step).backward()
        optimizer.step()
