"""Measure how long a simulator scores a round of strategies: `python -m benchmarks.scoring_rate`.

A round is 2,000 strategies, as in AutoSync, on one core. The model is the zoo's BERT-base on
AutoSync's cluster B7, lossy compressors allowed. The strategies are sampled beforehand. Planning
them and extracting their features is part of a simulator's time, as in a job. The simulators are
those of a tuning job, fitted to 60 strategies with the analytic time in place of a measured one,
which does not change their speed. The last line is one JSON object; seconds are wall time.
"""

from __future__ import annotations

import json
import platform
import sys
import time

from autotune.features.extract import Extractor, StrategyFeatures
from autotune.garbage import collection_paused
from autotune.sampler.random import sample_many
from autotune.simulators.interface import Example
from autotune.simulators.registry import SIMULATORS
from autotune.strategy_space.plan import PlannedStrategy
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload
from autotune.zoo.architectures import workload
from autotune.zoo.clusters import CLUSTERS
from benchmarks.repository import option_parser

FITTED = 60


def main() -> int:
    import torch

    parser = option_parser(__doc__)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--cluster", default="B7", choices=list(CLUSTERS))
    parser.add_argument("--strategies", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, cluster = workload(options.model), CLUSTERS[options.cluster]
    strategies = sample_many(
        model, cluster, SearchSpace.default(lossy=True), options.strategies + FITTED, seed=0
    )
    examples = [
        Example(item, item.analytic_step_s, "zoo")
        for item in _features(strategies[:FITTED], model, options.cluster)
    ]
    began_s = time.perf_counter()
    features = _features(strategies[FITTED:], model, options.cluster)
    features_s = time.perf_counter() - began_s
    predict_s = {}
    for name, make in SIMULATORS.items():
        simulator = make()
        simulator.fit(examples, seed=0)
        began_s = time.perf_counter()
        simulator.predict_step_s(features)
        predict_s[name] = time.perf_counter() - began_s
        print(
            f"{name}: {features_s:.2f} s for plans and features, "
            f"{predict_s[name]:.2f} s to predict",
            flush=True,
        )
    result = {
        "worst_s": round(features_s + max(predict_s.values()), 2),
        "seconds": {name: round(features_s + seconds, 2) for name, seconds in predict_s.items()},
        "plans_and_features_s": round(features_s, 2),
        "strategies": len(features),
        "shards_per_strategy": round(sum(len(item.shards) for item in features) / len(features)),
        "variables": len(model.variables),
        "model": options.model,
        "cluster": options.cluster,
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    print(json.dumps(result))
    return 0


def _features(strategies: list[Strategy], model: Workload, cluster: str) -> list[StrategyFeatures]:
    extractor = Extractor(model, CLUSTERS[cluster])
    with collection_paused():  # as the proposer does
        return [
            extractor.features(PlannedStrategy.of(strategy, model, extractor.cluster.world_size))
            for strategy in strategies
        ]


if __name__ == "__main__":
    sys.exit(main())
