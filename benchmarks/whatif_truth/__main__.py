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

Further parts: the messages of two ranks (`messages`), and published scaling tables (`scaling`,
needs the reference data). The part on this CPU runs only if it is named: `cpu`, or with more
options `python -m benchmarks.whatif_truth.cpu`. A run with `--cpu-folder` goes on where it was cut
off.

    python -m benchmarks.whatif_truth
    python -m benchmarks.whatif_truth --only gpu --folder datasets/gpu_traces/a100
    python -m benchmarks.whatif_truth --fit        # the factors, fitted on all models
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.repository import ROOT, machine, option_parser, run_benchmark
from benchmarks.whatif_truth import gpu
from benchmarks.whatif_truth.cpu import Run, cpu_result
from benchmarks.whatif_truth.messages import message_result
from benchmarks.whatif_truth.scaling import scaling_result

Result = tuple[str, Mapping[str, object]]


def gpu_result(folder: Path) -> Result:
    rows, unrecorded = gpu.judged_rows(folder)
    lines = [gpu.table(rows)]
    if unrecorded:
        lines.append(f"models with times but no recording in fp32: {', '.join(unrecorded)}")
    return "\n\n".join(lines), gpu.keys(rows)


def _cpu_result(folder: Path | None) -> Result:
    with tempfile.TemporaryDirectory() as scratch:
        return cpu_result(Run((folder or Path(scratch)).resolve()))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "datasets" / "gpu_traces" / "h100")
    parser.add_argument("--fit", action="store_true", help="print the factors and end")
    parts: dict[str, Callable[[], Result | None]] = {
        "gpu": lambda: gpu_result(options.folder),
        "messages": message_result,
        "scaling": scaling_result,
        "cpu": lambda: _cpu_result(options.cpu_folder),
    }
    parser.add_argument("--only", nargs="+", choices=list(parts), default=[*parts][:-1])
    parser.add_argument("--cpu-folder", type=Path, help="recordings and rows of the part on CPUs")
    options = parser.parse_args()
    if options.fit:
        print(gpu.fitted(options.folder))
        return
    line: dict[str, object] = {}
    for name in options.only:
        result = parts[name]()
        if result is not None:
            print(f"{result[0]}\n")
            line |= result[1]
    print(json.dumps(line | machine()))


if __name__ == "__main__":
    run_benchmark(main)
