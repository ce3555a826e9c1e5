"""Compare a testbed with its cluster file: `python -m benchmarks.testbed_fidelity` (root).

Hosts are network namespaces of this machine; transfers are real.

- Goodput: TCP payload per second between two hosts, and around a ring of all hosts at once, against
  the rate in the cluster file.
- All-reduce: fresh all-reduces from 1 MiB up, of sizes that were not probed, against the model that
  `autotune probe` fitted.
- Spread: the same strategy again and again with emulated accelerators; relative standard deviation
  of the trials' medians.

The last line is one JSON object; every error is relative.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from autotune.cluster import Cluster, Host
from autotune.cluster_file import cluster_yaml, read_cluster
from autotune.jobs.places import Ranks, Where, placed_world
from autotune.jobs.settings import scheduled
from autotune.records import (
    CURRENT_SETUP,
    Accelerators,
    Conditions,
    Measured,
    Network,
    Role,
    TrialRequest,
)
from autotune.strategy_space.builders.collectives import reduce_scatter_all_gather, single_bucket
from autotune.strategy_space.plan import Plan, plan
from autotune.testbed.bed import Testbed, running
from autotune.workload import Workload
from benchmarks.repository import (
    ROOT,
    can_emulate,
    last_json,
    machine,
    option_parser,
    run_autotune,
    run_benchmark,
)
from benchmarks.testbed_fidelity.processes import first_rank_output, streams
from runtime_rewriter.world.command import read_command
from runtime_rewriter.world.world import World

CLUSTERS = {  # Mbit/s of each host
    "100": (100,) * 4,
    "500": (500,) * 4,
    "1000": (1000,) * 4,
    "1000, 1000, 1000, 250": (1000, 1000, 1000, 250),
    "2000": (2000,) * 4,
    "5000": (5000,) * 2,  # two cores cannot move the traffic of four
}
GOODPUT_ROUNDS = 3
FRESH_BYTES = (3 * 2**19, 3 * 2**20, 6 * 2**20, 12 * 2**20)  # between the sizes that are probed
MASTER_PORT = 29400
WARMUP_STEPS, TIMED_STEPS = 2, 20

console = Console(stderr=True, highlight=False)


def cluster_of(rates_mbit: Sequence[int]) -> Cluster:
    hosts = tuple(
        Host(f"h{index}", 1, rate * 1e6 / 8, 5e-5, 1e10, 5e-6)
        for index, rate in enumerate(rates_mbit)
    )
    return Cluster("fidelity", hosts)


def goodput_errors(rates_mbit: Sequence[int], repeats: int) -> tuple[float, float]:
    """Return the largest errors (single streams, ring): |reached - set| / set of the slower host.

    A pair reaches its median over the repeats.
    """
    count = len(rates_mbit)
    single, ring = (
        ((0, 1), (0, count - 1), (count - 1, 0)),
        tuple((index, (index + 1) % count) for index in range(count)),
    )
    with running(cluster_of(rates_mbit), name=f"fidelity-{os.getpid()}") as bed:
        rounds = [
            ({pair: streams(bed, [pair])[pair] for pair in single}, streams(bed, ring))
            for _ in range(repeats)
        ]
    return _error(rates_mbit, [alone for alone, _ in rounds]), _error(
        rates_mbit, [together for _, together in rounds]
    )


def _error(rates_mbit: Sequence[int], rounds: Sequence[dict[tuple[int, int], float]]) -> float:
    errors = []
    for source, to in rounds[0]:
        wanted = min(rates_mbit[source], rates_mbit[to]) * 1e6 / 8
        errors.append(
            abs(statistics.median(reached[source, to] for reached in rounds) / wanted - 1)
        )
    return max(errors)


def all_reduce_errors(
    rates_mbit: Sequence[int], budget: str, repeats: int, directory: Path
) -> dict[int, float]:
    """Return bytes -> (fresh - fitted) / fresh time; the fit is from another testbed."""
    given, probed = directory / "cluster.yaml", directory / "probed.yaml"
    given.write_text(cluster_yaml(cluster_of(rates_mbit)))
    hosts = ["--testbed", str(given), "--accelerators", "emulated"]
    files = ["--output", str(probed), "--directory", str(directory)]
    run_autotune("probe", *hosts, "--budget-time", budget, *files)
    fit = read_cluster(probed).fit("all_reduce", len(rates_mbit))
    assert fit is not None
    with running(cluster_of(rates_mbit), name=f"fidelity-{os.getpid()}") as bed:
        measured = _fresh_times(bed, repeats)
    return {size: (seconds - fit.seconds(size)) / seconds for size, seconds in measured.items()}


def _fresh_times(bed: Testbed, repeats: int) -> dict[int, float]:
    module = "benchmarks.testbed_fidelity.all_reduce_times"
    times_s = last_json(
        first_rank_output(bed, module, [str(repeats), *map(str, FRESH_BYTES)], MASTER_PORT)
    )
    return {int(size): float(seconds) for size, seconds in times_s.items()}


def spreads(
    example: str, rates_mbit: Sequence[int], repeats: int, directory: Path
) -> dict[str, float]:
    """Return strategy -> relative standard deviation of its interleaved trials' medians."""
    cluster = cluster_of(rates_mbit)
    conditions = scheduled(Conditions(Network.EMULATED, Accelerators.EMULATED), len(rates_mbit))
    command = read_command(["python", str(ROOT / "examples" / example), "--epochs", "1000"])
    ranks = Ranks(command, len(rates_mbit), directory / "logs", 60.0, 180.0)
    with placed_world(Where(None, False, (0, 0)), cluster, conditions, ranks, console.log) as world:
        workload = world.profile().workload
        plans = dict(_strategies(workload, len(rates_mbit)))
        medians: dict[str, list[float]] = {name: [] for name in plans}
        for number, name in enumerate(list(plans) * repeats):
            medians[name].append(_trial(world, number, plans[name]))
    return {
        name: statistics.stdev(values) / statistics.fmean(values)
        for name, values in medians.items()
    }


