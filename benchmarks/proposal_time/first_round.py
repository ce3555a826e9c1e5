"""The first round of proposals of a synthetic job, measured in this process."""

from __future__ import annotations

import resource
import time
from typing import Any

from autotune.cluster import Cluster, Host
from autotune.sampler.proposer import ROUND, Proposer
from autotune.simulators.registry import SIMULATORS
from autotune.tuning.events import Profiled
from autotune.tuning.history import History
from autotune.tuning.job import JobSpec
from autotune.workload import Variable, Workload

HOSTS = Cluster("four", tuple(Host(f"h{i}", 1, 1.25e9, 1e-4, 1e10, 1e-5) for i in range(4)))
SHAPES = (((64, 64), "weight"), ((64,), "bias"))
VARIABLE_S = 1e-5


def measured_round(variables: int, budget_s: float) -> dict[str, Any]:
    """Propose the first round of a job with this much time."""
    spec = JobSpec(("torchrun", "train.py"), HOSTS.world_size, HOSTS, max_seconds=budget_s)
    history = History((Profiled(blocks(variables), HOSTS, 0.0, {}),), spec.deviation)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    proposed = Proposer(spec, SIMULATORS).propose(history, 0, spec.top_k)
    return {
        "variables": variables,
        "share_s": ROUND * budget_s,
        "round_s": round(time.perf_counter() - began_s, 1),
        "cpu_s": round(time.process_time() - began_cpu_s, 1),
        "considered": proposed.considered,
        "proposed": len(proposed.proposals),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def blocks(variables: int) -> Workload:
    """Matrices and vectors in turn, ready and needed at even intervals."""
    listed = tuple(
        Variable(
            f"b{number // 2}.{name}",
            shape,
            ready_s=number * VARIABLE_S,
            needed_s=(variables - number) * VARIABLE_S,
        )
        for number in range(variables)
        for shape, name in [SHAPES[number % 2]]
    )
    pass_s = variables * VARIABLE_S
    return Workload("blocks", listed, (), pass_s, pass_s, 0.0)
