"""Compare replayed with measured step times: `python -m benchmarks.replay_accuracy` (root).

It collects fresh trials (`benchmarks.replay_accuracy.trials`: three models on three emulated
clusters) and predicts each strategy from the profile, the probe and the runtime's costs, all
measured before the first trial. Nothing is fitted on the strategies under test. The analytic
estimate (`overlap_step_s`) is the comparison. `accuracy.csv` lists all strategies; the last line is
one JSON object. `benchmarks.ranking --dataset DIRECTORY` compares learned simulators.

With `--frameworks horovod` it predicts Horovod under settings that were never profiled instead
(`benchmarks.replay_accuracy.horovod`): the keys with `_horovod`, and `horovod.csv`; its scripts are
PyTorch's, or TensorFlow's with `--frameworks horovod_tensorflow`. With `--frameworks tensorflow` it
does so for graphs on TensorFlow's servers (`benchmarks.replay_accuracy.tensorflow`): the keys with
`_tensorflow`, and `tensorflow.csv`.

    python -m benchmarks.replay_accuracy --models layers --clusters four_hosts --strategies 12
    python -m benchmarks.replay_accuracy --frameworks horovod horovod_tensorflow tensorflow
    python -m benchmarks.replay_accuracy --folder DIRECTORY --only-evaluate
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from autotune.dataset.trials import Domain
from autotune.jobs.campaign.domain_features import domain_extractor
from autotune.simulators.evaluation import kendall_tau
from autotune.strategy_space.plan import Plan, PlannedStrategy, plan
from benchmarks.replay_accuracy import horovod
from benchmarks.replay_accuracy.trials import (
    ALL_CLUSTERS,
    ALL_MODELS,
    CLUSTERS,
    MODELS,
    collect,
    collected,
)
from benchmarks.repository import (
    can_emulate,
    emulated_setting,
    option_parser,
    run_benchmark,
    setup_of,
)

console = Console(stderr=True, highlight=False, markup=False)


@dataclass(frozen=True)
class PredictedStep:
    """One strategy: medians and predictions in seconds."""

    domain: str
    kind: str
    source: str
    messages: int
    measured_s: float
    spread: float
    replayed_s: float
    analytic_s: float
    overrun: float
    load: float

    @property
    def error(self) -> float:
        return abs(self.replayed_s / self.measured_s - 1)

    @property
    def analytic_error(self) -> float:
        return abs(self.analytic_s / self.measured_s - 1)


def kind_of(wanted: Plan) -> str:
    """Describe a plan: across the step or not, by which synchronizers, compressed or not."""
    when = "across the step" if wanted.cross_step else "within the step"
    primitives = {message.synchronizer.operation for message in wanted.messages}
    how = primitives.pop().replace("_", " ") if len(primitives) == 1 else "mixed"
    compressors = {message.compressor.value for message in wanted.messages} - {"none"}
    return f"{when}, {how}, {'compressed' if compressors else 'uncompressed'}"


def rows_of(domain: Domain) -> list[PredictedStep]:
    """Return one row per strategy, with the median of its medians."""
    extractor = domain_extractor(domain)
    medians: dict[str, list[float]] = {}
    for trial in domain.trials:
        if trial.strategy is not None and trial.step_s:
            medians.setdefault(trial.strategy.id, []).append(trial.median_s)
    rows, plan_ids = [], set()
    for trial in domain.trials:
        if trial.strategy is None or not trial.step_s or trial.strategy.id in plan_ids:
            continue
        plan_ids.add(trial.strategy.id)
        wanted = plan(trial.strategy, domain.workload, domain.cluster.world_size)
        low, middle, high = np.quantile(trial.step_s, [0.25, 0.5, 0.75])
        rows.append(
            PredictedStep(
                domain.name,
                kind_of(wanted),
                trial.source,
                len(wanted.messages),
                float(np.median(medians[trial.strategy.id])),
                float((high - low) / middle),
                extractor.steps.step_s(wanted),
                extractor.features(PlannedStrategy(trial.strategy, wanted)).analytic_step_s,
                trial.overrun or 0.0,
                trial.load,
            )
        )
    return rows


def summary(rows: Sequence[PredictedStep]) -> dict[str, float]:
    errors, analytic = [row.error for row in rows], [row.analytic_error for row in rows]
    return {
        "strategies": len(rows),
        "error_mean": float(np.mean(errors)),
        "error_p90": float(np.quantile(errors, 0.9)),
        "bias": float(np.mean([row.replayed_s / row.measured_s - 1 for row in rows])),
        "analytic_error_mean": float(np.mean(analytic)),
        "analytic_error_p90": float(np.quantile(analytic, 0.9)),
    }


def taus(rows: Sequence[PredictedStep]) -> tuple[float, float]:
    """Return Kendall's tau of the replay and of the analytic estimate, mean over the domains."""
    names = sorted({row.domain for row in rows})
    values = []
    for name in names:
        of_domain = [row for row in rows if row.domain == name]
        measured = [row.measured_s for row in of_domain]
        values.append(
            (
                len(of_domain),
                kendall_tau([r.replayed_s for r in of_domain], measured),
                kendall_tau([r.analytic_s for r in of_domain], measured),
            )
        )
    table = np.array(values)
    replayed, analytic = np.average(table[:, 1:], axis=0, weights=table[:, 0]).tolist()
    return float(replayed), float(analytic)


