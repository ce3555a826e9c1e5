"""The table of readers: every function of the product that reads a file from outside.

A reader gets a folder with its files. It returns what it read, or raises an `AutotuneError`.
Anything else is a fault. Modules of the product load when a reader runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.fuzz_campaign import formats, samples
from benchmarks.fuzz_campaign.formats import Mutate
from benchmarks.fuzz_campaign.samples import Files

FOLDER = "{folder}"
"""Stands for the input's folder in the words of a command."""


@dataclass(frozen=True)
class Reader:
    """One reader with a valid sample of its files.

    - `mutate`: file name -> how it is mutated; other files of the sample stay valid.
    - `words`: the command that reads the same files, if there is one.
    - `finish`: completes the mutated files, so that more than a checksum is tested.
    - `weight`: share of a campaign's inputs relative to other readers; slow readers have less.
    """

    name: str
    sample: Callable[[], Files]
    read: Callable[[Path], object]
    mutate: Mapping[str, Mutate]
    words: tuple[str, ...] = ()
    finish: Callable[[Files], Files] = field(default=lambda files: files)
    weight: float = 1.0


def _replayed(folder: Path) -> object:
    """Read the traces as `autotune replay` does, without the alignment of clocks."""
    from autotune.dfg.replay import replay
    from autotune.dfg.utilisation import iteration_summary
    from autotune.profiling.graph.traced_steps import TracedSteps
    from autotune.profiling.traces.job import read_job

    steps = TracedSteps(read_job(folder))
    summary = iteration_summary(replay(steps.dfg()))
    _require_sound("seconds", steps.measured_s(), summary.iteration_s)
    return summary


def _replayed_horovod(folder: Path) -> object:
    """Read a timeline of Horovod as `autotune replay` does."""
    from autotune.dfg.replay import replay
    from autotune.dfg.utilisation import iteration_summary
    from autotune.profiling.graph.horovod_steps import chosen_step, horovod_steps, step_dfg
    from autotune.profiling.traces.job import read_timeline

    timeline = read_timeline(folder)
    if timeline is None:
        return None
    step = chosen_step(horovod_steps(timeline), None)
    summary = iteration_summary(replay(step_dfg(timeline, step)))
    _require_sound("seconds", step.measured_s, summary.iteration_s)
    _require_sound("bytes", *(batch.size_bytes for batch in timeline.batches))
    return summary


def _optimizable(folder: Path) -> object:
    from autotune.jobs.sources import read_source

    return _sound_workload(read_source(str(folder)).workload)


def _sound_workload(workload: object) -> object:
    from autotune.workload import Workload

    assert isinstance(workload, Workload)
    _require_sound("passes", workload.forward_s, workload.backward_s, workload.update_s)
    _require_sound("ready", *(v.ready_s or 0.0 for v in workload.variables))
    _require_sound("needed", *(v.needed_s or 0.0 for v in workload.variables))
    _require_sound("bytes", workload.grad_bytes)
    return workload


def _require_sound(what: str, *figures: float) -> None:
    """Fail if nonsense was accepted."""
    wrong = [figure for figure in figures if not (math.isfinite(figure) and figure >= 0)]
    assert not wrong, f"{what} must be finite and at least 0, but are {wrong[:3]}"


def _layer_profile(folder: Path) -> object:
    from autotune.profiling.formats.layer_profile import read_layer_profile

    return _sound_workload(read_layer_profile(folder / "profile.txt").workload())


def _recorded_job(folder: Path) -> object:
    from autotune.recordings.job_file import RecordedJob

    job = RecordedJob.read(folder)
    _require_sound("iteration", job.iteration_s)
    return job if job.workload is None else _sound_workload(job.workload)


def _recorded_memory(folder: Path) -> object:
    from autotune.cluster import Cluster
    from autotune.memory.peak import highest_peak
    from autotune.recordings.job_file import RecordedJob
    from autotune.recordings.memory_file import RecordedMemory

    job, memory = RecordedJob.read(folder), RecordedMemory.read(folder)
    if job.workload is None or memory is None:
        return None
    return highest_peak(memory, memory.profile, job.workload, job.plan, Cluster.local(2))


