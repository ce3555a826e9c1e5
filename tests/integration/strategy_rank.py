"""Trains a hard job under torch's DDP and under every strategy of a case, and compares the results.

To repeat one strategy of a failure: `python tests/integration/strategy_rank.py RANKS CASE NUMBER`.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hard_jobs import JOBS, Job, sparse_names
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch_world import run_world

from autotune.cluster import Cluster, Host
from autotune.errors import AutotuneError, InvalidStrategy
from autotune.rng import generator
from autotune.sampler.random import sample_many
from autotune.strategy_space.builders.registry import BUILDERS
from autotune.strategy_space.enactable import refusal_reason
from autotune.strategy_space.moves.neighbours import mutate
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import (
    SPARSE_SYNCHRONIZERS,
    SparseHandling,
    Strategy,
    Synchronizer,
)
from autotune.workload import Workload
from runtime_rewriter.pytorch.agreement import assumed_workload
from runtime_rewriter.pytorch.attached import attach
from runtime_rewriter.pytorch.ddp import PlannedDataParallel
from runtime_rewriter.pytorch.hooks import GradientSynchronizer

SPACE = replace(
    SearchSpace.default(),
    sparse=tuple(SparseHandling),
    hierarchical=True,
    cross_step=True,
    min_partition_bytes=16,
    max_shards=5,
    max_groups=6,
)
"""All that the runtime enacts without loss, with bounds for models of this size."""
STEPS = 3
BUCKETS = {2: 2, 4: 8}
"""Bucket sizes of DDP besides its default, in equal ratios from a few elements to the model.