def write_table(rows: Sequence[PredictedStep], path: Path) -> None:
    columns = (
        "domain",
        "kind",
        "source",
        "messages",
        "measured_s",
        "spread",
        "replayed_s",
        "analytic_s",
        "overrun",
        "load",
    )
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows([getattr(row, column) for column in columns] for row in rows)


def shown(title: str, rows: Sequence[PredictedStep]) -> str:
    figures = summary(rows)
    return (
        f"{title:62} {figures['strategies']:3d}  error {figures['error_mean']:6.1%}  "
        f"p90 {figures['error_p90']:6.1%}  "
        f"bias {figures['bias']:+6.1%}  analytic {figures['analytic_error_mean']:6.1%}"
    )


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("accuracy-trials"),
        help="where trials are kept (default accuracy-trials)",
    )
    parser.add_argument(
        "--frameworks",
        nargs="+",
        default=["torch"],
        choices=["torch", *horovod.FRAMEWORKS, "tensorflow"],
        help="what is predicted (default torch)",
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(ALL_MODELS))
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS), choices=list(ALL_CLUSTERS))
    parser.add_argument(
        "--strategies",
        type=int,
        default=12,
        help="per model and cluster (default 12, so 108 in all)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-evaluate", action="store_true", help="of what lies in the folder")
    options = parser.parse_args()
    result: dict[str, object] = {}
    for name in horovod.FRAMEWORKS:
        if name in options.frameworks:
            if not can_emulate():
                return 2
            result |= horovod.measure(options.folder / name, console.log, name)
    if "tensorflow" in options.frameworks:
        from benchmarks.replay_accuracy import tensorflow

        if not options.only_evaluate and not can_emulate():
            return 2
        result |= tensorflow.measure(
            options.folder / "tensorflow", console.log, options.only_evaluate
        )
    if "torch" in options.frameworks:
        accuracy = torch_accuracy(options)
        if accuracy is None:
            return 2
        result |= accuracy
    print(json.dumps({**result, **emulated_setting()}))
    return 0


def torch_accuracy(options: argparse.Namespace) -> dict[str, object] | None:
    """Collect and predict strategies of our runtime; None, with the reason, if there are none."""
    setups = [setup_of(model, cluster) for model in options.models for cluster in options.clusters]
    if not options.only_evaluate:
        if not can_emulate():
            return None
        for setup in setups:
            collect(options.folder, setup, options.strategies, options.seed, console.log)
    domains = [
        domain for setup in setups if (domain := collected(options.folder, setup)) is not None
    ]
    rows = [row for domain in domains for row in rows_of(domain)]
    if not rows:
        print(
            f"{options.folder} holds no trials of {', '.join(options.models)}; collect some first",
            file=sys.stderr,
        )
        return None
    write_table(rows, options.folder / "accuracy.csv")
    for title in sorted({row.domain for row in rows}):
        print(shown(title, [row for row in rows if row.domain == title]))
    kinds = sorted({row.kind for row in rows})
    for kind in kinds:
        print(shown(kind, [row for row in rows if row.kind == kind]))
    replayed, analytic = taus(rows)
    return {
        **summary(rows),
        "kendall_tau": replayed,
        "analytic_kendall_tau": analytic,
        "by_kind": {kind: summary([row for row in rows if row.kind == kind]) for kind in kinds},
        "overrun_median": float(np.median([row.overrun for row in rows])),
        "load_median": float(np.median([row.load for row in rows])),
    }


if __name__ == "__main__":
    run_benchmark(main)
