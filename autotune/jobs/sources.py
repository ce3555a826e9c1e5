"""Models and clusters by name or file: the zoo, recorded folders, traces, layer profiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.errors import InvalidInput
from autotune.files import is_file, is_folder
from autotune.lowering.costs import RuntimeCosts, costs_of_job
from autotune.optimizer.optimize import ASSUMED_TIMES
from autotune.parsing import read_json
from autotune.profiling.formats.layer_profile import read_layer_profile
from autotune.profiling.formats.sources import holds_traces
from autotune.profiling.op_graph import OpGraph
from autotune.recordings.job_file import JOB_FILE, RecordedJob, recording_at
from autotune.recordings.memory_file import RecordedMemory, missing_memory_reason
from autotune.records import Accelerators
from autotune.workload import Workload
from autotune.zoo.architectures import MODELS, workload, zoo_name
from autotune.zoo.assumed_device import AssumedDevice
from autotune.zoo.assumed_models import assumed_ops
from autotune.zoo.clusters import CLUSTERS, SINGLE_FLOW, single_flow


@dataclass(frozen=True)
class Source:
    """A workload to optimize.

    - `graph`: its ops; None if only the variables are known, and ops cannot be fused.
    - `times`: the origin of its times, if they were not measured.
    - `memory`: lifetimes of its tensors; None if not recorded, for the reason `no_memory`.
    - `cross_step_refused`, `direct_refused`: why the script cannot synchronize across steps, and
      why its ranks cannot exchange directly; empty if they can.
    - `costs`: of the runtime that would carry out a strategy; None: of the workload's device.
    - `mirrored`: whether the script uses MultiWorkerMirroredStrategy.
    - `notes`: further assumptions.
    """

    workload: Workload
    graph: OpGraph | None = None
    times: str = ""
    memory: RecordedMemory | None = None
    no_memory: str = "it holds no activations and no optimizer state"
    cross_step_refused: str = ""
    direct_refused: str = ""
    costs: RuntimeCosts | None = None
    mirrored: bool = False
    notes: tuple[str, ...] = ()

    def assumptions(self, assumed: tuple[str, ...]) -> list[str]:
        """The search's assumptions and the source's own, with the origin of the times."""
        timed = [
            f"{note} ({self.times})" if self.times and note == ASSUMED_TIMES else note
            for note in assumed
        ]
        return [*timed, *self.notes]


def _model_of(name: str) -> str | None:
    """The zoo's name of a model, or None for what the user has.

    Raises `InvalidInput` if it is both.
    """
    model, path = zoo_name(name), Path(name)
    if model is not None and (is_file(path) or (is_folder(path) and any(path.glob("*.json*")))):
        raise InvalidInput(
            f"{name} is a model of the zoo, but also a recording in this folder; write ./{name} "
            "for the recording, or start autotune in another folder for the model"
        )
    return model


def named_model(name: str) -> Workload:
    if (known := _model_of(name)) is not None:
        return workload(known)
    path = Path(name)
    if (folder := recording_at(path)) is not None:
        return RecordedJob.read(folder).measured_workload(folder)
    if not is_file(path):
        raise InvalidInput(
            "the model must be a workload's JSON file, a folder of `autotune profile` or one of "
            f"{', '.join(MODELS)}, but is {name!r}"
        )
    return Workload.from_data(read_json(path), name)


def named_cluster(name: str) -> Cluster:
    if name.removesuffix(SINGLE_FLOW) in CLUSTERS and is_file(Path(name)):
        raise InvalidInput(
            f"{name} is a cluster of the zoo, but also a file in this folder; write ./{name} for "
            "the file, or start autotune in another folder for the zoo's"
        )
    if name in CLUSTERS:
        return CLUSTERS[name]
    limited = name.removesuffix(SINGLE_FLOW)
    if limited in CLUSTERS:
        return single_flow(limited)
    if not is_file(Path(name)):
        raise InvalidInput(
            f"the cluster must be a cluster file or one of {', '.join(CLUSTERS)}, but is {name!r}"
        )
    return read_cluster(Path(name))


def read_source(name: str, ranks: str = "") -> Source:
    """Read a zoo model, a recorded folder, traces, a workload or a layer profile.

    `ranks`: those of the traces, as in `read_job`. Raises `InvalidInput` if there is none of them,
    or if its times are missing.
    """
    path, model = Path(name), _model_of(name)
    if model is not None:
        graph, row = assumed_ops(model), MODELS[model]
        times = f"{AssumedDevice().text}, for a batch of {row.batch_per_gpu} {row.batch_unit}"
        return Source(graph.workload(), graph, times)
    if path.name != JOB_FILE and not is_file(path / JOB_FILE) and holds_traces(path):
        return _traced(path, ranks)
    if path.suffix == ".json" and path.name != JOB_FILE:
        return Source(_timed(named_model(name), name))
    if is_folder(path) or path.name == JOB_FILE:
        return _recorded(path if is_folder(path) else path.parent)
    if is_file(path):
        graph = read_layer_profile(path)
        return Source(graph.workload(), graph)
    raise InvalidInput(
        "there must be something to optimize: a folder of `autotune profile`, Kineto traces, a "
        f"workload's JSON file, a layer profile (.txt) or one of {', '.join(MODELS)}, but it is "
        f"{name!r}"
    )


def _timed(workload: Workload, name: str) -> Workload:
    if workload.compute_s == 0:
        raise InvalidInput(
            f"a workload needs the times of its passes, which can hide messages, but in {name} "
            "they are 0; record them with `autotune profile`, or name a model of the zoo, whose "
            f"times are assumed: {', '.join(MODELS)}"
        )
    return workload


def _traced(path: Path, ranks: str) -> Source:
    """The buckets of a traced data-parallel job."""
    from autotune.profiling.graph.traced_workload import workload_of
    from autotune.profiling.traces.job import read_job

    traced = workload_of(read_job(path, ranks=ranks), model=path.name.split(".")[0] or "traced")
    return Source(traced.workload, no_memory="traces hold no lifetimes", notes=traced.notes)


def _recorded(folder: Path) -> Source:
    """The workload in the folder's job.json, its memory, and the limits of its script."""
    job = RecordedJob.read(folder)
    return Source(
        job.measured_workload(folder),
        memory=RecordedMemory.read(folder),
        no_memory=missing_memory_reason(job.notes),
        cross_step_refused=job.cross_step_refused,
        direct_refused=job.direct_refused,
        costs=costs_of_job(Accelerators.REAL, job.software),
        mirrored=job.mirrored,
    )
