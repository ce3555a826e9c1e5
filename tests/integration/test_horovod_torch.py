"""Horovod scripts see and train the same under a plan as under their own Horovod."""

from __future__ import annotations

import copy
import os
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_scripts.horovod import HOROVOD_SCRIPTS
from test_odd_scripts import detached
from torch import nn
from torch_plans import mixed, uniform
from torch_world import run_world

from autotune.errors import AutotuneError
from autotune.strategy_space.plan import Plan
from runtime_rewriter.horovod.torch_scripts import horovod_steered
from runtime_rewriter.pytorch.exchange.ranks import Timeouts
from runtime_rewriter.pytorch.hooks import GradientSynchronizer

pytest.importorskip("horovod", reason="`make horovod` builds it")

WAITS = Timeouts(30.0, 20.0)
TRIAL_STEP = 3
PlanOf = Callable[[nn.Module], Plan]


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
    "by Horovod": (lambda module: uniform(module, 2), False),
    "by Horovod in a trial": (lambda module: uniform(module, 2, partitioned=True), True),
    "in all ways": (lambda module: mixed(module, 2), False),
}


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
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_scripts(rank: int, port: int, names: list[str]) -> dict[str, str]:
    """What differs, or was refused, by script and way."""
    as_launched(rank, port)
    problems: dict[str, str] = {}
    for name in names:
        own = HorovodRun(rank)
        session = PlanSession(WAYS["by Horovod"][0], in_trial=True)
        with horovod_steered(session, WAITS, tuned=True):
            import horovod.torch as hvd

            hvd.init()
        torch.manual_seed(0)
        HOROVOD_SCRIPTS[name](own)
        for way, (plan_of, in_trial) in WAYS.items():
            run = HorovodRun(rank)
            session = PlanSession(plan_of, in_trial)
            with horovod_steered(session, WAITS, tuned=True):
                hvd.init()
                torch.manual_seed(0)
                try:
                    HOROVOD_SCRIPTS[name](run)
                    torch.testing.assert_close(run.seen, own.seen, rtol=0, atol=0)
                except (AutotuneError, AssertionError) as problem:
                    problems[f"{name}, {way}"] = f"{type(problem).__name__}: {problem}"
            assert session.synchronizer is not None
            session.synchronizer.close()
    return problems


def test_every_script_sees_and_trains_what_its_own_horovod_gives() -> None:
    names = list(HOROVOD_SCRIPTS)
    for rank, problems in enumerate(run_world(check_scripts, 2, free_port(), names)):
        assert not problems, f"rank {rank}: " + "\n".join(
            f"{what}: {problem}" for what, problem in problems.items()
        )
