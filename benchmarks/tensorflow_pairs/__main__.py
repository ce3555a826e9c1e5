"""All builders x all models of Table 1, rewritten: `python -m benchmarks.tensorflow_pairs`.

Does the TensorFlow rewriter synchronize each gradient exactly once, for every plan that a builder
makes within the step, as it is and with rows? Each model has the shapes of Table 1, a forward pass
and a loss. Ten of the pairs train: two servers in one process, a batch of four, the numerics gate
in both steps, and a finite loss. The servers need a network namespace of their own, so training
needs root. Each model is checked in its own process. The last line is one JSON object: `pairs` and
`failed` of the checks, `trained` and `training_failed` of the runs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")

from benchmarks.repository import machine, option_parser
from benchmarks.tensorflow_pairs.pairs import checked, trained

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
    options = parser.parse_args()
    from autotune.zoo.architectures import MODELS

    models = options.models or list(MODELS)
    started_s = time.monotonic()
    checks = [one for model in models for one in _alone(checked, model)]
    runs = []
    if not options.skip_training:
        runs = [_alone(trained, pair) for pair in TRAINED if pair[0] in models]
    failed = [f"{pair}: {error}" for pair, error in checks if error]
    training_failed = [f"{pair}: {error}" for pair, error in runs if error]
    result = {
        "pairs": len(checks),
        "failed": len(failed),
        "trained": len(runs),
        "training_failed": len(training_failed),
        "errors": failed + training_failed,
        "wall_s": round(time.monotonic() - started_s),
        **machine(),
    }
    print(json.dumps(result))
    return 1 if failed or training_failed else 0


def _alone(work: Callable[[Any], Any], argument: Any) -> Any:
    """Run in a process of its own, whose memory is free afterwards."""
    print(f"{work.__name__}: {argument}", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        result = alone.submit(work, argument).result()
    for pair, error in result if isinstance(result, list) else [result]:
        print(f"  {pair}: {error or 'ok'}", file=sys.stderr, flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
