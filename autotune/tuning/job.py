"""The specification of a tuning job: frozen, validated, stored with the job's trials."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from autotune.canonical import to_data
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.limits import MAX_COUNT, MAX_RANKS, MAX_SECONDS
from autotune.parsing import check_utf8, parse, read_yaml
from autotune.records import REAL_CONDITIONS, Accelerators, Conditions
from autotune.simulators.registry import SIMULATORS
from autotune.tuning.settings import Kind, Setting, setting, settings_of
from autotune.tuning.statistics import fewest_values
from autotune.workload import Workload


class Search(StrEnum):
    """How candidates are proposed; all but AUTOSYNC are baselines (AutoSync sec. 5)."""

    AUTOSYNC = "autosync"  # sample, rank by trained simulators, diverse top-K
    NO_SIMULATOR = "no-simulator"  # AutoSync(-s): constraints and diversity, no prediction
    RANDOM = "random"
    BAYES = "bayes"  # scikit-optimize over the same space
    FUSION = "fusion"  # scikit-optimize over fusion threshold and cycle time, as Horovod's autotune


class Similarity(StrEnum):
    """The similarity of Eq. 11."""

    CHOICES = "choices"  # agreement of the choices per variable
    HIDDEN = "hidden"  # cosine of the simulator's hidden state; needs a trained simulator


NO_LIMIT_TRIALS, NO_LIMIT_S = MAX_COUNT, MAX_SECONDS
"""The budget that was not given, if the other one was."""
DEFAULT_S = 1800.0
"""The time budget if neither is given. It bounds each round's work if only trials are given."""
DEFAULT_SIMULATORS = ("linear", "rnn", "gat")


