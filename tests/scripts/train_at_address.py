"""`ADDRESS run|shared|refusal`: runs a trial of `train_small.py` on two hosts, and prints JSON.

The working directory must contain the script; it is sent to the hosts. `ADDRESS stuck` reserves
room in a cluster after a line on stdin, with short deadlines, and prints the reason of the refusal.
"""

import json
import sys
from pathlib import Path

from autotune.deadlines import end_process
from autotune.errors import LaunchError
from autotune.records import Measured, Role, TrialRequest
from autotune.tuning import statistics
from runtime_rewriter.world.command import read_command
from runtime_rewriter.world.ray_cluster import Deadlines, RayCluster
from runtime_rewriter.world.ray_connection import RayPlace
from runtime_rewriter.world.ray_world import ray_world
from runtime_rewriter.world.views import Protected
from runtime_rewriter.world.world import World


def world(
    cluster: RayCluster, devices_per_host: tuple[int, ...], addresses: tuple[str, ...] = ()
) -> World:
    workers = sum(devices_per_host)
    command = read_command(
        ["torchrun", "--nproc-per-node", str(workers), str(Path("train_small.py").resolve())]
    )
    logs = Path("jobs/there/logs").resolve()
    return ray_world(
        cluster,
        command,
        workers,
        logs,
        60.0,
        240.0,
        statistics,
        probe_s=1.0,
        protected=Protected.of([Path.cwd()]),
        devices_per_host=devices_per_host,
        addresses=addresses,
    )


def refusal(
    cluster: RayCluster, devices_per_host: tuple[int, ...], addresses: tuple[str, ...] = ()
) -> str:
    """The reason why this layout is not placed, or the directory is not sent."""
    try:
        world(cluster, devices_per_host, addresses).profile()
    except LaunchError as error:
        return str(error)
    return ""


def refusal_at(address: str) -> str:
    """The same, or the reason why there is no connection."""
    try:
        cluster = RayCluster(RayPlace(address), 2)
    except LaunchError as error:
        return str(error)
    reason = refusal(cluster, (3, 1))
    cluster.close()
    return reason


def stuck(address: str) -> str:
    deadlines = Deadlines(start_s=240.0, answer_s=1.0, placement_s=1.0, shutdown_s=1.0)
    cluster = RayCluster(RayPlace(address, bare=True), 2, deadlines)
    print("connected", flush=True)
    sys.stdin.readline()
    try:
        cluster.reserve(2, ())
    except LaunchError as error:
        return str(error)
    finally:
        cluster.close()
    return ""


def main() -> None:
    address, mode = sys.argv[1:]
    if mode == "refusal":
        print(json.dumps({"refusal": refusal_at(address)}))
        return
    if mode == "stuck":
        print(json.dumps({"refusal": stuck(address)}))
        end_process(0)
    cluster = RayCluster(RayPlace(address, shared_directory=mode == "shared"), 2)
    spread = world(cluster, (1, 1), ("127.0.0.3", ""))
    outcome = spread.run_trial(TrialRequest(0, "current-setup", Role.REFERENCE, 1, 2), None)
    profile = spread.profile()
    launch = spread._script.placement.launch()
    spread.close()
    report = {
        "measured": isinstance(outcome, Measured),
        "outcome": str(outcome),
        "hosts": profile.hosts,
        "addresses": profile.addresses,
        "local_ranks": [environment["LOCAL_RANK"] for environment in launch.environments],
        "master": launch.environments[0]["MASTER_ADDR"],
        "views": [environment["AUTOTUNE_FILE_VIEW"] for environment in launch.environments],
        "logs_exist": [Path(path).is_file() for path in launch.log_paths],
        "logs_in_our_directory": Path("jobs").exists(),
        "refusal": refusal(cluster, (3, 1)),
        "unknown": refusal(cluster, (1, 1), ("127.0.0.3", "unknown.example")),
    }
    cluster.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
