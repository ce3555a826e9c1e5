"""What a tuning job is asked to do: frozen, validated, stored with its trials."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from autotune.canonical import to_data
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.parsing import parse, read_yaml
from autotune.records import REAL_CONDITIONS, Accelerators, Conditions
from autotune.simulators.registry import SIMULATORS
from autotune.tuning.statistics import fewest_values
from autotune.units import parse_seconds
from autotune.workload import Workload


class Search(StrEnum):
    """How candidates are proposed; all but the first are the baselines and ablations of AutoSync sec. 5."""

    AUTOSYNC = "autosync"  # sample, rank by trained simulators, diverse top-K
    NO_SIMULATOR = "no-simulator"  # AutoSync(-s): both constraints and diversity, nothing predicted
    RANDOM = "random"
    BAYES = "bayes"  # scikit-optimize over the same space
    FUSION = (
        "fusion"  # scikit-optimize on fusion threshold and cycle time, as `horovodrun --autotune`
    )


class Similarity(StrEnum):
    """The similarity of Eq. 11."""

    CHOICES = "choices"  # agreement of the choices per variable
    HIDDEN = "hidden"  # cosine of the simulator's hidden state; needs a trained simulator


_TYPED = {
    "max_trials": "budget_trials",
    "max_seconds": "budget_time",
    "step_timeout_s": "step_timeout",
    "start_timeout_s": "start_timeout",
}
"""What a user types for a field."""
DEFAULT_SIMULATORS = ("linear", "rnn", "gat")


@dataclass(frozen=True)
class JobSpec:
    """Everything that decides what a job does; the same spec and seed propose the same strategies.

    A trial is `warmup_steps` untimed and `timed_steps` timed steps, then as many more, up to `most_steps` in all, until half
    the width of the 95 % interval of its median is at most `precision` of the median, or the interval lies above `losing` times
    the best measured so far. After `reference_every` candidates the
    current setup runs again; where it deviates by more than `deviation` (relative; less on a machine whose references agree
    better) from the time before, the trials in between are marked; so are those during which the machine changed. They are
    repeated, at most `max_repeats` times each. `diversity` is alpha of Eq. 11.
    The closing comparison runs blocks of `timed_steps` of each side until half the width of the interval of the time ratio is
    about `ab_precision`, the tuned strategy is clearly slower, or there are `ab_pairs` (fewer if the time is up). It exports
    the tuned strategy only if the confidence interval lies below 1.
    `given_profile` is what emulated accelerators wait for; None: what one replica alone took.
    """

    __pydantic_config__ = {"extra": "forbid"}

    command: tuple[str, ...]
    workers: int
    cluster: Cluster
    search: Search = Search.AUTOSYNC
    simulators: tuple[str, ...] = DEFAULT_SIMULATORS
    similarity: Similarity = Similarity.CHOICES
    diversity: float = 0.4
    lossy: bool = False
    max_trials: int = 60
    max_seconds: float = 1800.0
    samples_per_round: int = 300
    top_k: int = 6
    warmup_steps: int = 2
    timed_steps: int = 8
    most_steps: int = 40
    precision: float = 0.02
    losing: float = 1.15
    reference_every: int = 6
    deviation: float = 0.15
    max_repeats: int = 1
    finalists: int = 3
    ab_pairs: int = 20
    ab_precision: float = 0.01
    confidence: float = 0.95
    step_timeout_s: float = 60.0
    start_timeout_s: float = 120.0
    probe_s: float = 20.0
    seed: int = 0
    conditions: Conditions = REAL_CONDITIONS
    given_profile: Workload | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidInput(
                "a job needs a command, for example: autotune tune -- torchrun --nproc-per-node 2 train.py"
            )
        at_least_one = (
            "workers",
            "max_trials",
            "samples_per_round",
            "top_k",
            "timed_steps",
            "reference_every",
            "finalists",
        )
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise InvalidInput(
                    f"{_TYPED.get(name, name)} must be at least 1, but is {getattr(self, name)}"
                )
        if self.warmup_steps < 1:
            raise InvalidInput(
                f"warmup_steps must be at least 1 (the numerics gate runs in it), but is {self.warmup_steps}"
            )
        if not 0.5 <= self.confidence < 1:
            raise InvalidInput(f"confidence must lie in [0.5, 1), but is {self.confidence}")
        if self.ab_pairs < fewest_values(self.confidence):
            need = f"at least {fewest_values(self.confidence)} for an interval of {self.confidence:.0%}"
            raise InvalidInput(f"ab_pairs must be {need}, but is {self.ab_pairs}")
        for name in (
            "max_seconds",
            "deviation",
            "precision",
            "ab_precision",
            "step_timeout_s",
            "start_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise InvalidInput(
                    f"{_TYPED.get(name, name)} must be above 0, but is {getattr(self, name)}"
                )
        if not 0 <= self.diversity < math.inf:
            raise InvalidInput(f"diversity must be at least 0, but is {self.diversity}")
        unknown = sorted(set(self.simulators) - set(SIMULATORS))
        if unknown or not self.simulators:
            raise InvalidInput(
                f"simulators must be some of {', '.join(SIMULATORS)}, "
                f"but are {', '.join(self.simulators) or 'none'}"
            )
        if self.cluster.world_size != self.workers:
            raise InvalidInput(
                f"the cluster {self.cluster.name!r} must have as many devices as the job has workers, "
                f"but has {self.cluster.world_size} for {self.workers}; change --nproc-per-node or the cluster file"
            )

        self._check_lengths()
        self._check_profile()

    def _check_lengths(self) -> None:
        if self.most_steps < 0:
            raise InvalidInput(
                f"most_steps must be at least 0 (no more than timed_steps: never more), but is {self.most_steps}"
            )
        if not self.losing > 1:
            raise InvalidInput(
                f"losing must be above 1 (times the best step time so far), but is {self.losing}"
            )
        if not 0 <= self.probe_s < math.inf:
            raise InvalidInput(
                f"probe_time must be at least 0 (the fits of the cluster file are used), but is {self.probe_s}"
            )

    def _check_profile(self) -> None:
        if self.given_profile is not None and self.conditions.accelerators is Accelerators.REAL:
            raise InvalidInput(
                "only emulated accelerators wait as a given profile says, but they are real; add --accelerators emulated"
            )

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = to_data(self)
        return data

    @staticmethod
    def from_data(data: Any, where: str = "job") -> JobSpec:
        return parse(JobSpec, data, where)


_NO_FIELDS = ("command", "cluster", "testbed", "byte_scale", "accelerators", "profile")
"""Of a `JobFile`: what is read before there can be a `JobSpec`."""


@dataclass(frozen=True)
class JobFile:
    """The YAML a user writes for `autotune tune job.yaml`; what is None keeps the command line's or default value."""

    __pydantic_config__ = {"extra": "forbid"}

    command: str | tuple[str, ...]
    cluster: str | None = None
    testbed: str | None = None
    byte_scale: float | None = None
    accelerators: Accelerators | None = None
    profile: str | None = None
    search: Search | None = None
    simulators: tuple[str, ...] | None = None
    similarity: Similarity | None = None
    diversity: float | None = None
    lossy: bool | None = None
    budget_trials: int | None = None
    budget_time: str | float | None = None
    samples_per_round: int | None = None
    top_k: int | None = None
    warmup_steps: int | None = None
    timed_steps: int | None = None
    most_steps: int | None = None
    precision: float | None = None
    losing: float | None = None
    reference_every: int | None = None
    deviation: float | None = None
    max_repeats: int | None = None
    finalists: int | None = None
    ab_pairs: int | None = None
    ab_precision: float | None = None
    confidence: float | None = None
    step_timeout: str | float | None = None
    start_timeout: str | float | None = None
    probe_time: str | float | None = None
    seed: int | None = None

    def settings(self) -> dict[str, Any]:
        """The `JobSpec` fields that the file sets, without `_NO_FIELDS`."""
        renamed = {"budget_trials": "max_trials"}
        times = {"budget_time": "max_seconds", "probe_time": "probe_s"}
        times |= {"step_timeout": "step_timeout_s", "start_timeout": "start_timeout_s"}
        found: dict[str, Any] = {}
        for name, value in self.__dict__.items():
            if value is None or name in _NO_FIELDS:
                continue
            if name in times:
                found[times[name]] = parse_seconds(value, name)
            else:
                found[renamed.get(name, name)] = value
        return found


def read_job_file(path: Path) -> JobFile:
    """The job file; the paths in it are relative to it, those that are returned to the current directory."""
    file = parse(JobFile, read_yaml(path), str(path))

    def there(name: str | None) -> str | None:
        return None if name is None else str(path.parent / name)

    return replace(
        file, cluster=there(file.cluster), testbed=there(file.testbed), profile=there(file.profile)
    )
