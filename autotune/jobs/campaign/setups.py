"""A model on a cluster by their names, for everyone who takes trials: an example script or a generated model, on a cluster file."""

from __future__ import annotations

from autotune.records import Accelerators
from autotune.jobs.campaign.generated_models import MODELS
from benchmarks.repository import ROOT
from autotune.jobs.campaign.session import Setup

EXAMPLES = ("resnet_digits", "gpt_text", "lstm_text", "ncf_ratings")
"""Real scripts: emulated accelerators wait for what one replica alone was measured to take. The generated models' times are assumed."""


def setup_of(
    model: str, cluster_name: str, accelerators: Accelerators = Accelerators.EMULATED
) -> Setup:
    """Cluster files lie in `datasets/clusters` and `examples/clusters`."""
    own = ROOT / "datasets" / "clusters" / f"{cluster_name}.yaml"
    file = own if own.exists() else ROOT / "examples" / "clusters" / f"{cluster_name}.yaml"
    if model in EXAMPLES:
        return Setup(model, file, (f"examples/{model}.py", "--epochs", "100000"), accelerators)
    return Setup(
        model, file, ("benchmarks/models/script.py", model), accelerators, MODELS[model].workload
    )
