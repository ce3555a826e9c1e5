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
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.records import Accelerators
from benchmarks.repository import ROOT, can_emulate, machine


def tune(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Run one job on a testbed; progress goes to stderr."""
    script = ["python", str(ROOT / "examples" / options.example), "--epochs", "1000"]
    where = [
        "--testbed",
        str(options.testbed),
        "--accelerators",
        options.accelerators,
        "--job",
        "ratio",
        "--directory",
        directory,
    ]
    words = [
        "tune",
        "--json",
        *where,
        "--budget-time",
        options.budget_time,
        "--seed",
        str(options.seed),
        "--",
        *script,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    shown = [sys.executable, "-m", "autotune", "show", "ratio", "--directory", directory, "--json"]
    history = json.loads(
        subprocess.run(shown, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    candidates = sum(trial["request"]["role"] == "candidate" for trial in history["trials"])
    return {
        **json.loads(done.stdout),
        "candidates": candidates,
        "conditions": history["conditions"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--testbed",
        type=Path,
        default=ROOT / "examples" / "clusters" / "four_hosts.yaml",
        help="a cluster file",
    )
    parser.add_argument(
        "--accelerators", choices=[member.value for member in Accelerators], default="emulated"
    )
    parser.add_argument(
        "--example", default="resnet_digits.py", choices=["resnet_digits.py", "gpt_text.py"]
    )
    parser.add_argument("--budget-time", default="5min")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", type=Path, help="keep best.json and report.html in this directory"
    )
    options = parser.parse_args()
    if not can_emulate():
        return 2
    with tempfile.TemporaryDirectory() as directory:
        result = tune(options, directory)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for name in ("best", "report"):
                shutil.copy(result[name], options.keep)
    comparison = result["decision"]["comparison"] or {}
    figures = {key: comparison.get(key) for key in ("ratio", "low", "high", "confidence", "pairs")}
    setting = {"example": options.example, "cluster": options.testbed.stem, **result["conditions"]}
    hardware = machine()
    kept = {"exported": result["decision"]["strategy_id"], "candidate_trials": result["candidates"]}
    print(json.dumps({**figures, **kept, **setting, **hardware}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
