"""How much a trial of the current setup differs from its repeats, with real and with emulated accelerators, on loopback.

    python -m benchmarks.emulation_spread --ranks 2 --accelerators emulated --trials 10

Prints one line of JSON: the median step in ms, the spread of the trials' medians (largest minus smallest, and standard
deviation, both relative), whether round-robin scheduling held, and the largest overrun.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median, pstdev

from autotune.errors import LaunchError
from autotune.records import CURRENT_SETUP, Accelerators, Conditions, Measured, Network, Role, TrialRequest
from runtime_rewriter.command import read_command
from runtime_rewriter.ray_world import RayCluster, RayPlace, ray_world
from runtime_rewriter.world import World

WARMUP_STEPS, TIMED_STEPS = 2, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accelerators", choices=[member.value for member in Accelerators], default="emulated")
    parser.add_argument("--default-scheduling", action="store_true", help="no round-robin scheduling, whatever the policy says")
    parser.add_argument("--round-robin", action="store_true", help="ask for it, whatever the policy says")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--script", default="examples/resnet_digits.py")
    options = parser.parse_args()
    accelerators = Accelerators(options.accelerators)
    wanted = options.round_robin or (accelerators is Accelerators.EMULATED and not options.default_scheduling)
    conditions = Conditions(Network.LOOPBACK, accelerators, round_robin=wanted)
    command = read_command(["torchrun", "--nproc-per-node", str(options.ranks), options.script, "--epochs", "1000"])
    with tempfile.TemporaryDirectory() as logs:
        cluster = RayCluster(RayPlace(), options.ranks)
        try:
            world = ray_world(cluster, command, options.ranks, Path(logs), 120.0, 120.0, conditions=conditions)
            try:
                print(
                    json.dumps({"ranks": options.ranks, "accelerators": accelerators.value, **_spread(world, options.trials, accelerators)})
                )
            finally:
                world.close()
        finally:
            cluster.close()


def _spread(world: World, trials: int, accelerators: Accelerators) -> dict[str, float | bool | None]:
    profiled_s = world.profile().workload.compute_s if accelerators is Accelerators.EMULATED else None
    outcomes = [_trial(world, number) for number in range(trials)]
    medians_s = [outcome.median_s for outcome in outcomes]
    middle_s = median(medians_s)
    return {
        "round_robin": world.round_robin(),
        "profile_ms": None if profiled_s is None else round(1e3 * profiled_s, 1),
        "median_ms": round(1e3 * middle_s, 1),
        "spread": round((max(medians_s) - min(medians_s)) / middle_s, 4),
        "deviation": round(pstdev(medians_s) / middle_s, 4),
        "overrun_max": max((outcome.overrun for outcome in outcomes if outcome.overrun is not None), default=None),
    }


def _trial(world: World, number: int) -> Measured:
    outcome = world.run_trial(TrialRequest(number, CURRENT_SETUP, Role.REFERENCE, WARMUP_STEPS, TIMED_STEPS), None)
    if not isinstance(outcome, Measured):
        raise LaunchError(f"trial {number} failed ({outcome.kind}): {outcome.message}")
    return outcome


if __name__ == "__main__":
    main()