def _strategies(workload: Workload, workers: int) -> Iterator[tuple[str, Plan | None]]:
    yield "torch DDP", None
    yield "one bucket", plan(single_bucket(workload), workload, workers)
    yield (
        "reduce-scatter + all-gather",
        plan(reduce_scatter_all_gather(workload), workload, workers),
    )


def _trial(world: World, number: int, wanted: Plan | None) -> float:
    outcome = world.run_trial(
        TrialRequest(number, CURRENT_SETUP, Role.REFERENCE, WARMUP_STEPS, TIMED_STEPS), wanted
    )
    if not isinstance(outcome, Measured):
        raise SystemExit(f"a trial failed: {outcome.message}")
    return outcome.median_s


def parsed() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--only", choices=["goodput", "allreduce", "spread"], help="one part, for a first look"
    )
    parser.add_argument(
        "--clusters",
        nargs="*",
        default=list(CLUSTERS),
        choices=list(CLUSTERS),
        help="rates in Mbit/s (default: all)",
    )
    parser.add_argument("--probe-budget", default="40s", help="of `autotune probe` (default 40s)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=15,
        help="all-reduces per size, and trials per strategy (default 15)",
    )
    return parser.parse_args()


def main() -> int:
    options = parsed()
    if not can_emulate():
        return 2
    goodput: dict[str, tuple[float, float]] = {}
    all_reduce: dict[str, dict[int, float]] = {}
    spread: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.clusters:
            if options.only in (None, "goodput"):
                goodput[name] = goodput_errors(CLUSTERS[name], GOODPUT_ROUNDS)
                console.log(
                    f"{name} Mbit/s: goodput error {goodput[name][0]:.1%} between two hosts, "
                    f"{goodput[name][1]:.1%} in a ring"
                )
            if options.only in (None, "allreduce"):
                all_reduce[name] = all_reduce_errors(
                    CLUSTERS[name], options.probe_budget, options.repeats, Path(folder)
                )
                shown = ", ".join(
                    f"{size / 2**20:g} MiB {error:+.1%}" for size, error in all_reduce[name].items()
                )
                console.log(f"{name} Mbit/s: all-reduce against the fitted model: {shown}")
        if options.only in (None, "spread"):
            for example in ("resnet_digits.py", "gpt_text.py"):
                spread[example] = spreads(example, CLUSTERS["1000"], options.repeats, Path(folder))
                console.log(
                    f"{example} at 1000 Mbit/s: spread "
                    + ", ".join(f"{n} {value:.2%}" for n, value in spread[example].items())
                )
    result = {
        "goodput_error_max": max((max(pair) for pair in goodput.values()), default=None),
        "allreduce_error_max": max(
            (abs(e) for errors in all_reduce.values() for e in errors.values()), default=None
        ),
        "spread_max": max(
            (value for values in spread.values() for value in values.values()), default=None
        ),
        "network": "emulated",
        **machine(),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_benchmark(main)
