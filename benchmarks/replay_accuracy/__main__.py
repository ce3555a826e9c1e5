"""Compare replayed with measured step times: `python -m benchmarks.replay_accuracy` (root).

It collects fresh trials (`benchmarks.replay_accuracy.trials`: three models on three emulated
clusters) at one commit and predicts each strategy from the profile, the probe and the runtime's
costs, all measured before the first trial. Nothing is fitted on the strategies under test. The
analytic estimate (`overlap_step_s`) is the comparison. Only the strategies that `--seed` and
`--strategies` draw count, so give `--only-evaluate` those of the collection. `accuracy.csv` lists
all of them that were measured. Keys: `failed` (with the reasons), `missing` (without a trial),
`disturbed` (rows of disturbed trials, which count), `others` (trials that do not count), `commits`.
`benchmarks.ranking --dataset DIRECTORY` compares learned simulators.

With `--frameworks horovod` it predicts Horovod under settings that were never profiled instead
(`benchmarks.replay_accuracy.horovod`): the keys with `_horovod`, and `horovod.csv`; its scripts are
PyTorch's, or TensorFlow's with `--frameworks horovod_tensorflow`. With `--frameworks tensorflow` it
does so for graphs on TensorFlow's servers (`benchmarks.replay_accuracy.tensorflow`): the keys with
`_tensorflow`, and `tensorflow.csv`. After each framework it prints a JSON object of all keys so
far, so the last line is complete up to the framework that failed.

    python -m benchmarks.replay_accuracy --models layers --clusters four_hosts --strategies 12
    python -m benchmarks.replay_accuracy --frameworks horovod horovod_tensorflow tensorflow
    python -m benchmarks.replay_accuracy --folder DIRECTORY --only-evaluate --seed 20261126
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console

from autotune.errors import InvalidInput
from autotune.jobs.campaign.commit import checkout_commit, commits_in, demand_one_commit
from autotune.jobs.campaign.setups import Setup
from benchmarks.replay_accuracy import horovod
from benchmarks.replay_accuracy.predicted_steps import (
    Counts,
    DomainSteps,
    shown,
    steps_of,
    summary,
    taus,
    write_table,
)
from benchmarks.replay_accuracy.trials import (
    ALL_CLUSTERS,
    ALL_MODELS,
    CLUSTERS,
    MODELS,
    collect,
    collected,
    strategies,
)
from benchmarks.repository import (
    can_emulate,
    emulated_setting,
    option_parser,
    run_benchmark,
    setup_of,
)

TORCH, TENSORFLOW = "torch", "tensorflow"
FRAMEWORKS = (*horovod.FRAMEWORKS, TENSORFLOW, TORCH)
DEFAULTS = {"models": list(MODELS), "clusters": list(CLUSTERS), "strategies": 12, "seed": 0}
"""Defaults of the options that apply to torch alone."""

console = Console(stderr=True, highlight=False, markup=False)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options, by default those of the command line."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    folder = Path("accuracy-trials")
    add("--folder", type=Path, default=folder, help=f"where trials are kept (default {folder})")
    add(
        "--frameworks",
        nargs="+",
        default=[TORCH],
        choices=FRAMEWORKS,
        help="what is predicted (default torch)",
    )
    add("--models", nargs="+", choices=list(ALL_MODELS), help="of torch")
    add("--clusters", nargs="+", choices=list(ALL_CLUSTERS), help="of torch")
    add(
        "--strategies", type=int, help="of torch, per model and cluster (default 12, so 108 in all)"
    )
    add("--seed", type=int, help="of torch (default 0)")
    add("--any-commit", action="store_true", help="of torch: go on at another commit")
    add("--only-evaluate", action="store_true", help="of what lies in the folder")
    options = parser.parse_args(words)
    given = [name for name in DEFAULTS if getattr(options, name) is not None]
    given += ["any-commit"] if options.any_commit else []
    if given and TORCH not in options.frameworks:
        parser.error(
            f"--{given[0]} applies to --frameworks {TORCH} alone, but the frameworks are "
            f"{', '.join(options.frameworks)}; leave it out"
        )
    if options.any_commit and options.only_evaluate:
        parser.error("--any-commit is for a collection, but --only-evaluate is given; drop one")
    for name, default in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.strategies < 1:
        parser.error(f"--strategies must be at least 1, but is {options.strategies}")
    return options


def main() -> int:
    options = parsed()
    if not options.only_evaluate and not can_emulate():
        return 2
    result: dict[str, object] = {}
    for name in FRAMEWORKS:
        if name not in options.frameworks:
            continue
        figures = figures_of(name, options)
        if figures is None:
            return 2
        result |= figures
        print(json.dumps({**result, **emulated_setting()}), flush=True)
    return 0


def figures_of(name: str, options: argparse.Namespace) -> Mapping[str, object] | None:
    """Measure and predict one framework; None, with the reason, if there is nothing to predict."""
    if name == TORCH:
        return torch_accuracy(options)
    folder, only_evaluate = options.folder / name, options.only_evaluate
    if name in horovod.FRAMEWORKS:
        return horovod.measure(folder, console.log, name, only_evaluate=only_evaluate)
    from benchmarks.replay_accuracy import tensorflow

    return tensorflow.measure(folder, console.log, only_evaluate)


def torch_accuracy(options: argparse.Namespace) -> dict[str, object] | None:
    """Collect and predict strategies of our runtime; None, with the reason, if there are none."""
    setups = [setup_of(model, cluster) for model in options.models for cluster in options.clusters]
    if not options.only_evaluate and not collect_all(setups, options):
        return None
    domains = evaluated(setups, options)
    rows = [row for domain in domains for row in domain.rows]
    counts = Counts.of(domains)
    if not rows:
        print(
            f"{options.folder} holds no measured trials of the {options.strategies} strategies of "
            f"seed {options.seed} for {', '.join(options.models)}; collect some first, or give the "
            "collection's --seed and --strategies",
            *counts.lines(),
            sep="\n",
            file=sys.stderr,
        )
        return None
    write_table(rows, options.folder / "accuracy.csv")
    for domain in domains:
        if domain.rows:
            print(shown(domain.domain, domain.rows))
    kinds = sorted({row.kind for row in rows})
    for kind in kinds:
        print(shown(kind, [row for row in rows if row.kind == kind]))
    print(*counts.lines(), sep="\n")
    replayed, analytic = taus(rows)
    return {
        **summary(rows),
        "kendall_tau": replayed,
        "analytic_kendall_tau": analytic,
        "by_kind": {kind: summary([row for row in rows if row.kind == kind]) for kind in kinds},
        "overrun_median": float(np.median([row.overrun for row in rows])),
        "load_median": float(np.median([row.load for row in rows])),
        **asdict(counts),
    }


def collect_all(setups: Sequence[Setup], options: argparse.Namespace) -> bool:
    """Collect at one commit; False, with the reason, if the folder has trials of another one."""
    if not options.any_commit:
        try:
            demand_one_commit(commits_in(options.folder), checkout_commit())
        except InvalidInput as error:
            print(f"{error}; --any-commit goes on all the same", file=sys.stderr)
            return False
    for setup in setups:
        collect(options.folder, setup, options.strategies, options.seed, console.log)
    return True


def evaluated(setups: Sequence[Setup], options: argparse.Namespace) -> list[DomainSteps]:
    """Predict the drawn strategies of every domain that the folder has."""
    steps = []
    for setup in setups:
        domain = collected(options.folder, setup)
        if domain is None:
            continue
        workload, cluster = domain.workload, domain.cluster
        drawn = strategies(workload, cluster, options.strategies, options.seed)
        steps.append(steps_of(domain, drawn))
    return steps


if __name__ == "__main__":
    run_benchmark(main)
