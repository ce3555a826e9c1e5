"""How much faster the tuned strategy is than the script's own DDP on a slow network: `python -m benchmarks.tuned_ratio`.

The network is emulated: the ranks are processes of this machine, in a network namespace of their own whose loopback is
shaped to `--rate` (both directions together), so that transfers are real and slow. Computation is real. Root and `ip`,
`tc` are needed. The rival is torch's DistributedDataParallel with its default buckets, interleaved with the tuned
strategy in the job's closing A/B. The last line is one JSON object; `ratio` is time(tuned) / time(DDP).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def shaped_namespace(rate: str) -> Iterator[list[str]]:
    """The words that run a command inside; the namespace is removed at the end."""
    name = f"autotune-benchmark-{os.getpid()}"
    commands = [
        ["ip", "netns", "add", name],
        ["ip", "-n", name, "link", "set", "lo", "up"],
        ["tc", "-n", name, *["qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "default", "1"]],
        ["tc", "-n", name, *f"class add dev lo parent 1: classid 1:1 htb rate {rate} burst 64kb cburst 64kb quantum 60000".split()],
    ]
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, text=True)
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def tune(inside: list[str], options: argparse.Namespace, directory: str) -> dict:
    """One job inside the namespace; progress goes to stderr."""
    script = [str(ROOT / "examples" / options.example), "--epochs", "1000"]
    launch = ["torchrun", "--nproc-per-node", str(options.workers), *script]
    words = ["tune", "--json", "--job", "shaped", "--directory", directory, "--budget-time", options.budget_time, "--", *launch]
    done = subprocess.run([*inside, sys.executable, "-m", "autotune", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    shown = [*inside, sys.executable, "-m", "autotune", "show", "shaped", "--directory", directory, "--json"]
    history = json.loads(subprocess.run(shown, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return {**json.loads(done.stdout), "candidates": sum(t["request"]["role"] == "candidate" for t in history["trials"])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="2gbit", help="as tc writes it (default 2gbit)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--example", default="resnet_digits.py", choices=["resnet_digits.py", "gpt_text.py"])
    parser.add_argument("--budget-time", default="5min")
    parser.add_argument("--keep", type=Path, help="keep best.json and report.html in this directory")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("tc") is None:
        print("the emulated network needs root and the commands ip and tc (package iproute2)", file=sys.stderr)
        return 2
    with shaped_namespace(options.rate) as inside, tempfile.TemporaryDirectory() as directory:
        result = tune(inside, options, directory)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for name in ("best", "report"):
                shutil.copy(result[name], options.keep)
    comparison = result["decision"]["comparison"] or {}
    figures = {key: comparison.get(key) for key in ("ratio", "low", "high", "confidence", "pairs")}
    setting = {"example": options.example, "workers": options.workers, "network": f"emulated, loopback shaped to {options.rate}"}
    hardware = {"cores": os.cpu_count(), "machine": platform.machine()}
    kept = {"exported": result["decision"]["strategy_id"], "candidate_trials": result["candidates"]}
    print(json.dumps({**figures, **kept, **setting, **hardware}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