@dataclass(frozen=True)
class JobSpec:
    """Everything that determines a job; the same spec and seed propose the same strategies.

    A trial runs `warmup_steps` untimed and `timed_steps` timed steps. It continues, up to
    `most_steps` timed steps in all, until one of two things holds. Half the width of the 95 %
    interval of its median is at most `precision` of the median. Or the interval lies above
    `losing` times the best step time so far. The first trials of the current setup and of a
    candidate are first looks. They end as soon as they can tell a difference of `deviation`, and
    more precise ones then replace them.

    After `reference_every` candidates the current setup runs again. If it deviates from the run
    before by more than `deviation`, the trials in between count as disturbed. The limit is tighter
    on a machine whose references agree better. Disturbed trials are repeated at most `max_repeats`
    times each.

    The closing comparison alternates blocks of `timed_steps` of each side. It ends when half the
    width of the ratio's interval is about `ab_precision`, when the tuned strategy is clearly
    slower, after `ab_pairs`, or when the time is up. The tuned strategy is exported only if the
    whole confidence interval lies below 1.

    `given_profile` holds the durations that emulated accelerators wait for; None: the durations
    measured on one replica.
    """

    __pydantic_config__ = {"extra": "forbid"}

    command: tuple[str, ...]
    workers: int
    cluster: Cluster
    continue_training: bool = setting(
        False,
        "files",
        "keep the training: its steps are the trials, and it goes on under the best strategy after "
        "the decision. Its files are real",
        short_option="--continue",
    )
    writes_are_fine: bool = setting(
        False,
        "files",
        "trials may change the real files; otherwise the script sees a copy-on-write view of its "
        "own and the working folder, which vanishes with the job",
    )
    protect: tuple[str, ...] = setting(
        (), "files", "further folders that trials must not change", shown="none", paths=True
    )
    trusted_network: bool = setting(
        False,
        "job",
        "everybody who can reach the hosts may run code on them. TensorFlow's servers listen "
        "without authentication, and otherwise run only in network namespaces",
    )
    search: Search = setting(
        Search.AUTOSYNC,
        "search",
        "how strategies are proposed: autosync trains simulators and tries a diverse top K; "
        "no-simulator predicts nothing; random; bayes uses scikit-optimize over the same space; "
        "fusion uses it over Horovod's fusion threshold and cycle time",
    )
    simulators: tuple[str, ...] = setting(
        DEFAULT_SIMULATORS, "search", "simulators to train, also plugins; the most accurate ranks"
    )
    similarity: Similarity = setting(
        Similarity.CHOICES,
        "search",
        "similarity in Eq. 11: agreement of choices, or cosine of the simulator's hidden states",
    )
    diversity: float = setting(
        0.4, "search", "alpha of Eq. 11; 0 takes the best predictions only", at_least=0
    )
    lossy: bool = setting(
        False, "search", "also try lossy compression: fp16, bf16, int8, top-k, PowerSGD"
    )
    max_trials: int = setting(
        60,
        "budget",
        "maximum number of the search's trials; the fastest strategies are then measured again",
        name="budget_trials",
        shown="60, or no limit if budget_time is given",
        at_least=1,
    )
    max_seconds: float = setting(
        DEFAULT_S,
        "budget",
        "wall time of the command: start, probe, search and closing comparison",
        name="budget_time",
        shown="30min, or no limit if budget_trials is given",
        time=True,
        above=0,
    )
    samples_per_round: int = setting(300, "search", "strategies scored per round", at_least=1)
    top_k: int = setting(6, "search", "trials per round", at_least=1)
    descent: float = setting(
        0.3,
        "search",
        "share of the search's trials and time that compares neighbors of the fastest strategy "
        "with it, in pairs",
        at_least=0,
        below=1,
    )
    warmup_steps: int = setting(
        2, "trials", "untimed steps of a trial", at_least=1, remark="the numerics gate runs in it"
    )
    timed_steps: int = setting(
        8, "trials", "timed steps of a trial, of each further batch and of an A/B block", at_least=1
    )
    most_steps: int = setting(
        40,
        "trials",
        "maximum timed steps of a trial; 0 never adds a batch",
        at_least=0,
        remark="no more than timed_steps: never more",
    )
    precision: float = setting(
        0.02,
        "trials",
        "relative half width of the median's 95 % interval at which a trial ends",
        above=0,
    )
    losing: float = setting(
        1.15,
        "trials",
        "a trial ends early if its interval lies above this multiple of the best step time",
        above=1,
        remark="times the best step time so far",
    )
    reference_every: int = setting(
        6, "trials", "candidates between two runs of the current setup", at_least=1
    )
    deviation: float = setting(
        0.15,
        "trials",
        "maximum relative difference of two runs of the current setup; a larger one marks the "
        "trials between them as disturbed. The limit tightens once the noise is known",
        above=0,
    )
    max_repeats: int = setting(1, "trials", "maximum repeats of a disturbed trial", at_least=0)
    finalists: int = setting(
        3,
        "closing comparison",
        "strategies measured again, if time is left, before the comparison; at most this many are "
        "compared",
        at_least=1,
    )
    ab_pairs: int = setting(20, "closing comparison", "maximum pairs of blocks")
    ab_precision: float = setting(
        0.01,
        "closing comparison",
        "relative half width of the ratio's interval at which the comparison ends",
        above=0,
        below=1,
        remark="0.01 is 1 %",
    )
    confidence: float = setting(
        0.95, "closing comparison", "confidence of the ratio's interval", at_least=0.5, below=1
    )
    step_timeout_s: float = setting(
        60.0,
        "limits",
        "silence after which a rank counts as hung",
        name="step_timeout",
        shown="60s",
        time=True,
        above=0,
    )
    start_timeout_s: float = setting(
        120.0,
        "limits",
        "maximum time until the first training step",
        name="start_timeout",
        shown="2min",
        time=True,
        above=0,
    )
    probe_s: float = setting(
        20.0,
        "limits",
        "maximum time for probing the links; 0s uses the fits in the cluster file",
        name="probe_time",
        shown="20s",
        time=True,
        at_least=0,
        remark="the fits of the cluster file are used",
    )
    seed: int = setting(
        0, "search", "seed of every random choice", at_least=-(2**63), at_most=2**63 - 1
    )
    conditions: Conditions = REAL_CONDITIONS
    given_profile: Workload | None = None

    def __post_init__(self) -> None:
        if not self.command:
            example = "autotune tune -- torchrun --nproc-per-node 2 train.py"
            raise InvalidInput(f"a job needs a command, for example: {example}")
        for word in self.command:
            check_utf8("each word of the command", word)
        for item in SETTINGS:
            if item.field:
                item.check(getattr(self, item.field))
        fewest = fewest_values(self.confidence)
        if self.ab_pairs < fewest:
            interval = f"at least {fewest} for an interval of {self.confidence:.0%}"
            raise InvalidInput(f"ab_pairs must be {interval}, but is {self.ab_pairs}")
        self._refuse_a_changed_training()
        unknown = sorted(set(self.simulators) - set(SIMULATORS))
        if unknown or not self.simulators:
            given = ", ".join(self.simulators) or "none"
            raise InvalidInput(
                f"simulators must be some of {', '.join(SIMULATORS)}, but are {given}"
            )
        if self.cluster.world_size != self.workers:
            raise InvalidInput(
                f"the cluster {self.cluster.name!r} must have as many devices as the job has "
                f"workers, but has {self.cluster.world_size} for {self.workers}; "
                "change --nproc-per-node or the cluster file",
                anchor="wrong-world-size",
            )
        if self.given_profile is not None and self.conditions.accelerators is Accelerators.REAL:
            raise InvalidInput(
                "only emulated accelerators wait for the durations of a given profile, but they "
                "are real; add --accelerators emulated"
            )

    def _refuse_a_changed_training(self) -> None:
        """Refuse what would change the result of a training that is kept."""
        changes = {
            "--lossy": self.lossy,
            "--accelerators emulated": self.conditions.accelerators is Accelerators.EMULATED,
            "--byte-scale": self.conditions.byte_scale != 1,
        }
        if self.continue_training and any(changes.values()):
            given = ", ".join(name for name, changed in changes.items() if changed)
            raise InvalidInput(
                "--continue keeps the training, whose steps must be those of the script alone, but "
                f"{given} would change them; leave out one or the other"
            )

    @property
    def files(self) -> str:
        """What the writes of trials change, in words."""
        if self.continue_training:
            return "real files (continue_training)"
        return "real files (writes_are_fine)" if self.writes_are_fine else "copy-on-write view"

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = to_data(self)
        return data

    @staticmethod
    def from_data(data: Any, where: str = "job") -> JobSpec:
        return parse(JobSpec, data, where)


