"""Measure what a variable costs the processor in a step: `python -m benchmarks.variable_cost`.

Two ranks on this machine's loopback train copies of a model of many small tensors: without any
synchronization, under torch's DistributedDataParallel, and by the runtime's own hooks, within the
step and across it. The figure is the processor time of the training thread above that without
synchronization, per variable and step. Threads that send do not count. Blocks of all sides are
interleaved in random order. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics

from benchmarks.loopback import ranks_on_loopback
from benchmarks.repository import option_parser, run_benchmark
from benchmarks.variable_cost.rank import ACROSS, BARE, DDP

RANKS = 2


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--layers", type=int, default=182, help="of two variables (default 182)")
    parser.add_argument("--blocks", type=int, default=40, help="blocks of a side (default 40)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a block (default 6)")
    options = parser.parse_args()
    if options.blocks < 2:
        parser.error("quartiles need at least 2 blocks")
    words = [str(options.layers), str(options.blocks), str(options.steps)]
    findings = ranks_on_loopback("benchmarks.variable_cost.rank", words, RANKS)
    taken, variables = findings["taken"], findings["variables"]
    costs_us = {}
    for side in taken:
        differences_s = [own - bare for own, bare in zip(taken[side], taken[BARE], strict=True)]
        low, middle, high = statistics.quantiles(differences_s, n=4)
        costs_us[side] = {
            name: value / variables * 1e6
            for name, value in (("median", middle), ("low", low), ("high", high))
        }
        cost = costs_us[side]
        quartiles = f"(quartiles {cost['low']:.1f} to {cost['high']:.1f})"
        step_ms = statistics.median(taken[side]) * 1e3
        print(
            f"{side:26} {step_ms:6.2f} ms a step, {cost['median']:5.1f} us a variable {quartiles}"
        )
    ratio = costs_us[ACROSS]["median"] / costs_us[DDP]["median"]
    result = {"ratio_to_ddp": ratio, "costs_us": costs_us, "variables": variables}
    print(json.dumps({**result, "cores": os.cpu_count(), "backend": "gloo"}))
    return 0


if __name__ == "__main__":
    run_benchmark(main)
