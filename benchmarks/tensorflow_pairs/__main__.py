"""All builders x all models of Table 1, rewritten: `python -m benchmarks.tensorflow_pairs`.

Does the TensorFlow rewriter synchronize each gradient exactly once, for every plan that a builder
makes within the step, as it is and with rows? Each model has the shapes of Table 1, a forward pass
and a loss. Ten of the pairs train: two servers in one process, a batch of four, the numerics gate
in both steps, and a finite loss. The servers need a network namespace of their own, so training
needs root. Each model is checked in its own process. `--kept FILE` keeps what has passed, so a run
that was cut off resumes. The last line is one JSON object: `pairs` and `failed` of the checks,
`trained` and `training_failed` of the runs, `one_client_per_rank`: pairs whose graphs split into
one client per rank, and `peak_mib`: memory of the largest process. The peak after each stage of a
training is printed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")

from benchmarks.repository import machine, option_parser
from benchmarks.tensorflow_pairs.pairs import Outcome, checked, own_peak_mib, trained

TRAINED = (
    ("resnet50", "ddp_25mib"),
    ("resnet50", "ps_load_balanced"),
    ("resnet101", "all_reduce_chunks_32"),
    ("inception-v3", "reduce_scatter_all_gather_25mib"),
    ("densenet121", "uneven_partitioned_ps"),
    ("densenet121", "horovod_64mib_5ms"),
    ("bert-3l", "partitioned_all_reduce"),
    ("bert-3l", "byteps_like"),
    ("bert-6l", "partitioned_ps"),
    ("transformer", "parallax"),
)
"""(Model, builder) of the pairs that train."""


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--models", nargs="+", help="of Table 1; all if left out")
    parser.add_argument("--skip-training", action="store_true", help="check the graphs only")
    parser.add_argument("--kept", type=Path, help="file of passed pairs, to resume from")
    options = parser.parse_args()
    from autotune.zoo.architectures import MODELS

    models = options.models or list(MODELS)
    kept = _Kept(options.kept)
    checks = [one for model in models for one in kept.outcomes(checked, model)]
    runs = []
    if not options.skip_training:
        wanted = [pair for pair in TRAINED if pair[0] in models]
        runs = [one for pair in wanted for one in kept.outcomes(trained, pair)]
    failed = [f"{one.pair}: {one.error}" for one in checks if one.error]
    training_failed = [f"{one.pair}: {one.error}" for one in runs if one.error]
    result = {
        "pairs": len(checks),
        "failed": len(failed),
        "one_client_per_rank": sum(one.splits for one in checks),
        "trained": len(runs),
        "training_failed": len(training_failed),
        "errors": failed + training_failed,
        "peak_mib": kept.peak_mib,
        **machine(),
    }
    print(json.dumps(result))
    return 1 if failed or training_failed else 0


class _Kept:
    """Outcomes of earlier runs in a file of JSON lines, one per call whose pairs all passed."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self._known = {key: value for line in lines for key, value in json.loads(line).items()}
        self.peak_mib = max((one["peak_mib"] for one in self._known.values()), default=0)

    def outcomes(self, work: Callable[[Any], Sequence[Outcome]], argument: Any) -> list[Outcome]:
        key = f"{work.__name__} {argument}"
        if key in self._known:
            return [Outcome(**one) for one in self._known[key]["outcomes"]]
        outcomes, peak_mib = _alone(work, argument)
        self.peak_mib = max(self.peak_mib, peak_mib)
        if self._file is not None and not any(one.error for one in outcomes):
            with self._file.open("a") as file:
                line = {key: {"outcomes": [asdict(one) for one in outcomes], "peak_mib": peak_mib}}
                file.write(f"{json.dumps(line)}\n")
        return outcomes


def _alone(work: Callable[[Any], Sequence[Outcome]], argument: Any) -> tuple[list[Outcome], int]:
    """Run in a process of its own, whose memory is free afterwards; return also its peak in MiB."""
    print(f"{work.__name__}: {argument}", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        try:
            outcomes = list(alone.submit(work, argument).result())
            peak_mib = alone.submit(own_peak_mib).result()
        except BrokenProcessPool:
            outcomes, peak_mib = [Outcome(str(argument), "the process was killed")], 0
    for one in outcomes:
        print(f"  {one.pair}: {one.error or 'ok'}", file=sys.stderr, flush=True)
    print(f"  {peak_mib} MiB", file=sys.stderr, flush=True)
    return outcomes, peak_mib


if __name__ == "__main__":
    sys.exit(main())
