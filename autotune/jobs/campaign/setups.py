"""The setup of a campaign: a script or a generated model on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.jobs.campaign import generated_models
from autotune.records import Accelerators
from autotune.workload import Workload

TRAIN_GENERATED = Path(generated_models.__file__).with_name("train_generated.py")


@dataclass(frozen=True)
class Setup:
    """One model on one cluster.

    `script`: the words after "python". `profile` returns what emulated accelerators wait for;
    without it they wait for what one replica alone was measured to take. `address`: a running Ray
    cluster; without it the hosts of `cluster_file` are emulated (root).
    """

    model: str
    cluster_file: Path
    script: tuple[str, ...]
    accelerators: Accelerators = Accelerators.EMULATED
    profile: Callable[[], Workload] | None = None
    address: str | None = None

    @property
    def name(self) -> str:
        suffix = "" if self.accelerators is Accelerators.EMULATED else ".real"
        return f"{self.model}.{self.cluster_file.stem}{suffix}"


def script_setup(
    script: Path, cluster_file: Path, accelerators: Accelerators = Accelerators.EMULATED
) -> Setup:
    """Train one of the example scripts, for longer than any campaign takes."""
    return Setup(script.stem, cluster_file, (str(script), "--epochs", "100000"), accelerators)


def generated_setup(
    model: str, cluster_file: Path, accelerators: Accelerators = Accelerators.EMULATED
) -> Setup:
    """Train a model of `generated_models.MODELS`; its times are assumed."""
    profile = generated_models.MODELS[model].workload
    return Setup(model, cluster_file, (str(TRAIN_GENERATED), model), accelerators, profile)
