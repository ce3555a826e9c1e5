"""Predicted and measured steps of TensorFlow graphs on settings that were never profiled.

One recording of a model on a cluster gives its workload: when each gradient is ready, without
communication. A recording of separate messages gives the costs of all-reduces, and the probe of
`autotune tune` those of other exchanges. From these the steps under other groups, under other
bandwidths and on servers are predicted, and compared with what the client measured.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median

import numpy as np

from autotune.cluster import Cluster, CollectiveFit, Where
from autotune.cluster_file import read_cluster
from autotune.lowering.costs import TENSORFLOW_COSTS
from autotune.lowering.lower import Lowering
from autotune.profiling.alignment.align import align
from autotune.profiling.fits.probe_fits import collective_fits
from autotune.profiling.graph.traced_workload import workload_of
from autotune.profiling.traces.job import TraceJob, read_job
from autotune.recordings.probe import ProbePoint, ProbeSeries
from autotune.strategy_space.builders import collectives, servers
from autotune.strategy_space.plan import Plan, plan
from autotune.strategy_space.strategy import Synchronizer
from autotune.workload import Variable, Workload
from benchmarks.repository import cluster_file
from benchmarks.tensorflow_ranks.layers import TimedLayer, layers_of
from benchmarks.tensorflow_ranks.start import (
    RESULTS,
    Case,
    CaseResult,
    read_probe,
    read_results,
    run_cases,
)

MODELS = ("vgg16", "resnet50", "bert-base")
CLUSTERS = ("four_hosts", "four_hosts_uneven", "two_hosts_two_devices")
LAYERS, GRAD_BYTES, COMPUTE_S = 12, 8 * 2**20, 0.12
MEMORY_RESULTS = "memory.json"
PROBE = "probe"
PROBE_ELEMENTS = (2**14, 2**16, 2**18, 2**19, 2**20, 2**21)
PROBE_PAUSE_S = 1.0
"""Time between two messages of the probe; the slowest takes less on the slowest cluster."""
PROFILED, GROUPS = 1, (2, 4, 12)
"""Variables per message of the profile, and of the plans that are predicted."""
SERVED_BYTES = 2 * 2**20
APART_S = 0.005
"""How far the clock of each rank is set from that of the rank before it: NTP's order."""
PROBE_S = 25.0
"""Time for the probe of TensorFlow's exchanges, whose costs the plans with servers need."""
OTHER_RATE = 0.5
"""Share of the profiled bandwidth of the second testbed."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class TensorFlowStep:
    """One setting: seconds of a step and of both passes, predicted and measured.

    - `aligned_s`, `unaligned_s`: predicted from a recording whose ranks' clocks were set
      `APART_S` apart, with and without their alignment. Emulated hosts share one clock.
    - `overhead`: recorded over ordinary steps, less 1.
    """

    cluster: str
    model: str
    setting: str
    measured_s: float
    predicted_s: float
    aligned_s: float
    unaligned_s: float
    forward_s: tuple[float, float]
    backward_s: tuple[float, float]
    overhead: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)


def probe_layers() -> list[TimedLayer]:
    """Messages of growing size, so far apart that none meets another."""
    return [
        TimedLayer(f"message_{number}", elements, 0.0, PROBE_PAUSE_S)
        for number, elements in enumerate(PROBE_ELEMENTS[::-1])
    ]


def workload_of_layers(model: str, layers: Sequence[TimedLayer]) -> Workload:
    """The variables in the order of the backward pass, to plan their messages."""
    return Workload(model, tuple(Variable(one.name, (one.elements,)) for one in layers[::-1]))


def chunked(model: str, layers: Sequence[TimedLayer], variables: int, ranks: int) -> Plan:
    """All-reduces of `variables` neighbours each."""
    workload = workload_of_layers(model, layers)
    return plan(collectives.all_reduce_chunks(workload, variables), workload, ranks)


def served(model: str, layers: Sequence[TimedLayer], cluster: Cluster) -> dict[str, Plan]:
    """Plans by name in which servers or owners sum: whole variables, cut ones, and buckets."""
    workload = workload_of_layers(model, layers)
    owners = Synchronizer.REDUCE_SCATTER_ALL_GATHER
    strategies = {
        "servers": servers.ps_load_balanced(workload, cluster),
        "one server": servers.parameter_server(workload, cluster),
        "cut servers": servers.partitioned_ps(workload, cluster),
        "buckets on servers": servers.served_in_buckets(workload, cluster, SERVED_BYTES),
        "reduce-scatter": collectives.single_bucket(workload, owners),
    }
    return {name: plan(one, workload, cluster.world_size) for name, one in strategies.items()}


def slowed(cluster: Cluster, share: float) -> Cluster:
    """The cluster with this share of each host's bandwidth."""
    hosts = tuple(
        replace(host, link_bytes_per_s=host.link_bytes_per_s * share) for host in cluster.hosts
    )
    return replace(cluster, name=f"{cluster.name}-{share:g}", hosts=hosts)