def _workload(folder: Path) -> object:
    from autotune.jobs.sources import named_model

    return _sound_workload(named_model(str(folder / "workload.json")))


def _cluster(folder: Path) -> object:
    from autotune.cluster_file import cluster_yaml, read_cluster

    cluster = read_cluster(folder / "cluster.yaml")
    rates = [host.link_bytes_per_s for host in cluster.hosts]
    _require_sound("rates", *rates, *(host.latency_s for host in cluster.hosts))
    _require_sound("ring", cluster.ring_bytes_per_s, len(cluster.host_of_rank))
    assert cluster_yaml(cluster)
    return cluster


def _job_file(folder: Path) -> object:
    from autotune.jobs.settings import read_settings

    return read_settings((), {}, folder / "job.yaml", None)


def _export(folder: Path) -> object:
    from autotune.export import read_export

    return read_export(folder / "exported.json", allow_edited=True)


def _strategy(folder: Path) -> object:
    from autotune.files import read_text
    from autotune.strategy_space.strategy import Strategy

    return Strategy.from_json(read_text(folder / "strategy.json")).to_json()


def _plan(folder: Path) -> object:
    from autotune.files import read_text
    from autotune.strategy_space.plan import Plan

    return Plan.from_json(read_text(folder / "plan.json")).to_json()


def _store(folder: Path) -> object:
    from autotune.storage.store import Store

    with Store.open(folder / "autotune.db") as store:
        for row in store.jobs():
            store.history(row.id), store.decision(row.id), store.outbox.waiting(row.id)
            store.summary(row.id), store.trials(row.id)
        return store.past_trials()


def _dataset(folder: Path) -> object:
    from autotune.dataset.card import card_text
    from autotune.dataset.folder import read_domain

    return card_text(read_domain(folder))


def _simulator(folder: Path) -> object:
    from autotune.simulators.registry import SIMULATORS

    simulator = SIMULATORS["linear"]()
    simulator.load(folder)
    return simulator


def _autosync(folder: Path) -> object:
    from autotune.dataset.autosync import read_autosync

    return read_autosync(folder)


def _message(folder: Path) -> object:
    """The answer of a rank to a probe, and the fits of its measurements."""
    from autotune.files import read_text
    from autotune.profiling.fits.probe_fits import collective_fits
    from runtime_rewriter.protocol import ProbeAnswer, decode_event

    event = decode_event(read_text(folder / "answer.json"))
    if isinstance(event, ProbeAnswer):
        fits = collective_fits(event.series)
        _require_sound("fits", *np.array([fit.seconds(1e6) for fit in fits]).ravel().tolist())
    return event


_REPLAY = ("replay", FOLDER)
_DIRECTORY = ("--directory", FOLDER)
_OPTIMIZE = ("--cluster", "B7", "--budget-time", "0.2s")

