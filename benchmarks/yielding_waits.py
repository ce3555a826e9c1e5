"""Do waits by `sched_yield` get the CPU back in time? `python -m benchmarks.yielding_waits`

Horovod waits for an operation by `sched_yield` in a loop (`WaitAndClear` in mpi_ops_v2.cc). Here
processes wait in this way, or by sleeping 100 us at a time, beside others that compute without end
and so keep every core busy. Both ways take turns, in rounds.

`longest_yielding_s`, `longest_sleeping_s`: the longest time in a round between two turns of any
waiting process; the median and the maximum over all rounds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from statistics import median

from benchmarks.repository import machine, option_parser

SLEEP_S = 1e-4


def compute_until(end_s: float) -> None:
    while time.monotonic() < end_s:
        sum(range(10_000))


def wait_until(end_s: float, yields: bool, sending: Connection) -> None:
    """Sends the longest time between two turns in seconds."""
    longest_s, last_s = 0.0, time.monotonic()
    while last_s < end_s:
        if yields:
            os.sched_yield()
        else:
            time.sleep(SLEEP_S)
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    sending.send(longest_s)


def longest_gap_s(yields: bool, waiting: int, busy: int, seconds: float) -> float:
    context = multiprocessing.get_context("fork")
    end_s = time.monotonic() + seconds
    pipes = [context.Pipe(duplex=False) for _ in range(waiting)]
    processes = [context.Process(target=compute_until, args=(end_s,)) for _ in range(busy)]
    processes += [
        context.Process(target=wait_until, args=(end_s, yields, sending)) for _, sending in pipes
    ]
    for process in processes:
        process.start()
    try:
        gaps_s = [receiving.recv() for receiving, _ in pipes if receiving.poll(10 * seconds)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    if len(gaps_s) < waiting:
        raise SystemExit(f"{waiting - len(gaps_s)} processes did not answer within {10 * seconds}")
    return float(max(gaps_s))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each way in each round")
    parser.add_argument("--waiting", type=int, default=3, help="processes that wait")
    parser.add_argument("--busy", type=int, help="processes that compute; default two per core")
    options = parser.parse_args()
    busy = options.busy or 2 * len(os.sched_getaffinity(0))
    gaps_s: dict[bool, list[float]] = {True: [], False: []}
    for number in range(options.rounds):
        for yields in (True, False):
            gap_s = longest_gap_s(yields, options.waiting, busy, options.seconds)
            gaps_s[yields].append(gap_s)
            print(
                f"round {number + 1} of {options.rounds}, {'yielding' if yields else 'sleeping'}: "
                f"longest gap {gap_s:.3f} s",
                file=sys.stderr,
                flush=True,
            )
    result: dict[str, object] = {"kernel": os.uname().release, "busy": busy, **machine()}
    for yields, name in ((True, "longest_yielding_s"), (False, "longest_sleeping_s")):
        result[name] = {"median": median(gaps_s[yields]), "max": max(gaps_s[yields])}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
