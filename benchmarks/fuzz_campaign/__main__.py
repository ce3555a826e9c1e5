"""Can any file make the product fail? `python -m benchmarks.fuzz_campaign`.

Valid small samples of every kind of file (`readers.py`) are mutated: bytes flipped and cut off,
values replaced by hostile ones, types swapped, parts repeated, files replaced by FIFOs and devices.
Each of `--inputs` inputs is read in a worker process. `--command-line` of them go through the
console script's entry point, in a fork of a process that has loaded it, with exit status and stderr
checked. An input must be read or refused with an `AutotuneError` within 20 s and 2 GiB: any other
exception, a numpy warning, or nonsense that was accepted (a time below 0, not finite) counts among
`tracebacks`, the rest among `hangs` and `over_memory`. The memory limit counts address space.

An input depends on `--seed`, its reader and its number only: `--repeat READER:NUMBER` tries one
again in this process, with its full traceback. `--readers` restricts the campaign. The last line
is one JSON object; the exit status is 1 if there was any fault. It needs 2 cores and no root.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.fuzz_campaign.inputs import emptied, seeded, write_input
from benchmarks.fuzz_campaign.outcomes import FAULTS, Outcome, Tally
from benchmarks.fuzz_campaign.readers import BY_NAME, READERS
from benchmarks.fuzz_campaign.trial import COMMAND_LINE, reader_of, try_input
from benchmarks.fuzz_campaign.workers import parts_of, results
from benchmarks.repository import machine, option_parser

PROGRESS_S = 30.0


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="in all")
    parser.add_argument("--command-line", type=int, default=500, help="of them through `autotune`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--readers", nargs="+", choices=sorted(BY_NAME), default=sorted(BY_NAME))
    parser.add_argument("--repeat", metavar="READER:NUMBER", help="try one input again")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of --repeat: keep the files")
    options = parser.parse_args()
    if options.repeat:
        return _repeat(options)
    began_s = time.monotonic()
    tally = _run(options)
    _print_table(tally)
    result = {
        "inputs": tally.inputs,
        "command_line": sum(
            count.total() for name, count in tally.counts.items() if name.startswith(COMMAND_LINE)
        ),
        **{str(outcome): tally.total(outcome) for outcome in Outcome},
        "slowest_s": round(tally.slowest.seconds, 2),
        "slowest": tally.slowest.key,
        "readers": {
            name: {str(outcome): count for outcome, count in counts.items()}
            for name, counts in sorted(tally.counts.items())
        },
        "seed": options.seed,
        "seconds": round(time.monotonic() - began_s),
        **machine(),
    }
    print(json.dumps(result))
    return 1 if tally.faults else 0


def _run(options: argparse.Namespace) -> Tally:
    tally, shown_s = Tally(), time.monotonic()
    for result in results(parts_of(_inputs(options)), options.seed, options.processes):
        tally.add(result)
        if result.outcome in FAULTS:
            print(f"{result.outcome}: {result.key}\n{result.detail}\n", file=sys.stderr, flush=True)
        if time.monotonic() - shown_s > PROGRESS_S:
            shown_s = time.monotonic()
            print(
                f"{tally.inputs} of {options.inputs}, {len(tally.faults)} faults", file=sys.stderr
            )
    return tally


def _inputs(options: argparse.Namespace) -> dict[str, int]:
    """Reader -> number of inputs, by weight; those with a command share `--command-line`."""
    readers = [reader for reader in READERS if reader.name in options.readers]
    commands = [f"{COMMAND_LINE}{reader.name}" for reader in readers if reader.words]
    through_command = min(options.command_line, options.inputs) if commands else 0
    weights = {reader.name: reader.weight for reader in readers}
    return {
        **_shared(options.inputs - through_command, weights),
        **_shared(through_command, dict.fromkeys(commands, 1.0)),
    }


def _shared(total: int, weights: dict[str, float]) -> dict[str, int]:
    """`total` in whole parts that follow the weights."""
    counts, left, weight_left = {}, total, sum(weights.values())
    for name, weight in weights.items():
        counts[name] = round(left * weight / weight_left)
        left, weight_left = left - counts[name], weight_left - weight
    return counts


def _repeat(options: argparse.Namespace) -> int:
    """Try one input; a fault of a reader raises here, with its whole traceback."""
    name, _, number = options.repeat.rpartition(":")
    folder = options.keep or Path(tempfile.mkdtemp())
    if name.startswith(COMMAND_LINE):
        result = try_input(name, options.seed, int(number), folder)
        print(f"{result.outcome} in {result.seconds:.1f} s\n{result.detail}")
        return 1 if result.outcome in FAULTS else 0
    reader = reader_of(name)
    write_input(reader, seeded(options.seed, name, int(number)), emptied(folder))
    print(f"files: {folder}", file=sys.stderr)
    print(str(reader.read(folder))[:2000])
    return 0


def _print_table(tally: Tally) -> None:
    columns = [str(outcome) for outcome in Outcome]
    print(f"{'reader':24}" + "".join(f"{column:>13}" for column in columns))
    for name, counts in sorted(tally.counts.items()):
        print(f"{name:24}" + "".join(f"{counts[outcome]:13}" for outcome in Outcome))


if __name__ == "__main__":
    sys.exit(main())
