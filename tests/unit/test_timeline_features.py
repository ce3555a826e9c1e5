"""Features of replayed steps."""

from __future__ import annotations

import math
from dataclasses import replace

from small_worlds import cluster, model

from autotune.features.extract import Extractor
from autotune.strategy_space.plan import PlannedStrategy
from autotune.strategy_space.strategy import (
    Shard,
    SparseHandling,
    Strategy,
    Synchronizer,
    VariableStrategy,
)
from autotune.workload import Variable

TABLE = Variable("table", (100_000, 64), sparse=True, touched_rows=10)  # 25.6 MB, rows of 2.6 KB


def small_messages(sparse: SparseHandling) -> float:
    workload = model(TABLE, 250, (1000, 1000), forward_s=0.01, backward_s=0.02)
    alone = (Shard(Synchronizer.ALL_REDUCE),)
    table, *others = (VariableStrategy(variable.name, alone) for variable in workload.variables)
    strategy = Strategy((replace(table, sparse=sparse), *others))
    planned = PlannedStrategy.of(strategy, workload, 2)
    extractor = Extractor(workload, cluster(1e9, 1e9))
    timeline = extractor.described(extractor.features(planned), planned.plan).timeline
    assert timeline is not None
    return timeline.small_messages


def test_a_few_rows_of_a_large_table_are_a_small_message() -> None:
    assert small_messages(SparseHandling.DENSE) == math.log1p(1)
    assert small_messages(SparseHandling.ALL_GATHER) == math.log1p(2)