On 2 ranks, where all sizes must give the same bits, the smallest and the largest one.
"""
SPREAD_FACTOR = 3.0
"""How much further from DDP a strategy may be than DDP's bucket sizes from each other. The largest
seen is 1.3, since these sizes are few."""


def _hosts(*devices: int, rates: tuple[float, ...] = ()) -> Cluster:
    known = rates or (1.25e8,) * len(devices)
    hosts = (Host(f"h{i}", d, known[i], 5e-5, 2e9, 1e-5) for i, d in enumerate(devices))
    return Cluster("+".join(map(str, devices)), tuple(hosts))


CLUSTERS = {
    2: {"local": _hosts(2), "hosts": _hosts(1, 1)},
    4: {"hosts": _hosts(1, 1, 1, 1, rates=(1.25e8, 1.25e8, 1.25e8, 3e7)), "pairs": _hosts(2, 2)},
}

JOBS_AT = {
    2: {"hosts": "tied dtypes static sparse", "local": "clipped unused"},
    4: {"pairs": "tied dtypes unused sparse", "hosts": "clipped static"},
}
CASES = {
    size: [f"{place}/{job}" for place, jobs in places.items() for job in jobs.split()]
    for size, places in JOBS_AT.items()
}
COUNTS = {2: 21, 4: 7}
"""Sampled strategies per case; each is mutated once, and those of the builders are added."""


NORM_ROUNDOFF = 2e-6
"""Norms over parts of variables, and the factors of clipping by them, are rounded differently."""


@dataclass(frozen=True)
class RankOutcome:
    """One strategy on one rank.

    `failure`: empty on success; `digest`: of all state that ranks share.
    """

    number: int
    origin: str
    failure: str = ""
    digest: str = ""
    refused: str = ""
    kinds: frozenset[str] = field(default_factory=frozenset)


def variants(space: SearchSpace) -> tuple[SearchSpace, ...]:
    """The whole space, and subspaces that samples of the whole rarely reach."""
    return (
        space,
        replace(space, max_shards=1, max_groups=20),
        replace(space, max_groups=1, allow_uneven=False),
        *(replace(space, synchronizers=(kind,)) for kind in space.synchronizers),
    )


def strategies_of(
    case: str, module: nn.Module, cluster: Cluster, count: int
) -> Iterator[tuple[str, Strategy]]:
    """(origin, strategy) of every builder, of samples and of neighbours; the same on every rank."""
    workload = workload_of(module)
    seed = int.from_bytes(hashlib.sha256(case.encode()).digest()[:4])
    rng = generator(seed, "mutations")
    for name, build in BUILDERS.items():
        yield name, build(workload, cluster)
    spaces = variants(SPACE)
    for position, space in enumerate(spaces):
        share = -(-count // len(spaces))
        for strategy in sample_many(workload, cluster, space, share, seed + position):
            yield "sampled", varied(strategy, workload, cluster, rng)
            for _ in range(int(rng.integers(1, 5))):
                strategy = mutate(strategy, workload, cluster, SPACE, rng)
            yield "mutated", varied(strategy, workload, cluster, rng)


def varied(
    strategy: Strategy, workload: Workload, cluster: Cluster, rng: np.random.Generator
) -> Strategy:
    """Vary the ring order and the rows of sparse gradients, which the sampler never changes."""
    if rng.random() < 0.3:
        strategy = replace(strategy, ring_order=tuple(rng.permutation(cluster.world_size).tolist()))
    choices = []
    for choice in strategy.variables:
        kinds = {shard.synchronizer for shard in choice.shards}
        if workload.variables[workload.index[choice.variable]].sparse and rng.random() < 0.7:
            if kinds in ({Synchronizer.PARAMETER_SERVER}, {Synchronizer.DIRECT_EXCHANGE}):
                whole = tuple(replace(shard, pieces=1) for shard in choice.shards)
                choice = replace(choice, shards=whole, sparse=SparseHandling.GATHER_SCATTER)
            elif kinds <= set(SPARSE_SYNCHRONIZERS[SparseHandling.ALL_GATHER]):
                choice = replace(choice, sparse=SparseHandling.ALL_GATHER)
        choices.append(choice)
    return replace(strategy, variables=tuple(choices))


def workload_of(module: nn.Module, reads_norms: bool = False) -> Workload:
    """The workload with its sparse variables marked, as in a profile."""
    sparse = sparse_names(module)
    workload = assumed_workload(module)
    variables = (replace(v, sparse=v.name in sparse) for v in workload.variables)
    return replace(workload, variables=tuple(variables), reads_norms=reads_norms)


class RankTraining:
    """A job that can restart from the same state. `no_sync` is the wrapper's."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        inner: nn.Module,
        no_sync: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._job, self._model, self._inner, self._no_sync = job, model, inner, no_sync
        self._optimizers = job.optimizers(inner)
        self._schedules = [LambdaLR(used, lambda epoch: 0.7**epoch) for used in self._optimizers]
        parts: tuple[Any, ...] = (inner, *self._optimizers, *self._schedules)
        self._start = [(part, copy.deepcopy(part.state_dict())) for part in parts]

    def run(self, rank: int) -> dict[str, Tensor]:
        """The start state, `STEPS` steps, and the state they lead to."""
        for part, state in self._start:
            part.load_state_dict(copy.deepcopy(state))
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        batch = 0
        for step in range(STEPS):
            torch.manual_seed(10 * step + rank)
            for _ in range(self._job.micro_batches - 1):
                with self._no_sync():
                    self._job.loss(self._model, rank, batch).backward()
                batch += 1
            self._job.loss(self._model, rank, batch).backward()
            batch += 1
            if self._job.clip is not None:
                torch.nn.utils.clip_grad_norm_(self._inner.parameters(), self._job.clip)
            for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=step != 1)
        return self._state()

    def _state(self) -> dict[str, Tensor]:
        """Parameters, buffers and what the optimizers keep of them, by name."""
        names: dict[Tensor, str] = {p: name for name, p in self._inner.named_parameters()}
        state = {f"parameter {name}": p.detach().clone() for p, name in names.items()}
        state |= {f"buffer {name}": buffer.clone() for name, buffer in self._inner.named_buffers()}
        for optimizer in self._optimizers:
            for parameter, saved in optimizer.state.items():
                for key, value in saved.items():
                    if value is not None:
                        dense = torch.as_tensor(value).to_dense()
                        state[f"{key} of {names[parameter]}"] = dense.clone()
        return state


class Switch:
    """Loads a plan as the tuner's session does: in the first forward pass after a step."""

    def __init__(self, synchronizer: GradientSynchronizer) -> None:
        self._synchronizer = synchronizer
        self._pending: list[Plan | None] = []
        synchronizer.listeners.append(self)

    def next_is(self, wanted: Plan | None) -> None:
        self._pending = [wanted]

    def on_boundary(self, now_s: float, clean: bool) -> None:
        if self._pending:
            self._synchronizer.load(self._pending.pop())

    def on_backward_end(self) -> None:
        pass


def built(job: Job) -> nn.Module:
    torch.manual_seed(7)
    return job.build()


