"""From the command line and the job file to where a job runs: which cluster, and what of it is emulated."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.errors import InvalidInput
from autotune.parsing import read_json
from autotune.records import Accelerators, Conditions, Network
from autotune.tuning.job import JobFile
from autotune.workload import Workload
from runtime_rewriter.emulation import timetable_of
from runtime_rewriter.scheduling import usable_cores, wants_round_robin


@dataclass(frozen=True)
class Setting:
    """`cluster` is None for this machine; `profile` is what emulated accelerators wait for, None for what is measured."""

    cluster: Cluster | None
    conditions: Conditions
    profile: Workload | None


def read_setting(options: argparse.Namespace, file: JobFile | None) -> Setting:
    """The command line wins over the file; raises `InvalidInput`."""
    testbed, plain = _path("testbed", options, file), _path("cluster", options, file)
    if file is not None and file.testbed is not None and file.cluster is not None:
        raise InvalidInput(
            "a testbed has the hosts of its own file, so a job file has a cluster or a testbed, not both; leave out cluster"
        )
    if options.cluster is not None and options.testbed is None:
        testbed = None  # the file's testbed gives way to the cluster that was asked for
    if testbed is not None and options.cluster is not None:
        raise InvalidInput(
            "a testbed has the hosts of its own file, so --testbed and --cluster exclude each other; leave out --cluster"
        )
    if testbed is not None and options.address is not None:
        raise InvalidInput(
            "a testbed brings its own Ray cluster, so --testbed and --address exclude each other; leave out one of them"
        )
    path = testbed or plain
    cluster = read_cluster(path) if path else None
    plainly = Network.LOOPBACK if options.address is None else Network.HOSTS
    network = plainly if testbed is None else Network.EMULATED
    accelerators = Accelerators(_either("accelerators", options, file) or Accelerators.REAL)
    byte_scale = _either("byte_scale", options, file)
    conditions = Conditions(network, accelerators, 1.0 if byte_scale is None else float(byte_scale))
    workload = _path("profile", options, file)
    profile = Workload.from_data(read_json(workload), str(workload)) if workload else None
    if profile is not None:
        timetable_of(profile)  # what cannot be waited for is told before anything starts
    return Setting(cluster, conditions, profile)


def scheduled(conditions: Conditions, workers: int) -> Conditions:
    """With round-robin scheduling where it helps."""
    return replace(conditions, round_robin=wants_round_robin(conditions, workers, usable_cores()))


def _either(name: str, options: argparse.Namespace, file: JobFile | None) -> Any:
    given = getattr(options, name, None)  # not every command takes every option
    return given if given is not None else getattr(file, name, None)


def _path(name: str, options: argparse.Namespace, file: JobFile | None) -> Path | None:
    value = _either(name, options, file)
    return Path(value) if value is not None else None
