"""The setup of a campaign: a script or a generated model on a cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.errors import InvalidInput
from autotune.jobs.campaign import generated_models
from autotune.jobs.campaign.dilation import dilated
from autotune.records import Accelerators
from autotune.workload import Workload

TRAIN_GENERATED = Path(generated_models.__file__).with_name("train_generated.py")
TRAIN_VARIED = Path(generated_models.__file__).with_name("train_varied.py")


@dataclass(frozen=True)
class Setup:
    """One model on one cluster.

    `script`: the words after "python". `profile` returns what emulated accelerators wait for;
    without it they wait for what one replica alone was measured to take. With a `ratio` these times
    are scaled to this ratio of computation to communication (`balance`). `address`: a running Ray
    cluster; without it the hosts of `cluster_file` are emulated (root). `dilation`: how many times
    more slowly than the clock the emulated hosts' time passes (`autotune.jobs.campaign.dilation`);
    above 1 it needs a `ratio`, from which computation follows.
    """

    model: str
    cluster_file: Path
    script: tuple[str, ...]
    accelerators: Accelerators = Accelerators.EMULATED
    profile: Callable[[], Workload] | None = None
    address: str | None = None
    ratio: float | None = None
    dilation: int = 1

    def __post_init__(self) -> None:
        if self.ratio is not None and self.accelerators is Accelerators.REAL:
            raise InvalidInput(
                "a ratio of computation to communication needs emulated accelerators, "
                f"but {self.model!r} computes for real"
            )
        if self.dilation < 1 or (self.dilation > 1 and (self.ratio is None or self.address)):
            raise InvalidInput(
                "a time dilation must be at least 1, and above 1 needs emulated hosts and a ratio "
                f"of computation to communication, but is {self.dilation} for {self.model!r}"
            )

    def cluster(self) -> Cluster:
        """Read the cluster, dilated. Raises `InvalidInput`."""
        return dilated(read_cluster(self.cluster_file), self.dilation)

    @property
    def name(self) -> str:
        suffix = "" if self.accelerators is Accelerators.EMULATED else ".real"
        if self.dilation > 1:
            suffix += f".dilated_{self.dilation}"
        if self.ratio is not None:
            suffix += f".ratio_{self.ratio:g}"
        return f"{self.model}.{self.cluster_file.stem}{suffix}"


def dilation_of(name: str) -> int:
    """Return the dilation that a domain's name states (`Setup.name`)."""
    stated = re.search(r"\.dilated_(\d+)(?=\.|$)", name)
    return int(stated[1]) if stated else 1


def script_setup(
    script: Path,
    cluster_file: Path,
    accelerators: Accelerators = Accelerators.EMULATED,
    arguments: Sequence[str] = (),
    model: str = "",
) -> Setup:
    """Train one of the example scripts, for longer than any campaign takes.

    `model`: the name of the domain's model, by default that of the script.
    """
    words = (str(script), "--epochs", "100000", *arguments)
    return Setup(model or script.stem, cluster_file, words, accelerators)


def generated_setup(
    model: str, cluster_file: Path, accelerators: Accelerators = Accelerators.EMULATED
) -> Setup:
    """Train a model of `generated_models.MODELS`; its times are assumed."""
    profile = generated_models.MODELS[model].workload
    return Setup(model, cluster_file, (str(TRAIN_GENERATED), model), accelerators, profile)


def varied(
    setup: Setup,
    ddp: Mapping[str, object] | None = None,
    hook: str = "",
    spare_memory_mib: int | None = None,
) -> Setup:
    """Let the unmodified script build its DDP otherwise, or have less memory (`train_varied`).

    `ddp`: arguments of `DistributedDataParallel`. `hook`: a communication hook of torch.
    `spare_memory_mib`: what a rank may allocate once it trains.
    """
    words = {"ddp": dict(ddp or {}), "hook": hook, "spare_memory_mib": spare_memory_mib}
    if not any(words.values()):
        return setup
    return replace(setup, script=(str(TRAIN_VARIED), json.dumps(words), *setup.script))
