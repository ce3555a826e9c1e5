"""Measure the runtime's cost over DDP with the same buckets: `python -m benchmarks.ddp_parity`.

Two ranks on this machine's loopback train two copies of a model with the same batches: one under
torch's DistributedDataParallel, one under ours with the buckets that DDP has after its first step.
Blocks of steps alternate (ABBA). Models are the ResNet of the examples, and one of 1,000 small
tensors, which shows the cost per tensor. The figure of a pair of blocks is the ratio of their
median steps (of the slower rank). The last line is one JSON object with the median and quartiles
over the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.repository import ROOT
from benchmarks.testbed_fidelity.processes import WAIT_S

MODELS = ("resnet", "small_tensors")


def measured(model: str, ranks: int, pairs: int, steps: int) -> dict[str, Any]:
    """Return the findings of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "benchmarks.ddp_parity.rank", model, str(pairs), str(steps)]
    started = [
        subprocess.Popen(
            words,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        texts = [process.communicate(timeout=2 * WAIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise SystemExit("a rank failed; look at what it said above")
    found: dict[str, Any] = json.loads(texts[0].splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks (default 20)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a block (default 10)")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("quartiles need at least 2 pairs")
    result: dict[str, Any] = {"ratio_median": 0.0}
    for model in options.models:
        found = measured(model, options.ranks, options.pairs, options.steps)
        low, middle, high = statistics.quantiles(found["ratios"], n=4)
        print(
            f"{model}: ours / torch's DDP {middle:.3f} (quartiles {low:.3f} to {high:.3f}); "
            f"DDP {found['ddp_s'] * 1e3:.2f} ms per step"
        )
        print(
            f"  {found['backend']}; by the rule for default buckets: "
            f"{'yes' if found['buckets_by_rule'] else 'no'}"
        )
        findings = {
            key: found[key]
            for key in ("ddp_s", "variables", "bucket_bytes", "buckets_by_rule", "backend")
        }
        result[model] = {"median": middle, "low": low, "high": high, **findings}
        result["ratio_median"] = max(result["ratio_median"], middle)
    print(
        json.dumps(
            result
            | {
                "ranks": options.ranks,
                "pairs": options.pairs,
                "cores": os.cpu_count(),
                "backend": "gloo",
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