READERS = (
    Reader(
        "kineto",
        samples.kineto,
        _replayed,
        {"rank0.json": formats.json_file, "rank1.json": formats.json_file},
        _REPLAY,
        weight=0.2,
    ),
    Reader(
        "packed_kineto",
        samples.packed_kineto,
        _replayed,
        {"rank0.json.gz": formats.packed_json},
        _REPLAY,
        weight=0.2,
    ),
    Reader(
        "kineto_archive",
        samples.kineto_archive,
        _replayed,
        {"traces.tar": formats.archive},
        _REPLAY,
        weight=0.2,
    ),
    Reader(
        "traced_workload",
        samples.kineto,
        _optimizable,
        {"rank0.json": formats.json_file, "rank1.json": formats.json_file},
        ("optimize", FOLDER, *_OPTIMIZE),
        weight=0.2,
    ),
    Reader(
        "tensorflow",
        samples.tensorflow,
        _replayed,
        {"graph.json": formats.json_file, "rank0.json": formats.json_file},
        _REPLAY,
        weight=0.2,
    ),
    Reader(
        "tensorflow_workload",
        samples.tensorflow,
        _optimizable,
        {"graph.json": formats.json_file, "rank0.json": formats.json_file},
        ("optimize", FOLDER, *_OPTIMIZE),
        weight=0.2,
    ),
    Reader(
        "execution_trace",
        samples.execution_trace,
        _replayed,
        {"et_rank0.json": formats.json_file},
        _REPLAY,
        weight=0.2,
    ),
    Reader(
        "chakra_trace",
        samples.chakra_trace,
        _replayed,
        {"et_rank0.json": formats.json_file},
        _REPLAY,
        weight=0.2,
    ),
    Reader(
        "horovod_timeline",
        samples.horovod_timeline,
        _replayed_horovod,
        {"timeline.json": formats.json_file},
        _REPLAY,
        weight=0.2,
    ),
    Reader(
        "layer_profile",
        samples.layer_profile,
        _layer_profile,
        {"profile.txt": formats.text_file},
        ("optimize", f"{FOLDER}/profile.txt", *_OPTIMIZE),
    ),
    Reader(
        "recorded_job",
        lambda: samples.stored("recorded/job.json"),
        _recorded_job,
        {"job.json": formats.json_file},
        ("optimize", FOLDER, *_OPTIMIZE),
    ),
    Reader(
        "recorded_memory",
        lambda: samples.stored("recorded/job.json", "recorded/memory.json"),
        _recorded_memory,
        {"memory.json": formats.json_file},
        ("optimize", FOLDER, "--memory", "16GB", *_OPTIMIZE),
    ),
    Reader(
        "workload",
        samples.workload,
        _workload,
        {"workload.json": formats.json_file},
        ("strategies", f"{FOLDER}/workload.json", "B7"),
    ),
    Reader(
        "cluster",
        samples.cluster,
        _cluster,
        {"cluster.yaml": formats.yaml_file},
        ("strategies", "vgg16", f"{FOLDER}/cluster.yaml", "--builder", "ddp_default"),
        weight=0.3,
    ),
    Reader(
        "probed_cluster",
        samples.probed_cluster,
        _cluster,
        {"cluster.yaml": formats.yaml_file},
        ("strategies", "vgg16", f"{FOLDER}/cluster.yaml", "--builder", "ddp_default"),
        weight=0.3,
    ),
    Reader("job_file", samples.job, _job_file, {"job.yaml": formats.yaml_file}, weight=0.3),
    Reader(
        "export",
        lambda: samples.stored("exported.json"),
        _export,
        {"exported.json": formats.json_file},
    ),
    Reader("strategy", samples.strategy, _strategy, {"strategy.json": formats.json_file}),
    Reader("plan", samples.plan, _plan, {"plan.json": formats.json_file}),
    Reader(
        "store",
        samples.store,
        _store,
        {"autotune.db": formats.sqlite_file},
        ("show", "interrupted", *_DIRECTORY),
        weight=0.2,
    ),
    Reader(
        "dataset",
        samples.dataset,
        _dataset,
        {
            "domain.json": formats.json_file,
            "trials.parquet": formats.parquet_file,
            "card.json": formats.json_file,
        },
        finish=samples.with_sums,
        weight=0.2,
    ),
    Reader(
        "simulator",
        samples.simulator,
        _simulator,
        {"simulator.json": formats.json_file, "weights.safetensors": formats.binary_file},
    ),
    Reader(
        "autosync",
        samples.autosync,
        _autosync,
        {
            "model/graph_item": formats.binary_file,
            "model/cluster/resource_spec.yml": formats.yaml_file,
            "model/cluster/runtime/1.yml": formats.yaml_file,
            "model/cluster/strategies/1": formats.binary_file,
        },
    ),
    Reader("message", samples.messages, _message, {"answer.json": formats.json_file}),
)
BY_NAME = {reader.name: reader for reader in READERS}
