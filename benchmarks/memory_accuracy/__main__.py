"""Compare predicted and measured peak memory: `python -m benchmarks.memory_accuracy`.

For every example model at its own batch size, and for one more with sparse gradients, one process
records a profile without any synchronization. It predicts the peak of each rank under torch's DDP
and under plans of every kind. Two fresh ranks per case then measure it: over gloo with a counter in
front of torch's CPU allocator (`c10_memory`), or with `--device cuda` over NCCL, both on one GPU,
with torch's caching allocator. Errors are |predicted - measured| / measured over all ranks and
cases. `refused` lists plans that a script cannot follow, and over NCCL torch's DDP with sparse
gradients. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.cluster import Cluster
from autotune.jobs.campaign.one_gpu import own_host_environment
from autotune.memory.peak import peak_memory
from autotune.recordings.memory_profile import MemoryProfile, Replica
from autotune.strategy_space.builders.collectives import (
    ddp_default,
    per_variable,
    reduce_scatter_all_gather,
)
from autotune.strategy_space.builders.cross_step import cross_step_all_reduce
from autotune.strategy_space.builders.servers import parameter_server
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Compressor, Strategy
from autotune.workload import Workload
from benchmarks.memory_accuracy.c10_memory import built
from benchmarks.repository import ROOT, machine, option_parser, run_benchmark

MODELS = ("resnet_digits", "gpt_text", "lstm_text", "ncf_ratings", "clicks")
"""The examples' models, and one more."""
RANKS = 2
WAIT_S = 600
DEVICE = "cuda"


def compressed(strategy: Strategy, compressor: Compressor) -> Strategy:
    """Return the strategy with another compressor; top-k sends 1 %, PowerSGD has rank 2."""
    ratio = 0.01 if compressor is Compressor.TOP_K else None
    rank = 2 if compressor is Compressor.POWER_SGD else None
    choices = []
    for choice in strategy.variables:
        shards = tuple(
            replace(shard, compressor=compressor, ratio=ratio, rank=rank) for shard in choice.shards
        )
        choices.append(replace(choice, shards=shards))
    return replace(strategy, variables=tuple(choices))


STRATEGIES: dict[str, Callable[[Workload, Cluster], Strategy]] = {
    "ddp_default": lambda w, c: ddp_default(w),
    "per_variable": lambda w, c: per_variable(w),
    "reduce_scatter_all_gather": lambda w, c: reduce_scatter_all_gather(w),
    "parameter_server": parameter_server,
    "cross_step_all_reduce": cross_step_all_reduce,
    "fp16": lambda w, c: compressed(ddp_default(w), Compressor.FP16),
    "int8": lambda w, c: compressed(ddp_default(w), Compressor.INT8),
    "top_k": lambda w, c: compressed(ddp_default(w), Compressor.TOP_K),
    "power_sgd": lambda w, c: compressed(ddp_default(w), Compressor.POWER_SGD),
}


def started(library: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.memory_accuracy.rank", library, *words]
    quiet = subprocess.DEVNULL if not os.environ.get("MEMORY_VERBOSE") else None
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=quiet,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        text, _ = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(
            f"a rank ended with exit status {process.returncode}; "
            "run it again with MEMORY_VERBOSE=1"
        )
    result: dict[str, Any] = json.loads(text.splitlines()[-1])
    return result


def measured(library: str, name: str, what: str) -> list[dict[str, Any]]:
    """Return the findings by rank.

    The ranks meet at a file, since a free port may be taken later.
    """
    shared = {"WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    apart = [own_host_environment(rank) if library == DEVICE else {} for rank in range(RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/ranks"
        ranks = [
            started(library, name, what, meeting, RANK=str(rank), **shared, **apart[rank])
            for rank in range(RANKS)
        ]
        try:
            return [answer(rank) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()


def cases(workload: Workload, cluster: Cluster, chosen: list[str]) -> dict[str, Plan | None]:
    plans: dict[str, Plan | None] = {"ddp": None}
    plans |= {name: plan(STRATEGIES[name](workload, cluster), workload, RANKS) for name in chosen}
    return plans


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument(
        "--strategies", nargs="*", default=list(STRATEGIES), choices=list(STRATEGIES)
    )
    parser.add_argument("--device", choices=["cpu", DEVICE], default="cpu")
    options = parser.parse_args()
    library, cluster = DEVICE if options.device == DEVICE else str(built()), Cluster.local(RANKS)
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            profiled = answer(started(library, model, "profile"))
            profile, workload = (
                MemoryProfile.from_data(profiled["profile"]),
                Workload.from_data(profiled["workload"]),
            )
            for name, chosen in cases(workload, cluster, options.strategies).items():
                file = Path(folder) / f"{model}-{name}.json"
                if chosen is not None:
                    file.write_text(chosen.to_json())
                for rank, real in enumerate(
                    measured(library, model, "ddp" if chosen is None else str(file))
                ):
                    if "refused" in real:
                        refused[f"{model} {name}"] = real["refused"]
                        continue
                    replica = Replica(rank=rank, host_of_rank=cluster.host_of_rank)
                    peak = peak_memory(profile, workload, chosen, cluster, replica=replica)
                    error = peak.peak_bytes / real["peak_bytes"] - 1
                    errors[f"{model} {name} rank {rank}"] = error
                    kinds = ", ".join(
                        f"{kind} {size / 1e6:.1f}" for kind, size in peak.by_kind.items() if size
                    )
                    predicted = f"predicted {peak.peak_bytes / 1e6:8.2f} MB"
                    actual = f"measured {real['peak_bytes'] / 1e6:8.2f} MB"
                    sizes = f"{predicted}, {actual}, {error:+7.2%}"
                    print(f"{model:14} {name:26} rank {rank}: {sizes}  ({kinds})", flush=True)
    absolute = [abs(error) for error in errors.values()]
    worst = max(errors, key=lambda case: abs(errors[case]))
    print(
        json.dumps(
            {
                "error_max": max(absolute),
                "error_mean": statistics.mean(absolute),
                "error_median": statistics.median(absolute),
                "within_5_percent": sum(error <= 0.05 for error in absolute) / len(absolute),
                "cases": len(absolute),
                "worst": worst,
                "refused": refused,
                "device": options.device,
                **machine(),
            }
        )
    )
    return 0


if __name__ == "__main__":
    run_benchmark(main)
