"""Measure a round of proposals by number of variables: `python -m benchmarks.proposal_time`.

How long does a job's first round take, against its share of the job's time, and how much memory?
The model has blocks of a small matrix and a vector, with times of 10 us per variable, on four
hosts with links of 10 Gbit/s. Each size runs in a process of its own, whose peak memory counts.
The CPU time shows how much other work interfered. The last line is one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import sys

from benchmarks.proposal_time.first_round import measured_round
from benchmarks.repository import machine, option_parser


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--variables", type=int, nargs="+", default=[1_000, 4_000, 20_000])
    parser.add_argument("--budget-s", type=float, default=600.0, help="of the job")
    options = parser.parse_args()
    rounds = []
    for variables in options.variables:
        with multiprocessing.get_context("spawn").Pool(1) as alone:
            rounds.append(alone.apply(measured_round, (variables, options.budget_s)))
        print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"budget_s": options.budget_s, "rounds": rounds, **machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
