"""Measure the runtime's cost over DDP with the same buckets: `python -m benchmarks.ddp_parity`.

Two ranks on this machine's loopback train two copies of a model with the same batches: one under
torch's DistributedDataParallel, one under ours with the buckets that DDP has after its first step.
Blocks of steps alternate (ABBA). Models are the ResNet of the examples, and one of 1,000 small
tensors, which shows the cost per tensor. The figure of a pair of blocks is the ratio of their
median steps (of the slower rank). The last line is one JSON object with the median and quartiles
over the pairs.
"""

from __future__ import annotations

import json
import os
import statistics
from typing import Any

from benchmarks.loopback import ranks_on_loopback
from benchmarks.repository import option_parser, run_benchmark

MODELS = ("resnet", "small_tensors")


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks (default 20)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a block (default 10)")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("quartiles need at least 2 pairs")
    result: dict[str, Any] = {"ratio_median": 0.0}
    copied = ("ddp_s", "variables", "bucket_bytes", "buckets_by_rule", "backend")
    for model in options.models:
        words = [model, str(options.pairs), str(options.steps)]
        figures = ranks_on_loopback("benchmarks.ddp_parity.rank", words, options.ranks)
        low, middle, high = statistics.quantiles(figures["ratios"], n=4)
        ratio = f"{middle:.3f} (quartiles {low:.3f} to {high:.3f})"
        ddp = f"DDP {figures['ddp_s'] * 1e3:.2f} ms per step"
        print(f"{model}: ours / torch's DDP {ratio}; {ddp}")
        by_rule = "yes" if figures["buckets_by_rule"] else "no"
        print(f"  {figures['backend']}; by the rule for default buckets: {by_rule}")
        result[model] = {"median": middle, "low": low, "high": high}
        result[model] |= {key: figures[key] for key in copied}
        result["ratio_median"] = max(result["ratio_median"], middle)
    setting = {"ranks": options.ranks, "pairs": options.pairs, "cores": os.cpu_count()}
    print(json.dumps({**result, **setting, "backend": "gloo"}))
    return 0


if __name__ == "__main__":
    run_benchmark(main)
