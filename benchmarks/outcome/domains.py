"""The domains: a model on an emulated cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.cluster import Cluster
from autotune.cluster_file import read_cluster
from autotune.errors import InvalidInput
from autotune.workload import Workload
from benchmarks.models.generated import MODELS
from benchmarks.testbed_processes import ROOT

GENERATED = ("vgg", "densenet", "embedding")
CLUSTERS = ("four_hosts", "four_hosts_uneven", "two_hosts_two_devices")
EXAMPLES = {"gpt": ("examples/gpt_text.py", "--epochs", "100000")}
"""Real scripts, whose computation is waited for as rank 0 was measured to take alone; the other models' times are assumed."""


@dataclass(frozen=True)
class Domain:
    model: str
    cluster_name: str

    @property
    def name(self) -> str:
        return f"{self.model}.{self.cluster_name}"

    @property
    def command(self) -> tuple[str, ...]:
        words = EXAMPLES.get(self.model, ("benchmarks/models/script.py", self.model))
        return "python", str(ROOT / words[0]), *words[1:]

    @property
    def cluster_file(self) -> Path:
        return ROOT / "examples" / "clusters" / f"{self.cluster_name}.yaml"

    def cluster(self) -> Cluster:
        return read_cluster(self.cluster_file)

    def given_profile(self) -> Workload | None:
        """What the emulated accelerators wait for; None: what is measured."""
        return MODELS[self.model].workload() if self.model in MODELS else None

    def touched_bytes(self) -> Mapping[str, int]:
        """See `Model.touched_bytes`."""
        return MODELS[self.model].touched_bytes if self.model in MODELS else {}


DOMAINS = {domain.name: domain for model in (*GENERATED, *EXAMPLES) for domain in (Domain(model, cluster) for cluster in CLUSTERS)}


def domain(name: str) -> Domain:
    if name not in DOMAINS:
        raise InvalidInput(f"a domain must be one of {', '.join(DOMAINS)}, but is {name!r}")
    return DOMAINS[name]