def collect(folder: Path, name: str) -> None:
    """Run all models on one cluster and on a slower one, unless it was done; needs root."""
    cluster, slow = clusters_of(name)
    models = {model: layers_of(model, LAYERS, GRAD_BYTES, COMPUTE_S) for model in MODELS}
    cases = [
        Case(f"{model}.{variables}", model, chunked(model, layers, variables, cluster.world_size))
        for model, layers in models.items()
        for variables in (PROFILED, *GROUPS)
    ]
    layers = probe_layers()
    probed = chunked(PROBE, layers, 1, cluster.world_size)
    probe = Case(PROBE, PROBE, probed, steps=4, warmup=1)
    on_servers = [
        Case(f"{model}.{kind}", model, wanted)
        for model, of_model in models.items()
        for kind, wanted in served(model, of_model, cluster).items()
    ]
    for on, all_cases, probe_s in (
        (cluster, [probe, *cases, *on_servers], PROBE_S),
        (slow, cases, 0.0),
    ):
        if not (folder / on.name / RESULTS).exists():
            run_cases(on, models | {PROBE: layers}, all_cases, folder / on.name, probe_s)


def collected(folder: Path, name: str) -> list[TensorFlowStep]:
    """The settings of one cluster that were not profiled, predicted; [] if it was not run."""
    cluster, slow = clusters_of(name)
    if not all((folder / on.name / RESULTS).exists() for on in (cluster, slow)):
        return []
    near, far = (read_results(folder / on.name) for on in (cluster, slow))
    probe = read_job(near[PROBE].folder)
    apart = replace(probe, shift_s=probe.shift_s + APART_S * np.arange(len(probe.ranks)))
    aligned = replace(apart, shift_s=apart.shift_s + align(apart).offset_s)
    exchanges = collective_fits(
        one for one in read_probe(folder / cluster.name) if one.primitive != "all_reduce"
    )
    all_reduces = [with_fits(cluster, job) for job in (probe, aligned, apart)]
    fits = [replace(one, fits=(*one.fits, *exchanges)) for one in all_reduces]
    steps = []
    for model in MODELS:
        layers = layers_of(model, LAYERS, GRAD_BYTES, COMPUTE_S)
        profile = read_job(near[f"{model}.{PROFILED}"].folder)
        workload = workload_of(profile, model=model).workload
        for on, results, groups in ((cluster, near, GROUPS), (slow, far, (PROFILED, *GROUPS))):
            lowerings = [Lowering(workload, at_rate(one, on), TENSORFLOW_COSTS) for one in fits]
            for variables in groups:
                wanted = chunked(model, layers, variables, cluster.world_size)
                result = results[f"{model}.{variables}"]
                setting = f"{variables} variables a message"
                steps.append(_step(on.name, model, setting, lowerings, wanted, result))
        lowerings = [Lowering(workload, one, TENSORFLOW_COSTS) for one in fits]
        for kind, wanted in served(model, layers, cluster).items():
            served_result = near.get(f"{model}.{kind}")
            if served_result is not None:  # recordings of earlier versions have none
                steps.append(_step(cluster.name, model, kind, lowerings, wanted, served_result))
    return steps


def clusters_of(name: str) -> tuple[Cluster, Cluster]:
    """The cluster that is profiled, and the slower one."""
    cluster = read_cluster(cluster_file(name))
    return cluster, slowed(cluster, OTHER_RATE)


def _step(
    cluster: str,
    model: str,
    setting: str,
    lowerings: Sequence[Lowering],
    wanted: Plan,
    result: CaseResult,
) -> TensorFlowStep:
    recorded = workload_of(read_job(result.folder), model=model).workload
    workload = lowerings[0].workload
    plain_s = median(result.plain_s)
    predicted_s, aligned_s, unaligned_s = (lowering.step_s(wanted) for lowering in lowerings)
    return TensorFlowStep(
        cluster,
        model,
        setting,
        measured_s=plain_s,
        predicted_s=predicted_s,
        aligned_s=aligned_s,
        unaligned_s=unaligned_s,
        forward_s=(workload.forward_s, recorded.forward_s),
        backward_s=(workload.backward_s, recorded.backward_s),
        overhead=median(result.recorded_s) / plain_s - 1,
    )


