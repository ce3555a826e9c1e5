"""What several benchmarks need of this checkout: its root, its scripts and its clusters."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from autotune.jobs.campaign.generated_models import MODELS
from autotune.jobs.campaign.setups import Setup, generated_setup, script_setup
from autotune.testbed.capabilities import capabilities

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "examples" / "clusters"


def cluster_file(name: str) -> Path:
    """Return the file of a cluster of `datasets/clusters` or `examples/clusters`."""
    file = ROOT / "datasets" / "clusters" / f"{name}.yaml"
    return file if file.exists() else CLUSTERS / f"{name}.yaml"


def setup_of(model: str, cluster: str) -> Setup:
    """Return a generated model or an example script on a cluster, with emulated accelerators."""
    if model in MODELS:
        return generated_setup(model, cluster_file(cluster))
    return script_setup(ROOT / "examples" / f"{model}.py", cluster_file(cluster))


def machine() -> dict[str, object]:
    """Return the hardware for a benchmark's last line."""
    return {"cores": os.cpu_count(), "machine": platform.machine()}


def can_emulate() -> bool:
    """Return whether this machine can emulate hosts; if not, print the reason to stderr."""
    able = capabilities()
    if not able.possible:
        print(able.message, file=sys.stderr)
    return able.possible
