"""An export without measurements."""

from __future__ import annotations

from typing import Any

from autotune.cluster import Cluster
from autotune.export import Export
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload


def bare_export(workload: Workload, strategy: Strategy, world_size: int, **more: Any) -> Export:
    """An export of `strategy` with the fields `more`; it compares and predicts nothing."""
    return Export(
        job_id="job",
        created_at="2026-01-01T00:00:00+00:00",
        model=workload.model,
        variables=workload.variables,
        world_size=world_size,
        strategy=strategy,
        lossy=False,
        reason="chosen",
        comparison=None,
        tuned=None,
        current=None,
        predicted_s=None,
        cluster=Cluster.local(world_size),
        software={},
        **more,
    )
