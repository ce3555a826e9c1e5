"""Compare predicted with measured steps of Horovod, under settings that were never profiled.

One run per model is recorded, under Horovod's defaults on `PROFILED`: the calls of every rank, rank
0's timeline, and transfers of other sizes. From it alone, steps are predicted for other fusion
thresholds, cycle times and groups, and on networks of other rates. Hosts are network namespaces,
transfers are real, and accelerators are emulated by timed waits. The ranks run a script of PyTorch
or of TensorFlow (`FRAMEWORKS`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.costs.timing import ready_times_s
from autotune.jobs.campaign import generated_models
from autotune.lowering.horovod import HorovodLowering, HostTimes
from autotune.lowering.negotiation import HorovodSettings
from autotune.profiling.formats.horovod import read_horovod
from autotune.profiling.graph.horovod_costs import fit_horovod, measured_times
from autotune.recordings.horovod_calls import HorovodCall
from autotune.workload import Workload
from benchmarks.horovod_ranks.start import Case, CaseResult
from benchmarks.replay_accuracy.horovod_runs import RankRun
from benchmarks.repository import cluster_file

MODELS = ("vgg", "densenet", "transformer")
FRAMEWORKS = {"horovod": ("torch", MODELS), "horovod_tensorflow": ("tensorflow", MODELS[::2])}
"""End of the keys -> framework of the script, and models."""
PROFILED = "four_hosts"
CLUSTERS = (PROFILED, "four_hosts_half", "four_hosts_uneven")
PLAIN, LOGGED, TIMELINE = "plain", "logged", "timeline"
BLOCKS = ((PLAIN, 8), (LOGGED, 8)) * 2
STEPS = 8
PROBE_BYTES = tuple(4**k for k in range(5, 13))
MIB = 2**20
GROUPS = 3

Say = Callable[[str], None]


@dataclass(frozen=True)
class PredictedHorovod:
    """One setting of one model on one cluster: medians and predictions in seconds.

    `unaligned_s`: predicted without a common clock of the ranks.
    """

    model: str
    cluster: str
    setting: str
    measured_s: float
    spread: float
    predicted_s: float
    unaligned_s: float
    forward_error: float
    backward_error: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)

    @property
    def unaligned_error(self) -> float:
        return abs(self.unaligned_s / self.measured_s - 1)


@dataclass(frozen=True)
class Recording:
    """Results of the recorded run. An overhead is step / step without a recording - 1."""

    workload: Workload
    costs: HorovodLowering
    unaligned: HostTimes
    forward_s: float
    backward_s: float
    logged_overhead: float
    timeline_overhead: float

    def lowering(self, cluster: Cluster, aligned: bool) -> HorovodLowering:
        times = self.costs.times if aligned else self.unaligned
        return HorovodLowering(self.workload, cluster, self.costs.costs, times)


def settings_of(workload: Workload, profiled: bool) -> dict[str, HorovodSettings]:
    """Name -> settings to predict; the defaults only where they were not profiled."""
    settings = {
        "64 MiB, 5 ms": HorovodSettings(64 * MIB, 5e-3),
        "2 MiB, 1 ms": HorovodSettings(2 * MIB, 1e-3),
        "512 KiB, 10 ms": HorovodSettings(MIB // 2, 10e-3),
        "no fusion": HorovodSettings(0, 1e-3),
        f"{GROUPS} groups": HorovodSettings(
            groups=contiguous_groups(workload, GROUPS), fuses_groups=False
        ),
    }
    return settings if profiled else {"defaults": HorovodSettings(), **settings}


def contiguous_groups(workload: Workload, count: int) -> tuple[tuple[str, ...], ...]:
    """Variables that are ready one after the other, in groups of about equal bytes."""
    order = np.argsort(ready_times_s(workload), kind="stable").tolist()
    variables = [workload.variables[place] for place in order]
    total = sum(variable.elements for variable in variables)
    groups: list[list[str]] = [[] for _ in range(count)]
    done = 0
    for variable in variables:
        groups[min(count * done // total, count - 1)].append(variable.name)
        done += variable.elements
    return tuple(tuple(group) for group in groups if group)


def recorded_run(model: str, folder: Path, framework: str) -> RankRun:
    """Return the run of the defaults on the profiled cluster, from which all is predicted."""
    settings = HorovodSettings()
    cases = (
        Case(settings, BLOCKS, probe_bytes=PROBE_BYTES),
        Case(settings, ((TIMELINE, STEPS),)),  # apart: its writer thread spins even when paused
    )
    cluster = read_cluster(cluster_file(PROFILED))
    workload = generated_models.MODELS[model].workload()
    return RankRun(cluster, workload, cases, folder / f"{model}.recorded", framework)


def measured_run(model: str, name: str, folder: Path, framework: str) -> RankRun:
    """Return the run of every setting that is predicted on a cluster."""
    workload = generated_models.MODELS[model].workload()
    settings = settings_of(workload, name == PROFILED)
    cases = tuple(Case(one, ((PLAIN, STEPS),)) for one in settings.values())
    cluster = read_cluster(cluster_file(name))
    return RankRun(cluster, workload, cases, folder / f"{model}.{name}", framework)


def recording_of(run: RankRun) -> Recording:
    """Return what a collected `recorded_run` shows."""
    workload, cluster = run.workload, run.cluster
    result, timed = run.results()
    with timed.timelines()[-1].open("rb") as file:
        timeline = read_horovod(file.read, "timeline")
    calls, ended_s = last_logged(result)
    costs = fit_horovod(timeline, calls, cluster, HorovodSettings().cycle_s)
    logging_s = between_steps_s(result, LOGGED) - between_steps_s(result, PLAIN)
    aligned, unaligned = (
        without_logging(measured_times(calls, ended_s, workload, on_one_clock), logging_s)
        for on_one_clock in (True, False)
    )
    plain_s = median(result.steps_s(PLAIN))
    return Recording(
        workload,
        HorovodLowering(workload, cluster, costs, aligned),
        unaligned,
        passes_s(result)[0],
        passes_s(result)[1],
        median(result.steps_s(LOGGED)) / plain_s - 1,
        median(timed.steps_s(TIMELINE)) / plain_s - 1,
    )


def between_steps_s(result: CaseResult, what: str) -> float:
    """Median time between two steps of the blocks that recorded `what`, on the slowest rank."""
    spaces_s: list[float] = []
    for number, block in enumerate(result.ranks[0]["blocks"]):
        if block["what"] == what:
            of_ranks = [np.array(rank["blocks"][number]["marks_s"]) for rank in result.ranks]
            spaces_s += np.max([one[1:, 0] - one[:-1, -1] for one in of_ranks], axis=0).tolist()
    return median(spaces_s)


def without_logging(times: HostTimes, logging_s: float) -> HostTimes:
    """The times less what logging adds between two steps, where the calls are read."""
    return replace(times, rest_s=max(times.rest_s - logging_s, 0.0))


def last_logged(result: CaseResult) -> tuple[list[list[HorovodCall]], list[list[float]]]:
    """The calls of each rank in its last logged block, and when its backward passes ended."""
    calls, ended_s = [], []
    for rank in result.ranks:
        listed = [HorovodCall(**call) for call in rank["calls"]]
        starts = [
            place
            for place, call in enumerate(listed)
            if call.step == 0 and (place == 0 or listed[place - 1].step != 0)
        ]
        calls.append(listed[starts[-1] :])
        blocks = [block for block in rank["blocks"] if block["what"] == LOGGED]
        ended_s.append([marks[2] for marks in blocks[-1]["marks_s"]])
    return calls, ended_s


def passes_s(result: CaseResult) -> tuple[float, float]:
    """Median forward and backward pass of all ranks in the steps without a recording."""
    marks = np.array(
        [
            step[:3]
            for rank in result.ranks
            for block in rank["blocks"]
            if block["what"] == PLAIN
            for step in block["marks_s"]
        ]
    )
    forward_s, backward_s = np.median(np.diff(marks, axis=1), axis=0).tolist()
    return float(forward_s), float(backward_s)


def predicted(model: str, name: str, recording: Recording, run: RankRun) -> list[PredictedHorovod]:
    """Predict every setting of a collected `measured_run`."""
    settings = settings_of(recording.workload, name == PROFILED)
    aligned = recording.lowering(run.cluster, aligned=True)
    unaligned = recording.lowering(run.cluster, aligned=False)
    rows = []
    for (setting, wanted), result in zip(settings.items(), run.results(), strict=True):
        low_s, measured_s, high_s = np.quantile(result.steps_s(PLAIN), [0.25, 0.5, 0.75]).tolist()
        forward_s, backward_s = passes_s(result)
        rows.append(
            PredictedHorovod(
                model=model,
                cluster=name,
                setting=setting,
                measured_s=measured_s,
                spread=(high_s - low_s) / measured_s,
                predicted_s=aligned.step_s(wanted),
                unaligned_s=unaligned.step_s(wanted),
                forward_error=abs(recording.forward_s / forward_s - 1),
                backward_error=abs(recording.backward_s / backward_s - 1),
            )
        )
    return rows


def measure(
    folder: Path,
    say: Say,
    name: str = "horovod",
    clusters: Sequence[str] = CLUSTERS,
    only_evaluate: bool = False,
) -> dict[str, object]:
    """Collect and predict scripts of `FRAMEWORKS[name]`; `<name>.csv` lists all settings.

    Runs that the folder has are not repeated. Ends the benchmark if there is nothing to predict.
    The keys end in `name`.
    """
    rows: list[PredictedHorovod] = []
    recordings: list[Recording] = []
    missing: list[str] = []
    framework, models = FRAMEWORKS[name]
    for model in models:
        recorded = recorded_run(model, folder, framework)
        measured = {one: measured_run(model, one, folder, framework) for one in clusters}
        if not only_evaluate:
            collect([recorded, *measured.values()], say)
        if not recorded.is_collected:
            missing.append(recorded.folder.name)
            continue
        recording = recording_of(recorded)
        recordings.append(recording)
        for cluster, run in measured.items():
            if run.is_collected:
                rows += predicted(model, cluster, recording, run)
            else:
                missing.append(run.folder.name)
    if not rows:
        raise SystemExit(f"{folder} lacks the runs {', '.join(missing)}; collect them first")
    write_table(rows, folder / f"{name}.csv")
    for row in rows:
        say(
            f"{row.model}.{row.cluster}, {row.setting}: {row.measured_s * 1e3:.1f} ms, "
            f"predicted {row.predicted_s * 1e3:.1f} ms ({row.error:.1%})"
        )
    return {**summary(rows, recordings, name), f"missing_{name}": missing}


def collect(runs: Sequence[RankRun], say: Say) -> None:
    """Run those that have no results yet."""
    for run in runs:
        if run.is_collected:
            say(f"{run.folder.name}: measured before")
        else:
            say(f"{run.folder.name}: {len(run.cases)} cases")
            run.collect()


def summary(
    rows: Sequence[PredictedHorovod], recordings: Sequence[Recording], name: str
) -> dict[str, float]:
    """Return the keys of the benchmark's last line."""
    return {
        f"settings_{name}": len(rows),
        f"error_mean_{name}": float(np.mean([row.error for row in rows])),
        f"error_p90_{name}": float(np.quantile([row.error for row in rows], 0.9)),
        f"bias_{name}": float(np.mean([row.predicted_s / row.measured_s - 1 for row in rows])),
        f"error_mean_{name}_unaligned": float(np.mean([row.unaligned_error for row in rows])),
        f"error_forward_{name}": float(np.mean([row.forward_error for row in rows])),
        f"error_backward_{name}": float(np.mean([row.backward_error for row in rows])),
        f"overhead_{name}": float(np.mean([one.logged_overhead for one in recordings])),
        f"overhead_{name}_timeline": float(np.mean([one.timeline_overhead for one in recordings])),
        f"spread_median_{name}": float(np.median([row.spread for row in rows])),
    }


def write_table(rows: Sequence[PredictedHorovod], path: Path) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(asdict(rows[0])))
        table.writeheader()
        table.writerows(asdict(row) for row in rows)
