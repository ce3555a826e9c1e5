"""Measure synchronization across steps against DDP: `python -m benchmarks.cross_step` (root).

Four hosts at 1 Gbit/s are emulated (network namespaces with shaped links: transfers are real), and
so is computation (each layer sleeps for its time). Parameters, gradients, messages and updates are
real. The model is `layers` of `autotune.jobs.campaign.generated_models`. The strategy is
`cross_step_all_reduce` for the model's times and the cluster file. Rivals are torch's DDP at four
bucket sizes and, to show the source of the gain, the same messages in gradient-ready order and
within the step. Blocks of all setups are interleaved; the best bucket size has the lowest median.
The last line is one JSON object; `ratio_to_best_ddp` is time(best DDP) / time(ours), above 1 where
ours is faster.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

from autotune.cluster_file import read_cluster
from autotune.testbed.bed import running
from benchmarks.cross_step.rank import OURS, SETTLE_STEPS
from benchmarks.repository import (
    CLUSTERS,
    can_emulate,
    emulated_setting,
    last_json,
    option_parser,
    run_benchmark,
)
from benchmarks.testbed_fidelity.processes import WAIT_S, first_rank_output

MASTER_PORT = 29410
SLOW_STEPS_S = 8.0  # more than one step of every setup


def measured(cluster_file: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Return the findings of rank 0."""
    words = [str(cluster_file.resolve()), str(rounds), str(steps)]
    wait_s = WAIT_S + rounds * (steps + SETTLE_STEPS) * SLOW_STEPS_S
    with running(read_cluster(cluster_file), name=f"cross-step-{os.getpid()}") as bed:
        module = "benchmarks.cross_step.rank"
        return last_json(first_rank_output(bed, module, words, MASTER_PORT, wait_s))


def main() -> int:
    parser = option_parser(__doc__)
    add = parser.add_argument
    four_hosts = CLUSTERS / "four_hosts.yaml"
    add("--cluster", type=Path, default=four_hosts, help="of hosts with one device")
    add("--rounds", type=int, default=6, help="blocks per setup (default 6)")
    add("--steps", type=int, default=6, help="timed steps of a block (default 6)")
    options = parser.parse_args()
    if not can_emulate():
        return 2
    findings = measured(options.cluster, options.rounds, options.steps)
    taken = findings["taken"]
    medians = {name: statistics.median(values) for name, values in taken.items()}
    for name, seconds in medians.items():
        low, _, high = statistics.quantiles(taken[name], n=4)
        quartiles = f"(quartiles {low * 1e3:.1f} to {high * 1e3:.1f})"
        print(f"{name:34} {seconds * 1e3:6.1f} ms per step {quartiles}")
    best = min((name for name in medians if name.startswith("DDP")), key=medians.__getitem__)
    ratios = [theirs / ours for theirs, ours in zip(taken[best], taken[OURS], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{OURS}: {middle:.3f} times as fast as {best} (quartiles {low:.3f} to {high:.3f})")
    result = {"ratio_to_best_ddp": middle, "low": low, "high": high, "best_ddp": best}
    exact = {name: findings[name] for name in ("identical", "largest_difference_to_ddp")}
    print(json.dumps({**result, "median_s": medians, **exact, **emulated_setting()}))
    return 0


if __name__ == "__main__":
    run_benchmark(main)