def check_case(rank: int, case: str, only: int | None = None) -> list[RankOutcome]:
    """Every strategy of a case, or only one of them."""
    size = dist.get_world_size()
    place, job = case.split("/")[0], JOBS[case.split("/")[1]]
    cluster = CLUSTERS[size][place]
    devices = cluster.hosts[cluster.host_of_rank[rank]].devices
    os.environ |= {"LOCAL_RANK": str(rank % devices), "LOCAL_WORLD_SIZE": str(devices)}
    truth, allowed = truth_and_tolerance(job, rank)
    inner = built(job)
    wanted: dict[str, tuple[str, Strategy | None, Plan | None]] = {}
    for origin, strategy in strategies_of(case, inner, cluster, COUNTS[size]):
        case_plan = plan(strategy, workload_of(inner, reads_norms=job.clip is not None), size)
        wanted.setdefault(case_plan.id, (origin, strategy, case_plan))
    numbered = [(number, *entry) for number, entry in enumerate(wanted.values())]
    chosen = numbered if only is None else numbered[only : only + 1]
    enactable = [entry for entry in chosen if refusal_reason(entry[3]) is None]
    if job.attached:
        synchronizer = attach(inner, enactable[0][3], **job.wrapping)
        training = RankTraining(job, inner, inner, synchronizer.no_sync)
    else:
        model = PlannedDataParallel(inner, **job.wrapping)
        synchronizer = model.synchronizer
        training = RankTraining(job, model, inner, model.no_sync)
        chosen.append((len(wanted), "without a plan", None, None))
    switch = Switch(synchronizer)
    training.run(rank)  # from here on there is a step before each plan
    outcomes = []
    for number, origin, strategy, case_plan in chosen:
        reason = refusal_reason(case_plan) if case_plan is not None else None
        if case_plan is not None and case_plan.direct:
            reason = reason or synchronizer.direct_refused or None
        if case_plan is not None and case_plan.cross_step:
            norms = case_plan.results is not None
            reason = reason or synchronizer.cross_step.conditions.refusal_reason(norms)
        if reason is not None:
            failure = refusal_failure(synchronizer, case_plan, reason)
            outcomes.append(RankOutcome(number, origin, failure, refused=reason))
            continue
        switch.next_is(case_plan)
        repeat = command_to_repeat(size, case, number, origin, strategy)
        try:
            state = training.run(rank)
        except AutotuneError as error:
            raise AssertionError(f"{repeat}\n{error}") from error
        assert synchronizer.plan is case_plan
        tolerance = allowed
        if case_plan is not None and case_plan.results is not None:
            tolerance = {dtype: max(most, NORM_ROUNDOFF) for dtype, most in allowed.items()}
        failure = difference(state, truth, tolerance)
        failure = failure and f"{repeat}\n{failure}"
        outcomes.append(
            RankOutcome(number, origin, failure, digest(state), "", kinds_of(case_plan))
        )
    synchronizer.close()
    return outcomes


def refusal_failure(synchronizer: GradientSynchronizer, refused: Plan, reason: str) -> str:
    """Check that loading refuses a plan with the same reason as before, and changes nothing."""
    before = synchronizer.plan
    try:
        synchronizer.load(refused)
    except InvalidStrategy as error:
        as_before = reason in str(error) and synchronizer.plan is before
        return "" if as_before else f"refused with {error}, but expected {reason}"
    return f"loaded, although it cannot be enacted: {reason}"


def truth_and_tolerance(job: Job, rank: int) -> tuple[dict[str, Tensor], dict[torch.dtype, float]]:
    """The result of torch's own DDP, and by dtype the tolerance that its bucket sizes derive.

    Tolerances are relative to each tensor's largest value.
    """
    count = BUCKETS[dist.get_world_size()]
    buckets_mb = np.geomspace(16, assumed_workload(built(job)).grad_bytes, count) / 2**20
    runs = []
    for bucket_mb in (None, *buckets_mb.tolist()):
        inner = built(job)
        model = DistributedDataParallel(inner, bucket_cap_mb=bucket_mb, **job.wrapping)
        training = RankTraining(job, model, inner, model.no_sync)
        training.run(rank)  # DDP cuts its buckets once it has seen the order of the gradients
        runs.append(training.run(rank))
    spread: dict[torch.dtype, float] = {}
    for a, b in combinations(runs, 2):
        for name in a:
            spread[a[name].dtype] = max(spread.get(a[name].dtype, 0.0), distance(a[name], b[name]))
    if dist.get_world_size() == 2:
        assert not any(spread.values()), "two ranks have one order of sums only"
    elif dist.get_backend() == "nccl":
        # It sums in one order whatever the bucket, and in another to reduce and scatter. Wider
        # values derive from those of single precision, too.
        for dtype in (dtype for dtype in spread if dtype.is_floating_point):
            roundoffs = (torch.finfo(torch.float32).eps, torch.finfo(dtype).eps)
            spread[dtype] = max(spread[dtype], *roundoffs)
    assert all(bool(torch.isfinite(value).all()) for value in runs[0].values())
    return runs[0], {dtype: SPREAD_FACTOR * value for dtype, value in spread.items()}