def with_fits(cluster: Cluster, probe: TraceJob) -> Cluster:
    """The cluster with the costs of the recorded all-reduces.

    A message lasts from the latest start of its members to their last end.
    """
    times_s: dict[int, list[float]] = defaultdict(list)
    for joint in probe.joints:
        if joint.name != "all_reduce":
            continue
        spans = [
            (
                probe.collectives[place][index].start_s + probe.shift_s[place],
                probe.collectives[place][index].end_s + probe.shift_s[place],
            )
            for place, index in joint.members
        ]
        last_start_s = max(start_s for start_s, _ in spans)
        times_s[round(joint.size_bytes)].append(max(end_s for _, end_s in spans) - last_start_s)
    points = []
    for size, seconds in sorted(times_s.items()):
        low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
        points.append(ProbePoint(size, middle, (high - low) / middle, len(seconds), 0.0))
    series = ProbeSeries("all_reduce", cluster.world_size, Where.WORLD, False, tuple(points))
    return replace(cluster, fits=collective_fits([series]))


def at_rate(fitted: Cluster, other: Cluster) -> Cluster:
    """The costs on links of another bandwidth: each byte takes longer by its time on the link."""
    ranks = fitted.world_size
    carried = 2 * (ranks - 1) / ranks / TENSORFLOW_COSTS["payload"]
    more_s = carried * (1 / other.ring_bytes_per_s - 1 / fitted.ring_bytes_per_s)

    def moved(fit: CollectiveFit) -> CollectiveFit:
        bends = tuple(replace(one, s_per_byte=one.s_per_byte + more_s) for one in fit.bends)
        return replace(fit, beta_s_per_byte=fit.beta_s_per_byte + more_s, bends=bends)

    return replace(other, fits=tuple(moved(fit) for fit in fitted.fits))


def summary(steps: Sequence[TensorFlowStep]) -> dict[str, float]:
    """The keys of the benchmark's last line."""

    def error(pairs: Iterable[tuple[float, float]]) -> float:
        return float(np.mean([abs(predicted / measured - 1) for predicted, measured in pairs]))

    errors = [step.error for step in steps]
    apart: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        apart["all_reduce" if step.setting.endswith("a message") else "servers"].append(step.error)
    return {
        "settings_tensorflow": len(steps),
        "error_mean_tensorflow": float(np.mean(errors)),
        **{f"error_mean_tensorflow_{kind}": float(np.mean(of)) for kind, of in apart.items()},
        "error_p90_tensorflow": float(np.quantile(errors, 0.9)),
        "bias_tensorflow": float(np.mean([one.predicted_s / one.measured_s - 1 for one in steps])),
        "error_forward_tensorflow": error(step.forward_s for step in steps),
        "error_backward_tensorflow": error(step.backward_s for step in steps),
        "error_aligned_tensorflow": error((one.aligned_s, one.measured_s) for one in steps),
        "error_unaligned_tensorflow": error((one.unaligned_s, one.measured_s) for one in steps),
        "overhead_tensorflow": median(step.overhead for step in steps),
    }


def measure(folder: Path, say: Say, only_evaluate: bool = False) -> dict[str, float]:
    """Collect and predict; write `tensorflow.csv`. Ends the benchmark if nothing was collected."""
    steps: list[TensorFlowStep] = []
    for name in CLUSTERS:
        if not only_evaluate:
            say(f"TensorFlow on {name}")
            collect(folder, name)
        steps += collected(folder, name)
    if not steps:
        raise SystemExit(f"{folder} holds no recordings of TensorFlow; collect some first")
    with (folder / "tensorflow.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(TensorFlowStep)])
        table.writeheader()
        table.writerows(asdict(step) for step in steps)
    for step in steps:
        say(
            f"{step.cluster:26} {step.model:10} {step.setting:24} measured "
            f"{step.measured_s * 1e3:6.1f} ms, predicted {step.predicted_s * 1e3:6.1f} ms, "
            f"error {step.error:5.1%}"
        )
    return summary(steps) | memory_errors(folder, say, only_evaluate)


def memory_errors(folder: Path, say: Say, only_evaluate: bool) -> dict[str, float]:
    """The keys of `tensorflow_memory`, which runs in a process of its own; {} if it was not run."""
    results = folder / MEMORY_RESULTS
    if not only_evaluate:
        say("TensorFlow's memory")
        module = "benchmarks.replay_accuracy.tensorflow_memory"
        subprocess.run([sys.executable, "-m", module, str(results)], check=True, stdout=sys.stderr)
    if not results.exists():
        return {}
    figures = json.loads(results.read_text())
    return {name: value for name, value in figures.items() if name != "cases"}
