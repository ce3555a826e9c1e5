"""From the command line and the job file to a `JobSpec`; the command line wins."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from typing import Any

from autotune.cluster import Cluster
from autotune.commands.emulation import read_setting, scheduled
from autotune.errors import InvalidInput
from autotune.tuning.job import JobSpec, Search, Similarity, read_job_file
from autotune.units import parse_seconds
from runtime_rewriter.world.command import ScriptCommand, read_command

_SAME_NAME = (
    *("search", "similarity", "diversity", "lossy", "samples_per_round", "top_k", "seed"),
    *("warmup_steps", "timed_steps", "most_steps", "precision", "losing"),
    *("reference_every", "deviation", "ab_pairs", "ab_precision", "confidence"),
)
_TIMES = {
    "budget_time": "max_seconds",
    "step_timeout": "step_timeout_s",
    "start_timeout": "start_timeout_s",
    "probe_time": "probe_s",
}

NO_LIMIT_TRIALS, NO_LIMIT_S = 1_000_000, 30 * 24 * 3600.0
"""Where one budget is given, it alone counts."""


@dataclass(frozen=True)
class Settings:
    spec: JobSpec
    script: ScriptCommand


def read_settings(options: argparse.Namespace) -> Settings:
    """Everything a new job needs; raises `InvalidInput`."""
    words, file, values = list(options.command), None, {}
    if options.job_file is not None:
        file = read_job_file(options.job_file)
        values = file.settings()
        if words:
            raise InvalidInput(
                f"the command must come from {options.job_file} or from the command line after --, but both have one"
            )
        words = shlex.split(file.command) if isinstance(file.command, str) else list(file.command)
    if not words:
        raise InvalidInput(
            "nothing to tune: give a command, for example: autotune tune -- torchrun --nproc-per-node 2 train.py"
        )
    script = read_command(words)
    setting = read_setting(options, file)
    workers = _workers(options.workers, script.workers, setting.cluster)
    values |= _given(options)
    if "max_seconds" in values and "max_trials" not in values:
        values["max_trials"] = NO_LIMIT_TRIALS
    if "max_trials" in values and "max_seconds" not in values:
        values["max_seconds"] = NO_LIMIT_S
    conditions = scheduled(setting.conditions, workers)
    values |= {
        "cluster": setting.cluster or Cluster.local(workers),
        "conditions": conditions,
        "given_profile": setting.profile,
    }
    return Settings(JobSpec(command=tuple(words), workers=workers, **values), script)


def refuse_settings(options: argparse.Namespace) -> None:
    """A resumed job keeps the settings it was started with; raises `InvalidInput` where other ones are given."""
    others = (
        "budget_trials",
        "simulators",
        "cluster",
        "testbed",
        "byte_scale",
        "accelerators",
        "profile",
        "workers",
        "job",
        "job_file",
    )
    names = (*_SAME_NAME, *_TIMES, *others)
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
    given = ["the job file" if name == "--job-file" else name for name in given] + (
        ["the command"] if options.command else []
    )
    if given:
        raise InvalidInput(
            f"--resume goes on with the settings that the job was started with; leave out {', '.join(given)}"
        )


def _workers(asked: int | None, in_command: int | None, cluster: Cluster | None) -> int:
    found = [
        value
        for value in (asked, in_command, cluster.world_size if cluster else None)
        if value is not None
    ]
    if not found:
        raise InvalidInput(
            "the number of workers is not known; use torchrun --nproc-per-node N, --workers N or --cluster cluster.yaml"
        )
    if found[0] < 2:
        raise InvalidInput(
            f"gradients are synchronized between two or more workers, but the command asks for {found[0]}"
        )
    if asked is not None and in_command is not None and asked != in_command:
        raise InvalidInput(f"--workers and torchrun must agree, but say {asked} and {in_command}")
    return found[0]


def _given(options: argparse.Namespace) -> dict[str, Any]:
    given = {
        name: getattr(options, name) for name in _SAME_NAME if getattr(options, name) is not None
    }
    for name, field in _TIMES.items():
        if getattr(options, name) is not None:
            given[field] = parse_seconds(getattr(options, name), f"--{name.replace('_', '-')}")
    if options.budget_trials is not None:
        given["max_trials"] = options.budget_trials
    if options.simulators is not None:
        given["simulators"] = tuple(name.strip() for name in options.simulators.split(","))
    if "search" in given:
        given["search"] = Search(given["search"])
    if "similarity" in given:
        given["similarity"] = Similarity(given["similarity"])
    return given


def read_ports(text: str) -> tuple[int, int]:
    """`29500-29510`; raises `InvalidInput`."""
    first, _, last = text.partition("-")
    if (
        not (first.isdigit() and (last or first).isdigit())
        or not 0 <= int(first) <= int(last or first) <= 65535
    ):
        raise InvalidInput(
            f"--master-ports needs FIRST-LAST between 0 and 65535, for example 29500-29510, but is {text!r}"
        )
    return int(first), int(last or first)
