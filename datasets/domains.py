"""The domains of `collect.py`: a model on a cluster, with emulated accelerators or real ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from autotune.jobs.campaign.generated_models import MODELS
from autotune.jobs.campaign.setups import Setup, generated_setup, script_setup
from autotune.records import Accelerators

ROOT = Path(__file__).parents[1]
PAIRS = (
    ("resnet_digits", "four_hosts"),
    ("gpt_text", "four_hosts_uneven"),
    ("vgg", "two_hosts_two_devices"),
    ("densenet", "four_hosts"),
    ("transformer", "four_hosts_fast"),
    ("embedding", "four_hosts_half"),
    ("lstm_text", "four_hosts_mixed"),
    ("ncf_ratings", "two_hosts_two_devices"),
    ("layers", "four_hosts"),
    ("vgg", "four_hosts"),
    ("transformer", "four_hosts_uneven"),
    ("densenet", "two_hosts_two_devices_half"),
    ("resnet_digits", "four_hosts_uneven"),
    ("gpt_text", "two_hosts_two_devices"),
    ("vgg", "four_hosts_mixed"),
    ("embedding", "two_hosts_two_devices"),
    ("ncf_ratings", "four_hosts"),
    ("lstm_text", "four_hosts_half"),
    ("densenet", "four_hosts_mixed"),
    ("transformer", "two_hosts_two_devices_half"),
)
"""With emulated accelerators. The first twelve cover every model and every kind of cluster."""
REAL = (("resnet_digits", "two_hosts"), ("gpt_text", "two_hosts"))
"""With real computation: one rank per core of a machine with two cores."""


def _setup(model: str, cluster: str, accelerators: Accelerators = Accelerators.EMULATED) -> Setup:
    file = ROOT / "datasets" / "clusters" / f"{cluster}.yaml"
    file = file if file.exists() else ROOT / "examples" / "clusters" / f"{cluster}.yaml"
    if model in MODELS:
        return generated_setup(model, file, accelerators)
    return script_setup(ROOT / "examples" / f"{model}.py", file, accelerators)


_SETUPS = [_setup(*pair) for pair in PAIRS] + [_setup(*pair, Accelerators.REAL) for pair in REAL]
DOMAINS: Mapping[str, Setup] = MappingProxyType({setup.name: setup for setup in _SETUPS})
