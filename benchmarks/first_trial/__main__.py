"""Measure the time to the first trial: `python -m benchmarks.first_trial` (root for four hosts).

How long does a user wait for the first result of `autotune tune`? It counts from the start of the
command to the end of the first candidate's trial. The example is `resnet_digits.py`, on two ranks
on loopback and on four emulated hosts with emulated accelerators. Each is started `--repeats` times
in turn, and interrupted after that trial. There is no competitor: the phases, as they arrive on
stderr, show what the time is spent on.

The last line is one JSON object. `loopback_s` and `four_hosts_s` are medians; the objects of the
same names without `_s` have, for each phase and for `until_reference` (the current setup's first
trial), the median and the range. `silence`: the longest time without a line. `load`: the load
average before each start, which is near 0 on a quiet machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise

from benchmarks.repository import (
    CLUSTERS,
    ROOT,
    can_emulate,
    child_process,
    machine,
    option_parser,
    run_benchmark,
)

PLACES = {
    "loopback": ["--", "torchrun", "--nproc-per-node", "2"],
    "four_hosts": [
        *("--testbed", str(CLUSTERS / "four_hosts.yaml"), "--accelerators", "emulated"),
        *("--", "python"),
    ],
}
SCRIPT = [str(ROOT / "examples" / "resnet_digits.py"), "--epochs", "1000"]
PHASES = {
    "command": r"\d (building a testbed|starting Ray$)",
    "testbed": r"\d starting Ray on the first host",
    "ray": r"\d placing the workers",
    "workers": r"\d starting the script on",
    "script": r"\d probing the links",
    "probe_and_profile": r"^profiled: ",
    "reference": r"\) reference 0 ",
    "proposals": r"\) round 0: \d",
    "trial": r"\) trial 1 ",
}
"""The line that ends each phase, in order."""
ABSENT = {"loopback": frozenset({"testbed"}), "four_hosts": frozenset[str]()}
"""Place -> phases that it does not have."""
LIMIT_S = 600.0
"""Time for one start; a quiet machine needs less than a tenth."""

Lines = list[tuple[float, str]]


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=list(PLACES), help="measure one place only")
    options = parser.parse_args()
    places = [options.only] if options.only else list(PLACES)
    if "four_hosts" in places and not can_emulate():
        return 2
    taken: dict[str, list[dict[str, float]]] = {place: [] for place in places}
    load: list[float] = []
    for number in range(options.repeats):
        for place in places:
            load.append(round(os.getloadavg()[0], 2))
            taken[place].append(durations(first_lines(place), place))
            print(f"{place} {number + 1}: {taken[place][-1]}", file=sys.stderr, flush=True)
    result: dict[str, object] = {}
    for place, runs in taken.items():
        result[f"{place}_s"] = _middle(runs, "total")
        result[place] = {
            name: [_middle(runs, name), min(_all(runs, name)), max(_all(runs, name))]
            for name in runs[0]
        }
    print(json.dumps({**result, "repeats": options.repeats, "load": load, **machine()}))
    return 0


def first_lines(place: str) -> Lines:
    """The lines of a job until its first candidate's trial, with the time since its start."""
    lines: Lines = []
    with tempfile.TemporaryDirectory() as directory:
        words = ["tune", "--directory", directory, "--budget-time", "10min", *PLACES[place]]
        began_s = time.monotonic()
        with child_process(
            [sys.executable, "-m", "autotune", *words, *SCRIPT],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "COLUMNS": "1000"},
        ) as job:
            limit = threading.Timer(LIMIT_S, job.send_signal, [signal.SIGINT])
            limit.start()
            assert job.stderr is not None
            for line in job.stderr:
                lines.append((time.monotonic() - began_s, line.rstrip()))
                if re.search(PHASES["trial"], line):
                    break
            job.send_signal(signal.SIGINT)
            job.communicate(timeout=LIMIT_S)
            limit.cancel()
    if not lines or not re.search(PHASES["trial"], lines[-1][1]):
        raise SystemExit("the job ended before a trial:\n" + "\n".join(line for _, line in lines))
    return lines


def durations(lines: Lines, place: str) -> dict[str, float]:
    """Seconds of each phase, until the reference, in all, and of the longest silence.

    Ends the benchmark if a phase of the place has no line: its time would count as another's.
    """
    seconds: dict[str, float] = {}
    before_s = until_reference_s = 0.0
    for name, pattern in PHASES.items():
        if name in ABSENT[place]:
            continue
        end_s = next((at_s for at_s, line in lines if re.search(pattern, line)), None)
        if end_s is None:
            raise SystemExit(
                f"{place}: no line ends the phase {name!r}; `autotune tune` has changed its lines, "
                f"so adapt PHASES:\n" + "\n".join(line for _, line in lines)
            )
        seconds[name] = round(end_s - before_s, 2)
        before_s = end_s
        if name == "reference":
            until_reference_s = end_s
    times_s = [0.0, *(at_s for at_s, _ in lines)]
    return seconds | {
        "until_reference": round(until_reference_s, 2),
        "total": round(before_s, 2),
        "silence": round(max(later - earlier for earlier, later in pairwise(times_s)), 2),
    }


def _all(runs: list[dict[str, float]], name: str) -> list[float]:
    return [run[name] for run in runs]


def _middle(runs: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(_all(runs, name)), 2)


if __name__ == "__main__":
    run_benchmark(main)
