"""A program that freezes a server of its own private Ray cluster, and prints what is left of it.

Or one whose server ends at its start.

It is a process of its own: a Ray that got stuck may keep its process from starting another one.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from pathlib import Path

from autotune.deadlines import end_process
from autotune.errors import LaunchError
from autotune.records import Measured, Role, TrialRequest
from autotune.tuning import statistics
from runtime_rewriter.world.command import read_command
from runtime_rewriter.world.ray_cluster import Deadlines, RayCluster, RayStuck
from runtime_rewriter.world.ray_connection import RayPlace
from runtime_rewriter.world.ray_folder import FOLDER_VARIABLE, processes_of
from runtime_rewriter.world.ray_world import ray_world

IN_A_HURRY = Deadlines(answer_s=5.0, placement_s=1.0, shutdown_s=5.0)
SCRIPT = Path(__file__).parents[1] / "scripts" / "train_small.py"


def frozen_gcs_server() -> str:
    """The refusal of a call to the cluster while its `gcs_server` is frozen."""
    cluster = RayCluster(RayPlace(), 1, IN_A_HURRY)
    freeze("gcs_server")
    try:
        cluster.reserve(1, ())
    except RayStuck as error:
        return str(error)
    finally:
        cluster.close()
    return "answered"


def frozen_raylet() -> str:
    """The outcome of a trial, after which the `raylet` freezes."""
    cluster = RayCluster(RayPlace(), 1, IN_A_HURRY)
    command = read_command(["torchrun", "--nproc-per-node", "1", str(SCRIPT)])
    world = ray_world(cluster, command, 1, Path("logs"), 60.0, 240.0, statistics)
    request = TrialRequest(0, "", Role.CANDIDATE, warmup_steps=1, timed_steps=3)
    outcome = world.run_trial(request, None)
    freeze("raylet")
    world.close()
    cluster.close()
    return "measured" if isinstance(outcome, Measured) else str(outcome)


def dead_raylet() -> str:
    """The refusal of a cluster whose raylet ends at once."""
    os.environ["RAY_AUTH_MODE"] = "token"  # Ray reads it as it is imported
    from ray._private import services

    services.RAYLET_EXECUTABLE = "/bin/false"
    try:
        RayCluster(RayPlace(), 1, IN_A_HURRY)
    except LaunchError as error:
        return str(error)
    return "started"


def freeze(server: str) -> None:
    """Stop a server of the running cluster; print the cluster's folder and its permissions."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    print(json.dumps([str(folder), stat.S_IMODE(folder.stat().st_mode)]))
    [process] = [
        process
        for process in processes_of(folder)
        if Path(f"/proc/{process}/exe").readlink().name == server
    ]
    os.kill(process, signal.SIGSTOP)


if __name__ == "__main__":
    modes = {"gcs_server": frozen_gcs_server, "raylet": frozen_raylet, "dead raylet": dead_raylet}
    print(json.dumps(modes[sys.argv[1]]()))
    end_process(0)
