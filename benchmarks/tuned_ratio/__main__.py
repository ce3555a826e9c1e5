"""Compare a tuned strategy with the script's DDP: `python -m benchmarks.tuned_ratio` (root).

Hosts are network namespaces of this machine with shaped links, so transfers are real and slow. By
default computation is emulated too: timed waits of what one replica alone takes. The rival is
torch's DistributedDataParallel with its default buckets, interleaved with the tuned strategy in the
job's closing A/B comparison. The last line is one JSON object; `ratio` is time(tuned) / time(DDP).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from autotune.records import Accelerators
from benchmarks.repository import (
    CLUSTERS,
    ROOT,
    can_emulate,
    machine,
    option_parser,
    run_autotune,
    run_benchmark,
)


def tune(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Run one job on a testbed; progress goes to stderr."""
    script = ["python", str(ROOT / "examples" / options.example), "--epochs", "1000"]
    hosts = ["--testbed", str(options.testbed), "--accelerators", options.accelerators]
    job = ["--job", "ratio", "--directory", directory]
    search = ["--budget-time", options.budget_time, "--seed", str(options.seed)]
    result = json.loads(run_autotune("tune", "--json", *hosts, *job, *search, "--", *script))
    history = json.loads(run_autotune("show", "ratio", "--directory", directory, "--json"))
    candidates = sum(trial["request"]["role"] == "candidate" for trial in history["trials"])
    return {**result, "candidates": candidates, "conditions": history["conditions"]}


def main() -> int:
    parser = option_parser(__doc__)
    add = parser.add_argument
    examples, kinds = ["resnet_digits.py", "gpt_text.py"], [member.value for member in Accelerators]
    add("--testbed", type=Path, default=CLUSTERS / "four_hosts.yaml", help="a cluster file")
    add("--accelerators", choices=kinds, default="emulated")
    add("--example", default=examples[0], choices=examples)
    add("--budget-time", default="5min")
    add("--seed", type=int, default=0)
    add("--keep", type=Path, help="keep best.json and report.html in this directory")
    options = parser.parse_args()
    if not can_emulate():
        return 2
    with tempfile.TemporaryDirectory() as directory:
        result = tune(options, directory)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for name in ("best", "report"):
                shutil.copy(result[name], options.keep)
    decision = result["decision"]
    comparison = decision["comparison"] or {}
    figures = {key: comparison.get(key) for key in ("ratio", "low", "high", "confidence", "pairs")}
    counts = {"exported": decision["strategy_id"], "candidate_trials": result["candidates"]}
    setting = {"example": options.example, "cluster": options.testbed.stem, **result["conditions"]}
    print(json.dumps({**figures, **counts, **setting, **machine()}))
    return 0


if __name__ == "__main__":
    run_benchmark(main)
