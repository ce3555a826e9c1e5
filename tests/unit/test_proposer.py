"""What a job may propose: what its script refuses is not among it."""

from __future__ import annotations

import pytest

from autotune.cluster import Cluster
from autotune.events import Profiled
from autotune.history import History
from autotune.job import JobSpec, Search
from autotune.sampler.proposer import Proposer
from autotune.workload import Variable, Workload

MODEL = Workload("m", tuple(Variable(f"v{i}", (300, 200)) for i in range(12)), (), 0.1, 0.2)


@pytest.mark.parametrize(("refused", "across"), [("", True), ("gradients are clipped by their global norm", False)])
def test_no_strategy_crosses_steps_where_the_script_cannot(refused: str, across: bool) -> None:
    cluster = Cluster.local(4)
    spec = JobSpec(("torchrun", "train.py"), 4, cluster, search=Search.AUTOSYNC, samples_per_round=60)
    history = History((Profiled(MODEL, cluster, 1.0, {"torch": "2.13.0"}, refused),), 0.1)
    proposed = Proposer(spec, {}).propose(history, 0, 40)
    assert len(proposed.proposals) == 40
    assert any(proposal.strategy.cross_step for proposal in proposed.proposals) is across
