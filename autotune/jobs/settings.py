"""From the settings that a user gives to a `JobSpec`; explicit values win over the job file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.cluster import MAX_NAMED, Cluster
from autotune.cluster_file import read_cluster
from autotune.errors import InvalidInput
from autotune.parsing import read_json
from autotune.recordings.job_file import RecordedJob, recording_at
from autotune.records import Accelerators, Conditions, Network
from autotune.tuning.job import NO_LIMIT_S, NO_LIMIT_TRIALS, SETTINGS, JobSpec, read_job_file
from autotune.workload import Workload
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.scheduling import usable_cores, wants_round_robin
from runtime_rewriter.world.command import read_command
from runtime_rewriter.world.script_command import ScriptCommand


@dataclass(frozen=True)
class Target:
    """The cluster to tune for (None: this machine) and what of it is emulated.

    `profile` holds the durations that emulated accelerators wait for; None: measured ones.
    """

    cluster: Cluster | None
    conditions: Conditions
    profile: Workload | None


@dataclass(frozen=True)
class Settings:
    spec: JobSpec
    script: ScriptCommand


def read_settings(
    command: Sequence[str], given: Mapping[str, Any], job_file: Path | None, address: str | None
) -> Settings:
    """Return everything a new job needs; raises `InvalidInput`.

    `given` maps names of settings to values as `Setting.read` returns them.
    """
    words, values = list(command), dict(given)
    if job_file is not None:
        from_file = read_job_file(job_file)
        file_command = from_file.pop("command")
        if words:
            raise InvalidInput(
                f"the command must come from {job_file} or from the command line after --, "
                "but both have one"
            )
        words = _words(file_command, job_file)
        values = _merged(given, from_file)
    if not words:
        raise InvalidInput(
            "nothing to tune: give a command, for example: "
            "autotune tune -- torchrun --nproc-per-node 2 train.py"
        )
    script = read_command(words)
    target = read_target(values, address)
    _refuse_machines_elsewhere(script, target.conditions.network)
    _refuse_unplaced_figures(target, str(values.get("cluster")))
    workers = _workers(values.get("workers"), script.workers, target.cluster)
    fields = {item.field: values[item.name] for item in SETTINGS if item.name in values}
    fields.pop("", None)  # settings that are not fields of the spec
    if "max_seconds" in fields:
        fields.setdefault("max_trials", NO_LIMIT_TRIALS)
    elif "max_trials" in fields:
        fields["max_seconds"] = NO_LIMIT_S
    fields |= {
        "protect": _folders(fields.get("protect", ())),
        "workers": workers,
        "cluster": target.cluster or Cluster.local(workers),
        "conditions": scheduled(target.conditions, workers),
        "given_profile": target.profile,
    }
    return Settings(JobSpec(command=tuple(words), **fields), script)


def _words(command: str | Sequence[str], job_file: Path) -> list[str]:
    """The words of a job file's command. Raises `InvalidInput` for one that no shell can read."""
    if not isinstance(command, str):
        return list(command)
    try:
        return shlex.split(command)
    except ValueError as error:
        raise InvalidInput(
            f"{job_file}: command must be one that a shell understands, but {command!r} is not: "
            f"{error}; quote it, or write it as a list of words"
        ) from error


def _merged(given: Mapping[str, Any], from_file: dict[str, Any]) -> dict[str, Any]:
    if "testbed" in from_file and "cluster" in from_file:
        raise InvalidInput(
            "a testbed takes its hosts from its own file, so a job file has a cluster or a "
            "testbed, not both; leave out cluster"
        )
    if {"testbed", "cluster"} & set(given):  # the explicit one replaces whichever the file has
        from_file = {key: from_file[key] for key in from_file if key not in ("testbed", "cluster")}
    return {**from_file, **given}


def read_target(values: Mapping[str, Any], address: str | None) -> Target:
    """Read the cluster, testbed, accelerators, byte_scale and profile; raises `InvalidInput`."""
    testbed = values.get("testbed")
    if testbed is not None and "cluster" in values:
        raise InvalidInput(
            "a testbed takes its hosts from its own file, so --testbed and --cluster exclude each "
            "other; leave out --cluster"
        )
    if testbed is not None and address is not None:
        raise InvalidInput(
            "a testbed brings its own Ray cluster, so --testbed and --address exclude each other; "
            "leave out one of them"
        )
    path = testbed or values.get("cluster")
    cluster = read_cluster(Path(path)) if path else None
    network = Network.LOOPBACK if address is None else Network.HOSTS
    if testbed is not None:
        network = Network.EMULATED
    _refuse_hosts_elsewhere(cluster, str(path), network)
    accelerators = Accelerators(values.get("accelerators", Accelerators.REAL))
    conditions = Conditions(network, accelerators, float(values.get("byte_scale", 1.0)))
    profile = None
    if "profile" in values:
        profile = _profile(Path(values["profile"]))
        timetable_of(profile)  # refuse an unusable profile before anything starts
    return Target(cluster, conditions, profile)