def distance(a: Tensor, b: Tensor) -> float:
    """0 for equal bits; else the largest difference over the largest value of `b`."""
    if torch.equal(bits(a), bits(b)):
        return 0.0
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    largest = max(float(b.double().abs().amax()), 1e-30)
    apart = float((a.double() - b.double()).abs().amax()) / largest
    return apart or sys.float_info.min  # zeros of another sign


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def difference(
    gradients: dict[str, Tensor], truth: dict[str, Tensor], allowed: dict[torch.dtype, float]
) -> str:
    if gradients.keys() != truth.keys():
        return f"only one side has {', '.join(sorted(gradients.keys() ^ truth.keys()))}"
    worst = []
    for name, right in truth.items():
        apart = distance(gradients[name], right)
        if not apart <= allowed[right.dtype]:
            worst.append(f"  {name}: {apart:.3g}, allowed {allowed[right.dtype]:.3g}")
    title = "relative to the largest value the result differs from DDP's by"
    return "\n".join([title, *worst]) if worst else ""


def digest(tensors: dict[str, Tensor]) -> str:
    """A hash of all but the buffers, which DDP lets differ between ranks."""
    hashed = hashlib.sha256()
    for name, value in sorted(tensors.items()):  # updates that cross the step come in any order
        if not name.startswith("buffer "):
            hashed.update(bits(value).cpu().numpy().tobytes())
    return hashed.hexdigest()


def kinds_of(enacted: Plan | None) -> frozenset[str]:
    """The features of a plan, for the test to check that all occurred."""
    if enacted is None:
        return frozenset({"without a plan"})
    kinds = {str(message.synchronizer) for message in enacted.messages}
    kinds |= {f"sparse {message.sparse}" for message in enacted.messages}
    axes = [part.axis for message in enacted.messages for part in message.slices]
    conditions = {
        "cut": any(axis is not None for axis in axes),
        "cut along a later axis": any(axes),
        "merged": any(len(message.slices) > 1 for message in enacted.messages),
        "mixed": len({message.synchronizer for message in enacted.messages}) > 1,
        "hierarchical": any(message.hierarchical for message in enacted.messages),
        "across steps": enacted.cross_step,
        "two in flight": enacted.in_flight == 2,
        "ring order": enacted.ring_order is not None,
    }
    return frozenset(kinds | {name for name, holds in conditions.items() if holds})


def command_to_repeat(
    size: int, case: str, number: int, origin: str, strategy: Strategy | None
) -> str:
    shown = strategy.to_json() if strategy is not None else "no plan"
    return f"python tests/integration/strategy_rank.py {size} {case} {number}\n{origin}: {shown}"


def check_cases(rank: int) -> dict[str, list[RankOutcome]]:
    """Run all cases of a world size in one world, since processes start slowly."""
    gc.freeze()  # those between the cases visit no imports
    outcomes = {}
    for case in CASES[dist.get_world_size()]:
        outcomes[case] = check_case(rank, case)
        gc.collect()  # until then threads of gloo's closed process groups wake up every 10 ms
    return outcomes


def enacted_alike(by_rank: list[dict[str, list[RankOutcome]]]) -> list[RankOutcome]:
    """Check that all ranks match DDP and each other; return rank 0's outcomes without refusals."""
    enacted: list[RankOutcome] = []
    for case, outcomes in by_rank[0].items():
        for number, outcome in enumerate(outcomes):
            everywhere = [ranks[case][number] for ranks in by_rank]
            failures = [result.failure for result in everywhere if result.failure]
            assert not failures, failures[0]
            assert len({result.digest for result in everywhere}) == 1, (
                f"ranks differ after {case} {outcome.number}: {outcome.origin}"
            )
        enacted += [outcome for outcome in outcomes if not outcome.refused]
    return enacted


def main(size: str, case: str, number: str | None = None) -> None:
    """One strategy with no other before it, or a whole case."""
    only = int(number) if number else None
    for outcome in run_world(check_case, int(size), case, only, timeout_s=240.0)[0]:
        result = outcome.failure or outcome.refused or "as DDP"
        print(f"{outcome.number}: {result} ({outcome.origin})")


if __name__ == "__main__":
    main(*sys.argv[1:])
