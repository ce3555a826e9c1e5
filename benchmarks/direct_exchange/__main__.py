"""Measure direct exchange against gloo's ring: `python -m benchmarks.direct_exchange` (root).

A stream of 16 MiB is summed between four emulated hosts with one rank each (network namespaces with
shaped links: transfers are real), through plans and the exchange of the torch runtime. Hosts have
2000, 1000, 1000 and 500 Mbit/s (mixed) or 1000 Mbit/s each (even). The ring is gloo's all-reduce in
messages of five sizes, with 1 to 8 in flight or without a limit, as within a step. The direct
exchange has four messages, in pieces of four sizes, with 1 to 8 in flight; its shares follow the
bandwidths. Rounds of all settings are interleaved. The first half of the rounds chooses each side's
fastest setting, by the median. The figures are of the other rounds: a ratio is the median of
time(ring) / time(direct), above 1 where the direct exchange is faster.

The other parts compare with today's stars of a parameter server: `servers` sends the stream in
messages with one server each, `small` 64 messages of 16 KiB. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.cluster import Cluster, Host
from autotune.cluster_file import cluster_yaml
from autotune.testbed.bed import running
from benchmarks.direct_exchange.figures import FEWEST_ROUNDS, compared
from benchmarks.direct_exchange.settings import only_error
from benchmarks.repository import can_emulate, last_json, machine, option_parser, run_benchmark
from benchmarks.testbed_fidelity.processes import WAIT_S, first_rank_output

CLUSTERS = {"mixed": (2000, 1000, 1000, 500), "even": (1000, 1000, 1000, 1000)}  # Mbit/s
PARTS = {"ring": ("ring", ""), "servers": ("star", ""), "small": ("star", "_small")}
"""Part -> what it compares with, and the end of its keys."""
MASTER_PORT = 29430
SLOW_ROUND_S = 60.0  # more than one round of all settings


def cluster_of(rates_mbit: Sequence[int]) -> Cluster:
    hosts = tuple(
        Host(f"h{number}", 1, rate * 1e6 / 8, 5e-5, 1e10, 5e-6)
        for number, rate in enumerate(rates_mbit)
    )
    return Cluster("direct", hosts)


def measured(cluster: Cluster, part: str, rounds: int, only: Sequence[str]) -> dict[str, Any]:
    """Return the findings of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(cluster_yaml(cluster))
        with running(cluster, name=f"direct-{os.getpid()}") as bed:
            words = [str(file), part, str(rounds), *only]
            wait_s = WAIT_S + rounds * SLOW_ROUND_S
            module = "benchmarks.direct_exchange.rank"
            return last_json(first_rank_output(bed, module, words, MASTER_PORT, wait_s))


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options, by default those of the command line."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=10,
        help=f"per cluster, at least {FEWEST_ROUNDS} (default 10); the first half chooses settings",
    )
    parser.add_argument("--only", nargs="*", default=[], help="names of direct settings to measure")
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), choices=list(CLUSTERS))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args(words)
    if options.rounds < FEWEST_ROUNDS:
        parser.error(
            f"--rounds must be at least {FEWEST_ROUNDS}, so that each half has two, but is "
            f"{options.rounds}"
        )
    error = only_error(options.parts, cluster_of(CLUSTERS["mixed"]), options.only)
    if error is not None:
        parser.error(error)
    return options


def main() -> int:
    options = parsed()
    if not can_emulate():
        return 2
    result: dict[str, Any] = {"same_bits": True}
    for part, name in itertools.product(options.parts, options.clusters):
        findings = measured(cluster_of(CLUSTERS[name]), part, options.rounds, options.only)
        other, suffix = PARTS[part]
        result |= compared(name + suffix, other, findings["taken_s"])
        result["same_bits"] &= findings["same_bits"]
    load = os.getloadavg()[0]
    print(json.dumps({**result, "load": load, "network": "emulated", **machine()}))
    return 0


if __name__ == "__main__":
    run_benchmark(main)
