"""The features of one strategy on one workload and cluster: the input of every simulator.

| symbol | meaning |
|---|---|
| S | shards, ordered by backward position of their variable, then along the partition axis |
| V | variables, in backward order |
| F | raw features of a shard (`RAW_FEATURES`) |
| E | edges between variables |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from autotune.arrays import Float32Array, FloatArray, IntArray
from autotune.cluster import Cluster
from autotune.costs.row_traffic import RowTraffic
from autotune.costs.sync_cost import Rates, message_costs
from autotune.features.compute_cost import overlap_step_s, paper_step_s, taken_share
from autotune.features.flat import flatten
from autotune.features.raw import RAW_FEATURES, shard_rows
from autotune.features.timeline import TimelineFeatures, timeline_features
from autotune.lowering.message_cpu import message_cpu_s
from autotune.records import Accelerators
from autotune.strategy_space.op_fusion import OpFusionChoice
from autotune.strategy_space.plan import Plan, PlannedStrategy
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.lowering.costs import RuntimeCosts
    from autotune.lowering.replayed import LoweredSteps


@dataclass(frozen=True)
class StrategyFeatures:
    """The input of every simulator.

    `shards` (S, F), S is 0 without shards. `shard_variable` (S,): backward positions, ascending.
    `edges` (E, 2): pairs of backward positions, the workload's or the chain of backward neighbours.
    `global_features` (12,).
    `analytic_step_s`: the overlap estimate. `paper_step_s`: the paper's Eq. 1. `replayed_step_s`:
    the replay of the lowered plan, or None. `timeline`: its features, or None. For times, lower is
    better.
    """

    strategy: Strategy
    shards: Float32Array
    shard_variable: IntArray
    variables: int
    edges: IntArray
    global_features: FloatArray
    analytic_step_s: float
    paper_step_s: float
    replayed_step_s: float | None = None
    timeline: TimelineFeatures | None = None

    @property
    def strategy_id(self) -> str:
        """Computed on demand: few of the thousands of scored strategies need it."""
        return self.strategy.id

    def without_shards(self) -> StrategyFeatures:
        """Return the features of the whole strategy, a few numbers for any model."""
        if not len(self.shards):
            return self
        nothing = self.shards[:0].copy(), self.shard_variable[:0].copy()  # a view would keep them
        return replace(self, shards=nothing[0], shard_variable=nothing[1])

    @cached_property
    def shard_edges(self) -> IntArray:
        """The partitioned graph: pairs of shards, each pair once, shape (pairs, 2).

        Shards of one variable form a chain. For neighbouring variables with n and m shards, shard i
        of n is paired with shard i*m//n of m, counted on the larger side: max(n, m) pairs instead
        of n*m.
        """
        counts = np.bincount(self.shard_variable, minlength=self.variables)
        first = np.cumsum(counts) - counts
        inside = np.flatnonzero(self.shard_variable[1:] == self.shard_variable[:-1])
        here, there = self.edges[:, 0], self.edges[:, 1]
        pairs = np.maximum(counts[here], counts[there])
        edge = np.repeat(np.arange(len(self.edges)), pairs)
        number = np.arange(len(edge)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
        ends = [first[s][edge] + number * counts[s][edge] // pairs[edge] for s in (here, there)]
        chains = np.column_stack([inside, inside + 1])
        return np.concatenate([chains, np.column_stack(ends)]).astype(np.int64)


class Extractor:
    """Computes features of strategies for one workload and cluster. `costs`: as in `Lowering`.

    `op_fusions`: measured sets of ops; strategies with one of them compute as measured.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        costs: RuntimeCosts | None = None,
        op_fusions: Sequence[OpFusionChoice] = (),
    ) -> None:
        self.workload, self.cluster, self.costs = workload, cluster, costs
        self._op_fusions = op_fusions
        self.fused = {choice.sets: choice.workload(workload) for choice in op_fusions}
        count = len(workload.variables)
        chain = [(position, position + 1) for position in range(count - 1)]
        self.edges = np.array(workload.edges or chain, dtype=np.int64).reshape(-1, 2)
        self.taken_share = taken_share(workload, cluster)
        self.rates = Rates(cluster)

    def with_rates(self, cluster: Cluster, costs: RuntimeCosts) -> Extractor:
        """Return an extractor for the same workload with other rates and costs."""
        return Extractor(self.workload, cluster, costs, self._op_fusions)

    def features(self, planned: PlannedStrategy, with_shards: bool = True) -> StrategyFeatures:
        """Features of a strategy planned for this workload and cluster. Raises `InvalidInput`.

        `with_shards`: also a row of 4 F bytes for each shard.
        """
        strategy, plan = planned.strategy, planned.plan
        workload, cluster = self.fused.get(plan.op_fusion, self.workload), self.cluster
        flat = flatten(plan, workload)
        rates = self.rates if plan.ring_order is None else None
        costs = message_costs(plan, cluster, workload, rates)
        taken_s = None
        if self.taken_share > 0:
            taken_s = self.taken_share * message_cpu_s(plan, cluster, RowTraffic(workload))
        analytic_s = overlap_step_s(
            flat, costs.channel_s, workload, plan.cross_step, taken_s, plan.results
        )
        shards = np.zeros((0, len(RAW_FEATURES)), dtype=np.float32)
        order = np.zeros(0, dtype=np.int64)
        if with_shards:
            order = np.lexsort((flat.start, flat.variable))
            shards = shard_rows(flat, costs, plan, workload, cluster)[order]
        return StrategyFeatures(
            strategy=strategy,
            shards=shards,
            shard_variable=flat.variable[order],
            variables=len(workload.variables),
            edges=self.edges,
            global_features=costs.global_features,
            analytic_step_s=analytic_s,
            paper_step_s=paper_step_s(workload, costs),
        )

    @cached_property
    def steps(self) -> LoweredSteps:
        """Replays plans and remembers them: a replay costs as much as 100 other estimates."""
        from autotune.lowering.replayed import LoweredSteps  # compiled code loads on first use

        return LoweredSteps(
            self.workload,
            self.cluster,
            taken_share=self.taken_share,
            costs=self.costs,
            fused=self.fused,
        )

    def replayed(self, features: StrategyFeatures, plan: Plan) -> StrategyFeatures:
        """Return the features with `replayed_step_s`."""
        return replace(features, replayed_step_s=self.steps.step_s(plan))

    def described(self, features: StrategyFeatures, plan: Plan) -> StrategyFeatures:
        """Return the features with `replayed_step_s` and `timeline`."""
        replayed = self.steps.describe(plan)
        workload = self.fused.get(plan.op_fusion, self.workload)
        sent = map(RowTraffic(self.workload).sent_bytes, plan.messages)
        timeline = timeline_features(replayed, sent, features.analytic_step_s, workload.compute_s)
        return replace(features, replayed_step_s=replayed.step_s, timeline=timeline)


def job_extractor(
    workload: Workload,
    cluster: Cluster,
    accelerators: Accelerators,
    software: Mapping[str, str],
    op_fusions: Sequence[OpFusionChoice] = (),
) -> Extractor:
    """The extractor that predicts the trials of a job; `software`: as in `Profiled`."""
    from autotune.lowering.costs import costs_of_job

    return Extractor(workload, cluster, costs_of_job(accelerators, software), op_fusions)


def extract(planned: PlannedStrategy, workload: Workload, cluster: Cluster) -> StrategyFeatures:
    """Compute the features of one strategy, replayed; for many, keep an `Extractor`."""
    extractor = Extractor(workload, cluster)
    return extractor.replayed(extractor.features(planned), planned.plan)