def _profile(path: Path) -> Workload:
    """The workload of a recording, or of a file of its own."""
    if (folder := recording_at(path)) is not None:
        return RecordedJob.read(folder).measured_workload(folder)
    return Workload.from_data(read_json(path), str(path))


def _refuse_hosts_elsewhere(cluster: Cluster | None, path: str, network: Network) -> None:
    """Raise `InvalidInput` if several hosts are neither joined by Ray nor emulated."""
    if network is Network.LOOPBACK and cluster is not None and len(cluster.hosts) > 1:
        raise InvalidInput(
            "several hosts must be joined by Ray or emulated, but the cluster file "
            f"{path} has {len(cluster.hosts)} hosts, and neither --address nor --testbed is given; "
            "start Ray on these hosts and give --address, use --testbed in place of --cluster "
            "(root), or leave the cluster out to stay on this machine"
        )


def _refuse_machines_elsewhere(script: ScriptCommand, network: Network) -> None:
    """Raise `InvalidInput` if the command joins machines that are neither in Ray nor emulated."""
    if network is Network.LOOPBACK and script.nodes > 1:
        raise InvalidInput(
            "several machines must be joined by Ray or emulated, but the command joins "
            f"{script.nodes}, and neither --address nor --testbed is given; start Ray on them and "
            "give --address, or leave --nnodes out to stay on this machine"
        )


def _refuse_unplaced_figures(target: Target, path: str) -> None:
    """Raise `InvalidInput` if Ray could place ranks of one host on another with other figures."""
    cluster = target.cluster
    if cluster is None or target.conditions.network is not Network.HOSTS:
        return
    figures = {replace(host, name="", devices=1, address="") for host in cluster.hosts}
    unplaced = [host.name for host in cluster.hosts if not host.address]
    if unplaced and (len(figures) > 1 or cluster.pair_links):
        raise InvalidInput(
            "hosts that differ need the `address` of their Ray node, or ranks may be on another "
            f"host than their figures, but {path} has none for {', '.join(unplaced[:MAX_NAMED])}; "
            "add what `ray start` printed there as the node's IP, or write the file with "
            "autotune probe --address"
        )


def scheduled(conditions: Conditions, workers: int) -> Conditions:
    """Return the conditions with round-robin scheduling if it helps."""
    return replace(conditions, round_robin=wants_round_robin(conditions, workers, usable_cores()))


def refuse_settings(given: Sequence[str]) -> None:
    """Raise `InvalidInput` if options that decide what a job does accompany `--resume`."""
    if given:
        raise InvalidInput(
            "--resume continues with the settings that the job was started with; leave out "
            f"{', '.join(given)}"
        )


def _folders(paths: Sequence[str]) -> tuple[str, ...]:
    """Absolute paths of folders that exist; raises `InvalidInput`."""
    for path in paths:
        if not Path(path).is_dir():
            raise InvalidInput(f"--protect needs existing folders, but there is no folder {path!r}")
    return tuple(str(Path(path).absolute()) for path in paths)


def _workers(asked: int | None, in_command: int | None, cluster: Cluster | None) -> int:
    candidates = (asked, in_command, cluster.world_size if cluster else None)
    workers = next((value for value in candidates if value is not None), None)
    if workers is None:
        raise InvalidInput(
            "the number of workers is not known; use torchrun --nproc-per-node N, --workers N "
            "or --cluster cluster.yaml"
        )
    if workers < 2:
        raise InvalidInput(
            "gradients are synchronized between two or more workers, but the command asks for "
            f"{workers}"
        )
    if asked is not None and in_command is not None and asked != in_command:
        raise InvalidInput(
            f"--workers and torchrun must agree, but are {asked} and {in_command}",
            anchor="wrong-world-size",
        )
    return workers


def read_ports(text: str) -> tuple[int, int]:
    """Parse `29500-29510`; raises `InvalidInput`."""
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isdigit() and last.isdigit()) or not 0 <= int(first) <= int(last) <= 65535:
        raise InvalidInput(
            "--master-ports needs FIRST-LAST between 0 and 65535, for example 29500-29510, but is "
            f"{text!r}"
        )
    return int(first), int(last)