_EARLY_SETTINGS = (
    Setting(
        "workers",
        "job",
        "number of ranks",
        "the number in the command, or the devices of the cluster",
        Kind.WHOLE,
        field="workers",
        at_least=2,
        at_most=MAX_RANKS,
    ),
    Setting(
        "cluster",
        "job",
        "file that describes the hosts; several hosts also need --address",
        "this machine, or with --address the hosts of the ranks",
    ),
    Setting(
        "testbed",
        "emulation",
        "emulate the network of this cluster file on this machine (root); in place of cluster",
        "no emulated network",
        metavar="CLUSTER",
    ),
    Setting(
        "byte_scale",
        "emulation",
        "divide link rates and message sizes by this number",
        "1",
        Kind.NUMBER,
        metavar="K",
    ),
    Setting(
        "accelerators",
        "emulation",
        "emulated: timed waits instead of computation",
        "real",
        Kind.CHOICE,
        Accelerators,
    ),
    Setting(
        "profile",
        "emulation",
        "workload (JSON, or a folder of `autotune profile`) whose durations emulated accelerators "
        "wait for",
        "one replica of the script, measured first",
        metavar="WORKLOAD",
    ),
)
_GROUPS = (
    "job",
    "files",
    "emulation",
    "budget",
    "search",
    "trials",
    "closing comparison",
    "limits",
)
SETTINGS = tuple(
    sorted((*_EARLY_SETTINGS, *settings_of(JobSpec)), key=lambda item: _GROUPS.index(item.group))
)
"""Every setting of a job, except its command, by group."""

_JobFile = make_dataclass(
    "JobFile",
    [
        ("command", str | tuple[str, ...]),
        *((item.name, item.file_type | None, field(default=None)) for item in SETTINGS),
    ],
    frozen=True,
    namespace={"__pydantic_config__": {"extra": "forbid"}},
)


def read_job_file(path: Path) -> dict[str, Any]:
    """Return the values that a job file gives, by setting name, and its `command`.

    Paths in the file are relative to the file; returned paths are relative to the current
    directory. Raises `InvalidInput`, also for an unknown key.
    """
    raw = vars(parse(_JobFile, read_yaml(path), str(path)))
    values: dict[str, Any] = {"command": raw["command"]}
    for item in SETTINGS:
        if raw[item.name] is not None:
            value = item.read(raw[item.name], item.name)
            if item.kind is Kind.PATH:
                value = path.parent / value
            elif item.kind is Kind.PATHS:
                value = tuple(str(path.parent / each) for each in value)
            values[item.name] = value
    return values
