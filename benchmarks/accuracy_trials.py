"""Fresh trials on emulated clusters, for `benchmarks.replay_accuracy`: strategies of every kind, measured as the tuner measures them.

Hosts are network namespaces of this machine, transfers are real, and computation is timed waits of what one replica alone takes.
A domain is one model on one cluster. Its folder keeps `domain.json` (workload, cluster with what the probe fitted, the runtime's costs) and
`trials.jsonl`, one line per trial, written as it ends; a run that was stopped goes on with the strategies that have no line.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.commands.emulation import scheduled
from autotune.commands.places import Ranks, Where, placed_world
from autotune.commands.probe import measured_cluster
from autotune.errors import LaunchError
from autotune.records import CURRENT_SETUP, Accelerators, Conditions, Measured, Network, Role, TrialRequest
from autotune.rng import generator
from autotune.sampler.random import sample_many
from autotune.strategy_space.builders.catalogue import seed_strategies
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.space import SearchSpace
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload
from benchmarks.cross_step_model import workload as layers_workload
from benchmarks.runtime_costs import measured_costs
from benchmarks.testbed_processes import ROOT
from runtime_rewriter.command import read_command
from runtime_rewriter.findings import Probe
from runtime_rewriter.world import World

WARMUP_STEPS, TIMED_STEPS, MOST_STEPS, PRECISION = 3, 8, 24, 0.01
PROBE_S = 60.0
PROBES = 3
REFERENCE_EVERY = 8
SCRIPTS = {
    "resnet_digits": ("examples/resnet_digits.py", "--epochs", "100000"),
    "gpt_text": ("examples/gpt_text.py", "--epochs", "100000"),
    "layers": ("benchmarks/layers_script.py",),
}
UPDATE_S = 0.0035
"""Of the parameters' model: what torch's SGD with momentum takes for its 5 million parameters on one thread here."""
PROFILES: dict[str, Callable[[], Workload]] = {"layers": lambda: replace(layers_workload(), update_s=UPDATE_S)}
CLUSTERS = {"four_hosts": "even", "four_hosts_uneven": "uneven", "two_hosts_two_devices": "two devices a host"}


@dataclass(frozen=True)
class Trial:
    """`step_s`: every timed step on the rank that was slowest in it."""

    source: str
    strategy: Strategy | None
    step_s: tuple[float, ...]
    overrun: float | None
    load: float
    failure: str = ""


@dataclass(frozen=True)
class Domain:
    model: str
    cluster_name: str
    workload: Workload
    cluster: Cluster
    costs: dict[str, float]
    cores: int
    trials: tuple[Trial, ...]

    @property
    def name(self) -> str:
        return f"{self.model} on {self.cluster_name}"


def domain_folder(folder: Path, model: str, cluster: str) -> Path:
    return folder / f"{model}.{cluster}"


def read_domain(folder: Path, model: str, cluster: str) -> Domain | None:
    """What was collected, or None."""
    own = domain_folder(folder, model, cluster)
    if not (own / "domain.json").exists():
        return None
    told = json.loads((own / "domain.json").read_text())
    lines = (own / "trials.jsonl").read_text().splitlines() if (own / "trials.jsonl").exists() else []
    trials = tuple(_trial(json.loads(line)) for line in lines)
    costs, cores = {name: float(value) for name, value in told["costs"].items()}, int(told["cores"])
    return Domain(model, cluster, Workload.from_data(told["workload"]), Cluster.from_data(told["cluster"]), costs, cores, trials)


def _trial(data: dict[str, Any]) -> Trial:
    strategy = Strategy.from_data(data["strategy"]) if data["strategy"] else None
    return Trial(data["source"], strategy, tuple(data["step_s"]), data["overrun"], data["load"], data.get("failure", ""))


def strategies(workload: Workload, cluster: Cluster, count: int, seed: int) -> list[tuple[str, Strategy]]:
    """(where it is from, strategy): a third hand-made ones, a third drawn without and a third with compression."""
    lossless, lossy = SearchSpace.default(), SearchSpace.default(lossy=True)
    made = seed_strategies(workload, cluster, lossy)
    order = generator(seed, "accuracy", workload.id, cluster.id).permutation(len(made)).tolist()
    third = count // 3
    chosen = [made[index] for index in order[:third]]
    left = count - len(chosen)
    drawn = [("sampled", strategy) for strategy in sample_many(workload, cluster, lossless, left - left // 2, seed)]
    drawn += [("sampled, lossy", strategy) for strategy in sample_many(workload, cluster, lossy, left // 2, seed + 1)]
    both = [*chosen, *drawn]
    mixed = generator(seed, "order", workload.id).permutation(len(both)).tolist()
    return [both[index] for index in mixed]


def collect(folder: Path, model: str, cluster_name: str, count: int, seed: int, say: Callable[[str], None]) -> None:
    """Measure until `count` strategies of this seed have a line."""
    own = domain_folder(folder, model, cluster_name)
    own.mkdir(parents=True, exist_ok=True)
    given = read_cluster(ROOT / "examples" / "clusters" / f"{cluster_name}.yaml")
    earlier = read_domain(folder, model, cluster_name)
    if earlier is not None and not _left(earlier, count, seed):
        return
    profile = earlier.workload if earlier is not None else PROFILES[model]() if model in PROFILES else None
    costs = earlier.costs if earlier is not None else measured_costs(given.world_size, emulated=True)
    conditions = scheduled(Conditions(Network.EMULATED, Accelerators.EMULATED), given.world_size)
    command = read_command(["python", str(ROOT / SCRIPTS[model][0]), *SCRIPTS[model][1:]])
    ranks = Ranks(command, given.world_size, own / "logs", 60.0, 180.0, profile)
    with placed_world(Where(None, False, (0, 0)), given, conditions, ranks, say) as world:
        if earlier is None:
            earlier = _described(world, own, model, cluster_name, given, conditions, costs, say)
        else:
            world.profile()
        todo = _left(earlier, count, seed)
        for number, (source, strategy) in enumerate(todo):
            if number % REFERENCE_EVERY == 0:
                _run(world, own, "current setup", None, None, say)
            wanted = plan(strategy, earlier.workload, given.world_size)
            _run(world, own, source, strategy, wanted, say, f"{number + 1} of {len(todo)}")


def _left(domain: Domain, count: int, seed: int) -> list[tuple[str, Strategy]]:
    there = {trial.strategy.id for trial in domain.trials if trial.strategy is not None}
    return [each for each in strategies(domain.workload, domain.cluster, count, seed) if each[1].id not in there]


def _described(
    world: World,
    own: Path,
    model: str,
    cluster_name: str,
    given: Cluster,
    conditions: Conditions,
    costs: dict[str, float],
    say: Callable[[str], None],
) -> Domain:
    """Profile, probe, and write both down."""
    say(f"{model} on {cluster_name}: profiling")
    workload = replace(world.profile().workload, threads=0, model=model)  # waits take no core from messages
    say(f"{model} on {cluster_name}: probing for {PROBE_S:.0f} s")
    cluster, _ = measured_cluster(given, _probed(world, say), datetime.now(UTC), conditions.label)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()[0]}
    fitted = {"workload": workload.to_data(), "cluster": cluster.to_data(), "costs": costs}
    told = {**fitted, "round_robin": world.round_robin(), **machine}
    (own / "domain.json").write_text(json.dumps(told))
    return Domain(model, cluster_name, workload, cluster, costs, os.cpu_count() or 1, ())


def _probed(world: World, say: Callable[[str], None]) -> Probe:
    """On a crowded machine a rank may fail to connect; the script is then started again."""
    for _ in range(PROBES - 1):
        try:
            return world.probe(PROBE_S, lambda _: None, computing=False)
        except LaunchError as error:
            say(f"the probe failed, once more: {error}")
    return world.probe(PROBE_S, lambda _: None, computing=False)


def _run(
    world: World, own: Path, source: str, strategy: Strategy | None, wanted: Plan | None, say: Callable[[str], None], progress: str = ""
) -> None:
    request = TrialRequest(0, CURRENT_SETUP, Role.CANDIDATE, WARMUP_STEPS, TIMED_STEPS, most_steps=MOST_STEPS, precision=PRECISION)
    load = os.getloadavg()[0]
    outcome = world.run_trial(request, wanted)
    line: dict[str, Any] = {"source": source, "strategy": strategy.to_data() if strategy else None, "load": load, "time": time.time()}
    if isinstance(outcome, Measured):
        line |= {"step_s": outcome.slowest_s.tolist(), "overrun": outcome.overrun}
        say(f"{own.name} {progress} {source}: {outcome.median_s * 1e3:.1f} ms")
    else:
        line |= {"step_s": [], "overrun": None, "failure": f"{outcome.kind}: {outcome.message[:300]}"}
        say(f"{own.name} {progress} {source}: failed ({outcome.kind})")
    with (own / "trials.jsonl").open("a") as lines:
        lines.write(json.dumps(line) + "\n")
