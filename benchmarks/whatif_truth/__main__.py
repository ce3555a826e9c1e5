"""Judge what-ifs by measurements: `python -m benchmarks.whatif_truth`.

(a) For each model of `datasets/gpu_traces/h100`, or of another folder of `collect_gpu.py`, the
variants in `times.json` are predicted from the recording in fp32 alone. Factors are fitted on the
other models. The truth are unrecorded step times. All variants are in the table; those whose
issue time is 90 % of the step or more are host-bound and judged apart, because the host's times
there vary by up to half between runs.

- `error_mean`, `error_max`: relative errors of the step time over the judged variants.
- `skill`: 1 - error_mean / the error of "no change", the predicted step in fp32.
- `interval_coverage`: share of judged variants whose interval holds the measured median.
- `error_mean_paper`: with Daydream's own factors, over the variants that it has factors for;
  `error_mean_where_paper` is ours over the same ones.

    python -m benchmarks.whatif_truth
    python -m benchmarks.whatif_truth --folder datasets/gpu_traces/a100
    python -m benchmarks.whatif_truth --fit        # the factors, fitted on all models
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from benchmarks.repository import ROOT, machine, option_parser
from benchmarks.whatif_truth import gpu

PARTS = ("messages", "scaling", "cpu")
"""Further parts: modules with `main() -> dict`, which print their tables and return their keys."""


def gpu_part(folder: Path) -> dict[str, Any]:
    rows, unrecorded = gpu.judged_rows(folder)
    print(gpu.table(rows))
    if unrecorded:
        print(f"\nmodels with times but without a recording in fp32: {', '.join(unrecorded)}")
    return gpu.keys(rows)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "datasets" / "gpu_traces" / "h100")
    parser.add_argument("--only", nargs="+", choices=("gpu", *PARTS), default=None)
    parser.add_argument("--fit", action="store_true", help="print the factors and end")
    options = parser.parse_args()
    if options.fit:
        print(gpu.fitted(options.folder))
        return
    present = [name for name in PARTS if importlib.util.find_spec(f"{__package__}.{name}")]
    line: dict[str, Any] = {}
    for name in options.only or ("gpu", *(part for part in present if part != "cpu")):
        if name == "gpu":
            line |= gpu_part(options.folder)
        else:
            line |= importlib.import_module(f"{__package__}.{name}").main()
    print(json.dumps(line | machine()))


if __name__ == "__main__":
    main()
