"""Measure strategies planned per minute and core: `python -m benchmarks.strategy_rate`.

The model is the zoo's BERT-large on AutoSync's cluster B7. Each repeat draws new strategies as a
tuning job does (different ones, both knowledge constraints) and plans each. The rate is the median
over the repeats of the wall time; the CPU time shows how much other work interfered. The last line
is one JSON object.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time

from autotune.garbage import collection_paused
from autotune.sampler.random import sample_many
from autotune.strategy_space.plan import plan
from autotune.strategy_space.space import SearchSpace
from autotune.zoo.architectures import workload
from autotune.zoo.clusters import CLUSTERS
from benchmarks.repository import option_parser


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--model", default="bert-large")
    parser.add_argument("--cluster", default="B7", choices=list(CLUSTERS))
    parser.add_argument("--strategies", type=int, default=300, help="per repeat")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    model, cluster = workload(options.model), CLUSTERS[options.cluster]
    wall_s, cpu_s = [], []
    for seed in range(options.repeats + 1):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        with collection_paused():  # as the proposer does
            for strategy in sample_many(
                model, cluster, SearchSpace.default(), options.strategies, seed
            ):
                plan(strategy, model, cluster.world_size)
        if seed:  # the first repeat imports and warms up
            wall_s.append(time.perf_counter() - began_s)
            cpu_s.append(time.process_time() - began_cpu_s)
    rates = sorted(60 * options.strategies / seconds for seconds in wall_s)
    result = {
        "strategies_per_min": round(statistics.median(rates)),
        "slowest": round(rates[0]),
        "fastest": round(rates[-1]),
        "by_cpu_time": round(60 * options.strategies / statistics.median(cpu_s)),
        "variables": len(model.variables),
        "model": options.model,
        "cluster": options.cluster,
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
