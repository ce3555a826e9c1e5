"""Measure what packing, issuing and compressing cost a rank.

    python -m benchmarks.runtime_costs --ranks 4

See `autotune.jobs.campaign.runtime_costs`. The last line is one JSON object: name -> value.
"""

from __future__ import annotations

import json
import sys

from autotune.jobs.campaign.cost_processes import measured_costs
from autotune.jobs.campaign.step_costs import PAUSE_S
from benchmarks.repository import option_parser


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes that work at once (default 1)"
    )
    parser.add_argument(
        "--emulated", action="store_true", help="of ranks with emulated accelerators"
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=PAUSE_S,
        help=f"seconds between two pieces; 0: back to back (default {PAUSE_S:g})",
    )
    options = parser.parse_args()
    print(json.dumps(measured_costs(options.ranks, options.emulated, options.pause)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
